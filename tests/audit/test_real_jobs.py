"""Real jobs, with and without faults: their histories prove that every law holds."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.audit import AuditResult, contributions, verify
from offbeat.history import HistoryEnded, HistoryLog
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, Policy, RoundRobin
from tests.training.server_jobs import Counter, join, kept, kill, serve, wait_for_snapshot
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 30
PATIENCE_S = 120.0  # starting a server takes long on a machine that does much else
ALL = (
    BSP(),
    SSP(2),
    RoundRobin(),
    DSSP(1, 3),
    KSync(1),
    KSync(1, wait_s=0.02),
    Hybrid(BSP(), ASP(), groups=1),
    RoundRobin(strict=True),
    ASP(),
)


def recorded(folder: Path) -> AuditResult:
    """What is found in the history, once the server has written all of it."""
    history, deadline_s = folder / "history", time.monotonic() + 20
    while time.monotonic() < deadline_s:
        last = max(history.glob("coordinator*.log"), key=lambda path: HistoryLog(path).header.began_s)
        if isinstance(list(HistoryLog(last))[-1], HistoryEnded):
            return verify(history)
        time.sleep(0.05)
    raise AssertionError("the server has not ended")


def ended(result: AuditResult) -> str:
    """What is broken, for people who read a failed test."""
    return "\n".join(f"law {one.law}: {one.what}\n" + "\n".join(one.story) for one in result.violations)


def with_swaps(folder: Path, policies: tuple[Policy, ...]) -> float:
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    serve(folder, 2, history=str(folder / "history"))
    with join(policies[0]) as run:
        counter = Counter(run)
        for policy in (*policies[1:], None):
            for _ in range(6):
                counter.step()
            if policy is not None and run.rank == 0:
                run.swap(sync=policy)
        run.settle()
        return counter.count


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_of_every_policy_holds(tmp_path: Path) -> None:
    run_workers(2, with_swaps, tmp_path, ALL)
    result = recorded(tmp_path)
    assert result.holds, ended(result)
    assert result.swaps == len(ALL) - 1
    assert result.applied + result.dropped == 2 * 6 * len(ALL)
    assert result.lost == result.pending == result.twice == 0
    assert result.checked == {1, 2, 3}
    assert result.compared >= 2, "at least after `settle` both have the same"
    assert result.replayed > 4 * 2 * 6 * len(ALL)
    assert not result.notes


def with_server_killed(folder: Path, policy: Policy, kills: dict[int, int], shards: int) -> float:
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    where = {"snapshots": str(folder / "server"), "history": str(folder / "history")}
    keepers = serve(folder, shards, every=5, restarts=5, **where)
    with join(policy, folder, PATIENCE_S) as run:
        counter = Counter(run)
        for step in range(STEPS):
            counter.step()
            if keepers and step in kills:
                wait_for_snapshot(folder / "server")
                kill(kept(keepers[kills[step]]))
        run.settle()
        return counter.count


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "shards", "kills"),
    [
        (ASP(), 1, {13: 0}),
        (BSP(), 1, {11: 0, 12: 0}),
        (SSP(1), 2, {9: 1, 20: 0}),
    ],
    ids=["ASP", "BSP-twice", "two-shards"],
)
def test_a_server_that_is_killed(tmp_path: Path, policy: Policy, shards: int, kills: dict[int, int]) -> None:
    (rounds,) = set(run_workers(2, with_server_killed, tmp_path, policy, kills, shards, timeout_s=290))
    result = recorded(tmp_path)
    assert result.holds, ended(result)
    # One that is killed before its history first writes, a twentieth of a second on, has left nothing.
    assert 2 <= result.lives <= 1 + len(kills)
    # Half of a step each, but for whoever is back first, and steps while the other is not.
    shares = [one.share or 0.0 for one in contributions(tmp_path / "history") if one.fate == "applied"]
    assert len(shares) == result.applied
    assert sum(shares) == rounds, "as the parameters say"
    assert result.applied + result.lost + result.dropped == 2 * STEPS


def with_worker_killed(folder: Path, policy: Policy) -> float:
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    serve(folder, history=str(folder / "history"))
    with join(policy, patience_s=1.0) as run:
        counter = Counter(run)
        for step in range(STEPS):
            if run.rank == 2 and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            counter.step()
        run.settle()
        return counter.count


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    run_workers(3, with_worker_killed, tmp_path, SSP(2), faulty=2)
    result = recorded(tmp_path)
    assert result.holds, ended(result)
    assert result.files == 4
    assert 2 * STEPS + 9 <= result.applied + result.lost <= 2 * STEPS + 10


def with_a_checkpoint(folder: Path, alone: bool) -> float:
    """After six steps all go back to where they were after three; or, with `alone`, rank 0 has the server do so."""
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    serve(folder, 2, history=str(folder / "history"))
    with join(BSP()) as run:
        counter, state = Counter(run), dict[str, Any]()
        for step in range(12):
            counter.step()
            if step == 2:
                weight, state = counter.model.weight.detach().clone(), run.state_dict()
            if step == 5:
                with torch.no_grad():
                    counter.model.weight.copy_(weight)
                if alone:
                    run._session.context.history.record_loaded = lambda: None  # type: ignore[method-assign]  # on all: nobody knows of it
                run.load_state_dict(state)
            if step == 8 and run.rank == 0:
                run.swap(sync=ASP())
        run.settle()
        return counter.count


def test_a_checkpoint_that_all_load(tmp_path: Path) -> None:
    (count,) = set(run_workers(2, with_a_checkpoint, tmp_path, False))
    result = recorded(tmp_path)
    assert result.holds, ended(result)
    assert (result.replaced, result.swapped_by) == (1, ["rank 0"])
    assert 8 <= count <= 12


def test_parameters_that_were_put_behind_the_others_backs(tmp_path: Path) -> None:
    """As by a server that lets somebody: the others have loaded nothing there."""
    run_workers(2, with_a_checkpoint, tmp_path, True)
    result = recorded(tmp_path)
    assert not result.holds
    first = result.first(2)
    assert first is not None
    assert "Rank 0 replaced the parameters of model 0 at version 6 of life" in first.what
    assert "loaded no checkpoint there, as worker" in first.what
