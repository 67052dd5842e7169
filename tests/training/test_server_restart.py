"""A server that is killed comes back, and a worker that was left behind comes back; in real processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import OffbeatError
from offbeat.sync import ASP, BSP, KSync, Policy, RoundRobin
from tests.cli.commands import alive
from tests.training.server_jobs import (
    Counter,
    die_half_way,
    join,
    kept,
    kill,
    look,
    serve,
    told,
    wait_for_end,
    wait_for_snapshot,
)
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

    import offbeat
    from offbeat.protocol.status import WorkerStatus

STEPS = 40
OUT = ("gone", "evicted")  # lost, or taken out by the policy
PATIENCE_S = 120.0  # starting a server takes long on a machine that does much else


# -- the server is killed ----------------------------------------------------------------------------------------------


def with_kills(
    folder: Path, policy: Policy, kills: dict[int, int], shards: int, number: signal.Signals = signal.SIGKILL
) -> tuple[float, int]:
    """Rank 0 kills a shard after each of these of its steps. Rounds that count at the end, and kills that hit."""
    keepers = serve(folder, shards, snapshots=str(folder / "server"), every=5, restarts=5)
    hits = 0
    with join(policy, folder, PATIENCE_S) as run:
        counter = Counter(run)
        for step in range(STEPS):
            counter.step()
            if keepers and step in kills:
                wait_for_snapshot(folder / "server")
                os.kill(kept(keepers[kills[step]]), number)
                hits += 1
        run.settle()
        return counter.count, hits


def lost_in(texts: list[str]) -> int:
    """Contributions that were reported as lost, in all."""
    return sum(int(number) for text in texts for number in re.findall(r"\((\d+) contributions?, ", text))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "shards", "kills"),
    [
        (ASP(), 1, {13: 0}),
        pytest.param(BSP(), 1, {11: 0, 12: 0}, marks=pytest.mark.slow),
        pytest.param(ASP(), 2, {9: 1, 20: 0}, marks=pytest.mark.slow),
    ],
    ids=["ASP", "BSP-twice", "two-shards"],
)
def test_what_does_not_count_is_reported_as_lost(
    tmp_path: Path, policy: Policy, shards: int, kills: dict[int, int]
) -> None:
    """Each contribution moves the parameters by half a round, so these say how many count."""
    results = run_workers(2, with_kills, tmp_path, policy, kills, shards, timeout_s=290)
    assert results[0][1] == len(kills), "the fault was injected"
    texts = told(tmp_path, 0)
    assert len(texts) == len(kills)
    assert all(text.startswith("The parameter server was restarted and resumes from version") for text in texts)
    (rounds,) = {count for count, _ in results}
    assert 2 * rounds + lost_in(texts) == 2 * STEPS
    wait_for_end(tmp_path / "server")
    assert os.listdir(tmp_path / "server" / "0") == ["lock"], "the job has ended well: nobody needs the snapshots"


def with_damage(folder: Path, shards: int, killed: int) -> tuple[float, int]:
    """Rank 0 cuts off the first shard's newest snapshot, and kills a shard. Rounds that count, and steps that it made.

    All go on until there are two snapshots, and for some steps behind that.
    """
    keepers = serve(folder, shards, snapshots=str(folder / "server"), every=5, restarts=5)
    hit, steps, after = folder / "hit", 0, 0
    with join(ASP(), folder, PATIENCE_S) as run:
        counter = Counter(run)
        while after < 10:
            counter.step()
            steps, after = steps + 1, after + hit.exists()
            if keepers and not after and len(list((folder / "server" / "0").glob("*.snapshot"))) > 1:
                first = kept(keepers[0])
                os.kill(first, signal.SIGSTOP)  # it writes no other one meanwhile
                os.truncate(max((folder / "server" / "0").glob("*.snapshot")), 1000)
                kill(kept(keepers[killed]))
                os.kill(first, signal.SIGCONT)
                hit.touch()
        run.settle()
        return counter.count, steps


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("shards", "killed"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_if_the_newest_snapshot_is_damaged_all_go_on_from_the_one_before(
    tmp_path: Path, shards: int, killed: int
) -> None:
    """Also if the shard that has it is not the one that was killed; and what came between the two is reported."""
    results = run_workers(2, with_damage, tmp_path, shards, killed, timeout_s=290)
    assert (tmp_path / "hit").exists(), "the fault was injected"
    texts = told(tmp_path, 0)
    assert texts
    assert all(text.startswith("The parameter server was restarted and resumes from version") for text in texts)
    (rounds,) = {count for count, _ in results}
    assert 2 * rounds + lost_in(texts) == sum(steps for _, steps in results)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_shard_that_is_told_to_stop_is_started_again(tmp_path: Path, shards: int) -> None:
    """By somebody else than the process that looks after it; it has left a snapshot, so nothing is lost."""
    results = run_workers(2, with_kills, tmp_path, ASP(), {13: 0}, shards, signal.SIGTERM, timeout_s=290)
    assert results[0][1] == 1, "the fault was injected"
    (text,) = told(tmp_path, 0)
    assert text.startswith("The parameter server was restarted and resumes from version")
    assert "nothing is lost." in text
    assert {count for count, _ in results} == {STEPS}


def stopped_with_its_keeper(folder: Path) -> bool:
    """Whether a shard ends when the process that looks after it is told to stop, and leaves its snapshot."""
    (keeper,) = serve(folder, snapshots=str(folder / "server"), restarts=5)
    run = join(ASP(), patience_s=0)
    counter = Counter(run)
    counter.step()
    wait_for_snapshot(folder / "server")
    shard = kept(keeper)
    os.kill(keeper, signal.SIGTERM)
    wait_for_end(folder / "server")
    os.waitpid(keeper, 0)
    run._session.close(OffbeatError("the server was stopped"))
    return not alive({shard}) and bool(list((folder / "server").glob("*/*.snapshot")))


def test_who_looks_after_a_shard_can_be_told_to_stop(tmp_path: Path) -> None:
    assert run_workers(1, stopped_with_its_keeper, tmp_path) == [True]


def killed_without_snapshots(folder: Path) -> tuple[str, float]:
    pids = serve(folder)
    run = join(ASP(), None, PATIENCE_S)
    counter, began_s = Counter(run), 0.0
    try:
        for step in itertools.count():  # nobody is done before the server is killed
            if pids and step == 10:
                kill(pids[0])
            began_s = time.monotonic()
            counter.step()
    except OffbeatError as error:
        return str(error), time.monotonic() - began_s
    raise AssertionError("the loop has no end")


@pytest.mark.slow
def test_nobody_waits_for_a_server_that_will_not_come_back(tmp_path: Path) -> None:
    for said, waited_s in run_workers(2, killed_without_snapshots, tmp_path):
        assert "Cannot reconnect to the job" in said
        assert re.search(r"[^.?][.?] Either it has ended, or its parameter server was killed", said)
        assert waited_s < 15


# -- a worker is left behind -------------------------------------------------------------------------------------------


def left_behind(folder: Path, policy: Policy, *, stops: bool) -> tuple[int, float, list[WorkerStatus]]:
    """Rank 1 does nothing for a while, stopped or busy; the others go on, and wake it when it has been given up."""
    serve(folder)
    rank, pid = int(os.environ["RANK"]), folder / "pid"
    woken = folder / "woken"
    with join(policy) as run:
        counter = Counter(run)
        for step in range(STEPS):
            if rank == 1 and step == 12:
                pid.write_text(str(os.getpid()))
                if stops:
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    while not woken.exists():
                        time.sleep(0.01)
                run.state_dict()  # also of one that has to come again first
            if rank == 0 and step == 20:
                while not pid.exists() or look(run)[1].phase not in OUT:
                    counter.step()  # others have to wait for it, or nobody misses it
                woken.touch()
                os.kill(int(pid.read_text()), signal.SIGCONT)
                while look(run)[1].phase in OUT:
                    counter.step()
            counter.step()
        run.settle()
        return run.step, counter.count, look(run)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "stops"), [(ASP(), True), (BSP(), True), (RoundRobin(compute_lease_s=0.5, warmup=3), False)], ids=repr
)
def test_who_was_left_behind_comes_back(tmp_path: Path, policy: Policy, stops: bool) -> None:
    results = run_workers(2, left_behind_job, tmp_path, policy, stops, timeout_s=110)
    (_, count, seen), (steps, other, _) = results
    assert steps == STEPS, "each step came to its end"
    assert count == other, "all have the same parameters after settle"
    assert seen[1].dropped == 1, "what it had computed meanwhile was outdated"
    assert seen[1].applied == STEPS - 1


def left_behind_job(folder: Path, policy: Policy, stops: bool) -> tuple[int, float, list[WorkerStatus]]:
    return left_behind(folder, policy, stops=stops)


# -- a worker dies while it pushes -------------------------------------------------------------------------------------


def half_way(folder: Path, policy: Policy, shards: int, at: int) -> tuple[int, float, list[WorkerStatus]]:
    """Rank 1 dies in the middle of a push that would move the parameters by ten times as much as others."""
    serve(folder, shards)
    with join(policy) as run:
        counter = Counter(run)
        for step in range(STEPS):
            if int(os.environ["RANK"]) == 1 and step == at:
                die_half_way(run)
                counter.step(10.0)
            counter.step()
        run.settle()
        return run.step, counter.count, look(run)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "shards"),
    [
        (BSP(), 2),
        (ASP(), 1),
        pytest.param(BSP(), 1, marks=pytest.mark.slow),
        pytest.param(ASP(), 2, marks=pytest.mark.slow),
        pytest.param(RoundRobin(), 2, marks=pytest.mark.slow),
        pytest.param(KSync(2, late="carry"), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_half_of_a_contribution_is_in_no_element(tmp_path: Path, policy: Policy, shards: int) -> None:
    """All elements agree about how many contributions there were; the one that came in part is reported as lost."""
    results = run_workers(3, half_way, tmp_path, policy, shards, 12, faulty=1, timeout_s=110)
    (steps, count, seen), _, (others, other, _) = results
    assert steps == others == STEPS
    assert count == other, "all have the same parameters after settle"
    assert (seen[1].phase, seen[1].applied, seen[1].lost) == ("gone", 12, 1)
    if policy == BSP():
        assert count == STEPS


def stopped_for_too_long(folder: Path) -> str:
    serve(folder)
    rank, pid = int(os.environ["RANK"]), folder / "pid"
    run = join(ASP())
    counter = Counter(run)
    for step in range(STEPS):
        if rank == 1 and step == 12:
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            counter.step()
        except OffbeatError as error:
            return str(error)
    while not pid.exists() or look(run)[1].phase not in OUT:
        time.sleep(0.05)
    end(run)
    os.kill(int(pid.read_text()), signal.SIGCONT)
    return ""


def end(run: offbeat.Run) -> None:
    """Leave, and wait until the server has ended because nobody is left."""
    address = os.environ["OFFBEAT_SERVERS"]
    run.close()
    host, _, port = address.partition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            return
        time.sleep(0.02)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_job_that_has_ended_meanwhile_is_said_in_a_sentence(tmp_path: Path) -> None:
    _, said = run_workers(2, stopped_for_too_long, tmp_path, timeout_s=110)
    assert "Cannot reconnect to the job" in said
    assert "Either it has ended" in said
