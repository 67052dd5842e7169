"""A controller in real processes: all go over together; it outlives the worker that asks it, and hears of who hangs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.control import ByProgress, WaitThreshold
from offbeat.sync import ASP, BSP, SSP, LocalSGD, OuterSGD
from offbeat.wire import swap_request
from tests.training.test_join import wait_for
from tests.training.test_swap import LR, emitted
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.control import Controller
    from offbeat.fabric import FabricSpec

FABRICS: dict[str, Callable[[], FabricSpec]] = {
    "group": offbeat.ProcessGroup,
    "elastic": offbeat.Elastic,
    "server": offbeat.ParameterServer,
}
TIMEOUT = timedelta(seconds=5)


def slow(*values: Any) -> Any:
    """Parameters of a test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def join(fabric: str, controller: Controller, folder: Path | None = None, timeout: timedelta = TIMEOUT) -> offbeat.Run:
    plan = offbeat.Plan(sync=controller.policies[0], fabric=FABRICS[fabric](), controller=controller)
    return offbeat.init(plan, timeout=timeout, run_dir=folder)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def changes(seen: Sequence[str]) -> list[tuple[int, str]]:
    """Behind which step, from 0, another policy decided, and which."""
    return [(step, now) for step, (now, before) in enumerate(zip(seen, [None, *seen], strict=False)) if now != before]


SCHEDULE = ByProgress((BSP(), LocalSGD(4), LocalSGD(2, outer=OuterSGD()), BSP()), at=(0.25, 0.5, 0.75), steps=40)
SERVER_SCHEDULE = ByProgress((BSP(), SSP(2), LocalSGD(2)), at=(0.25, 0.5), steps=40)


def go_by(fabric: str, folder: Path, taken_over_at: int | None) -> tuple[list[str], list[str], list[str], str]:
    """Which policy decided behind each step, digests, what was said, and the controller at the end."""
    said, seen, digests = listen(), [], []
    with join(fabric, SERVER_SCHEDULE if fabric == "server" else SCHEDULE, folder) as run:
        torch.manual_seed(0)
        model = nn.Linear(20, 3)
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        torch.manual_seed(run.rank)
        for step in range(40):
            if step == taken_over_at and run.rank == 2:
                run.swap(sync=LocalSGD(3))
            prepared(torch.randn(4, 20)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fabric == "server":
                time.sleep(0.02)  # a swap takes as long as it takes, not so many steps
            seen.append(repr(run.plan.sync))
            digests.append(digest(model))
        run.settle()
        return seen, [*digests, digest(model)], said, repr(run.plan.controller)


@pytest.mark.parametrize("fabric", ["group", slow("elastic")])
def test_a_schedule_goes_on_at_the_same_step_everywhere_and_always(fabric: str, tmp_path: Path) -> None:
    first = run_workers(3, go_by, fabric, tmp_path / "first", None)
    for seen, digests, said, controller in first:
        # Asked behind steps 10, 20, 30; what it wants is called out in the next exchange, every 4 or 2 steps.
        assert changes(seen) == [
            (0, repr(BSP())),
            (10, repr(LocalSGD(4))),
            (22, repr(LocalSGD(2, outer=OuterSGD()))),
            (30, repr(BSP())),
        ]
        assert controller == repr(SCHEDULE)
        assert len(said) == (3 if said is first[0][2] else 0)
        assert digests[30:] == first[0][1][30:]
    assert [text.partition(": ")[2].partition(" (")[0] for text in first[0][2]] == [
        "10 of 40 steps are done",
        "20 of 40 steps are done",
        "30 of 40 steps are done",
    ]
    records = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    events = [one for one in records if one["kind"] == "event" and one["what"] == "swap" and one["rank"] == 0]
    assert [one["text"] for one in events] == first[0][2]
    again = run_workers(3, go_by, fabric, tmp_path / "again", None)
    assert [one[:2] for one in again] == [one[:2] for one in first], "to the bit"


@pytest.mark.parametrize(
    ("fabric", "at"),
    [slow("group", 2), ("group", 9), slow("group", 10), ("server", 30)],  # with 9 and 10 both want something at once
)
def test_a_person_takes_over(fabric: str, at: int, tmp_path: Path) -> None:
    results = run_workers(3, go_by, fabric, tmp_path, at, timeout_s=60)
    for seen, digests, _, controller in results:
        assert changes(seen)[-1][1] == repr(LocalSGD(3))
        assert changes(seen)[-1][0] <= at + 5
        assert controller == "None"
        assert digests[-1] == results[0][1][-1]
        if fabric == "server":
            (_, began), (loose_at, loose), (local_at, local), _ = changes(seen)
            assert [began, loose, local] == [repr(policy) for policy in SERVER_SCHEDULE.policies]
            # SSP(2) lets a worker be two steps behind the others' progress.
            assert 10 <= loose_at < 20 <= local_at + 2
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    swaps = [one["text"] for one in events if one["kind"] == "event" and one["what"] == "swap"]
    assert "ByProgress(" in swaps[-1]
    assert "has let go of it" in swaps[-1]


def test_one_that_is_alone_goes_by_its_schedule_too(tmp_path: Path) -> None:
    ((seen, _, _, controller),) = run_workers(1, go_by, "group", tmp_path, None)
    assert [policy for _, policy in changes(seen)] == [*map(repr, SCHEDULE.policies)]
    assert controller == repr(SCHEDULE)


def test_one_that_is_alone_starts_no_server_for_its_controller(tmp_path: Path) -> None:
    ((seen, _, said, _),) = run_workers(1, go_by, "server", tmp_path, None)
    assert changes(seen) == [(0, repr(BSP()))]
    assert said == []


def be_asked_from_outside(fabric: str, folder: Path) -> tuple[str, str, str]:
    """Rank 1 leaves a wish as `offbeat swap` does; what the plan is in the end, and what was answered."""
    controller = ByProgress((BSP(), LocalSGD(4)), at=(0.001,), steps=10_000)
    with join(fabric, controller, folder) as run:
        model = nn.Linear(4, 1)
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        left, deadline_s = None, time.monotonic() + 15
        while run.plan.controller is not None:
            assert time.monotonic() < deadline_s, "nobody has looked"
            if left is None and run.rank == 1 and run.plan.sync != BSP():
                left = swap_request.post(folder, '[sync]\nkind = "LocalSGD"\nevery = 2\n')
            prepared(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    granted = swap_request.answered(folder, left) if left is not None else None
    return repr(run.plan.sync), repr(run.plan.controller), "" if granted is None else granted.text


@pytest.mark.parametrize("fabric", ["group", slow("elastic")])
def test_who_swaps_from_outside_takes_over_as_well(fabric: str, tmp_path: Path) -> None:
    results = run_workers(2, be_asked_from_outside, fabric, tmp_path)
    for policy, controller, _ in results:
        assert (policy, controller) == (repr(LocalSGD(2)), "None")
    assert "has let go of it" in results[1][2]


def be_late(fabric: str, late: int, folder: Path) -> tuple[list[str], list[str]]:
    """One worker takes longer in the middle of the job; sleep stands for what it computes."""
    said, seen = listen(), []
    controller = WaitThreshold(loose=LocalSGD(4), window_s=0.3, least_s=0.3, price=0.9)
    with join(fabric, controller, folder) as run:
        model = nn.Linear(4, 1)
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        for step in range(160):
            time.sleep(0.04 if run.rank == late and 30 <= step < 80 else 0.01)
            prepared(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(repr(run.plan.sync))
    return seen, said


@pytest.mark.parametrize("fabric", [slow("group"), "elastic"])
def test_who_is_late_makes_the_policy_looser_until_it_is_not(fabric: str, tmp_path: Path) -> None:
    results = run_workers(3, be_late, fabric, 1, tmp_path, timeout_s=50)
    for seen, _ in results:
        assert seen == results[0][0]
        (_, began), (loose_at, loose), (tight_at, tight), *_ = changes(seen)
        assert [began, loose, tight] == [repr(BSP()), repr(LocalSGD(4)), repr(BSP())]
        assert 30 <= loose_at < 80 <= tight_at
    first, second, *_ = results[0][1]
    assert "% of the last 0.3 s were spent waiting for others, above 30%" in first
    assert "% of the last 0.6 s would have been spent waiting for others, below 15%" in second


def lose_the_first(at: int) -> tuple[list[str], list[str], list[str]]:
    """Rank 0, who asks, is killed behind its part of a step."""
    said, seen, digests = listen(), [], []
    with join("elastic", ByProgress((BSP(), LocalSGD(3), BSP()), at=(0.25, 0.5), steps=40)) as run:
        torch.manual_seed(0)
        model = nn.Linear(20, 3)
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        torch.manual_seed(run.rank)
        for step in range(40):
            prepared(torch.randn(4, 20)).square().sum().backward()
            if (run.rank, step) == (0, at):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(repr(run.plan.sync))
            digests.append(digest(model))
    return seen, digests, said


@pytest.mark.parametrize("at", [slow(5), 10, slow(15)])  # with 10 it has called the others, and does not come to confer
def test_who_is_next_asks_when_the_first_is_lost(at: int) -> None:
    _, *left = run_workers(3, lose_the_first, at, faulty=0)
    for seen, digests, _ in left:
        assert seen == left[0][0]
        assert [policy for _, policy in changes(seen)] == [repr(BSP()), repr(LocalSGD(3)), repr(BSP())]
        assert changes(seen)[1][0] in (10, 11, 12)
        assert digests[30:] == left[0][1][30:]
    assert sum("20 of 40 steps are done" in text for text in left[0][2]) == 1


def come_late(folder: Path) -> tuple[dict[int, str], list[str]]:
    """The newcomer computes for longer than the others: by that the controller swaps."""
    said, seen, here = listen(), {}, folder
    if os.environ["RANK"] == "2":
        wait_for(here / "step-30")
    controller = WaitThreshold(loose=LocalSGD(4), below=1e-9, window_s=0.5, least_s=0.5)
    with join("elastic", controller) as run:
        model = nn.Linear(4, 1)
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        while run.step < 250:
            time.sleep(0.06 if run.rank == 2 else 0.02)
            prepared(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[run.step] = repr(run.plan.sync)
            (here / f"step-{run.step}").touch()
    return seen, said


@pytest.mark.slow
def test_a_newcomer_is_heard_of_like_the_others(tmp_path: Path) -> None:
    results = run_workers(2, come_late, tmp_path, newcomers=1)
    (swap,) = [text for text in results[0][1] if "decides when" in text]
    assert "spent waiting for others, above 30%" in swap
    came = min(results[2][0])
    for seen, _ in results:
        assert {step: policy for step, policy in seen.items() if step >= came} == results[2][0]
    assert results[0][0][came] == repr(BSP())
    assert results[0][0][250] == repr(LocalSGD(4))


def go_on(fabric: str, folder: Path, stop: int | None) -> tuple[list[str], list[str]]:
    """From the checkpoint, if there is one; until `stop`, where one is made. Each worker has its own."""
    path, seen, digests = folder / f"state-{os.environ['RANK']}.pt", [], []
    with join(fabric, ByProgress((BSP(), LocalSGD(4), BSP()), at=(0.25, 0.6), steps=40)) as run:
        torch.manual_seed(0)
        model = nn.Linear(20, 3)
        prepared, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
        begins = 0
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            run.load_state_dict(state["run"])
            begins = run.step
        for step in range(begins, stop or 40):
            torch.manual_seed(100 * step + run.rank)
            prepared(torch.randn(4, 20)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(repr(run.plan.sync))
            digests.append(digest(model))
        if stop is not None:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}
            torch.save(parts, path)
        if begins:
            path.unlink()
    return seen, digests


@pytest.mark.parametrize(
    ("fabric", "stop"), [slow("group", 5), slow("group", 10), ("group", 17), slow("elastic", 26), slow("group", 36)]
)
def test_a_resumed_job_goes_on_where_the_controller_was(fabric: str, stop: int, tmp_path: Path) -> None:
    whole = run_workers(2, go_on, fabric, tmp_path, None)
    before, after = run_workers(2, go_on, fabric, tmp_path, stop), run_workers(2, go_on, fabric, tmp_path, None)
    for rank in range(2):
        assert len({*whole[rank][0]}) == 2, "it has swapped"
        assert before[rank][0] + after[rank][0] == whole[rank][0]
        assert before[rank][1] + after[rank][1] == whole[rank][1], "to the bit"


WORLD, STEPS, STOPS_AT = 3, 80, 20


def stop_oneself(folder: Path) -> tuple[torch.Tensor, list[str]]:
    """Rank 1 stops itself between two steps; rank 0 has it go on once another policy decides."""
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    model, seen = nn.Linear(3000, 1, bias=False), []
    nn.init.zeros_(model.weight)
    # It does not go back: with ASP rounds keep their size when others are done, so that the sum is exact.
    controller = WaitThreshold(above=0.5, below=0.0, window_s=1.0, least_s=1.0)
    with join("server", controller, folder, timedelta(seconds=20)) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        to_go_on = rank == 0
        for step in range(STEPS):
            (model.weight * emitted(rank, step)).sum().backward()
            time.sleep(0.02)
            if rank == 1 and step == STOPS_AT:
                os.kill(os.getpid(), signal.SIGSTOP)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(repr(run.plan.sync))
            if to_go_on and step >= STOPS_AT and run.plan.sync == ASP() and is_stopped(folder):
                os.kill(int((folder / "pid1").read_text()), signal.SIGCONT)
                to_go_on = False
        run.settle()
        return model.weight.detach().clone().flatten(), seen


def is_stopped(folder: Path) -> bool:
    stat = Path(f"/proc/{(folder / 'pid1').read_text()}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def test_a_stopped_worker_is_not_waited_for_and_nothing_is_lost(tmp_path: Path) -> None:
    """At a server; it makes the policy looser, though it cannot answer."""
    results = run_workers(WORLD, stop_oneself, tmp_path, timeout_s=50)
    everything = torch.stack([emitted(rank, step) for rank in range(WORLD) for step in range(STEPS)])
    for weight, _ in results:
        torch.testing.assert_close(weight, -LR * everything.sum(0) / WORLD, rtol=1e-3, atol=1e-3)
    assert repr(ASP()) in results[0][1], "rank 1 was stopped then, and had not answered"
    said = (tmp_path / "metrics.jsonl").read_text()
    assert "ASP() decides when workers may go on, not BSP() any more" in said
    assert "of the last 1 s were spent waiting for others, above 50%" in said
