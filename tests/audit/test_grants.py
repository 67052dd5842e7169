"""What is proved of runs whose workers a switch's table let go on, and what is found where it was tampered with."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch

import offbeat
from offbeat.audit import verify
from offbeat.history import HistoryLog, StepGranted, write_log
from tests.switch.killed_switch import KilledSwitch
from tests.switch.local_switch import served_switch
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 60
POLICIES = (offbeat.SSP(0), offbeat.SSP(4), offbeat.ASP(), offbeat.SSP(1))


DYNAMIC = (offbeat.DSSP(1, 8), offbeat.SSP(0), offbeat.DSSP(0, 3), offbeat.ASP(), offbeat.DSSP(2, 2))


def dynamic(folder: Path, plan: offbeat.Plan, swaps: bool) -> None:
    """Have rank 0 make its steps five times as fast as the others, with a policy that may let it go further by name."""
    net = torch.nn.Linear(64, 4)
    with offbeat.init(plan, history=folder, timeout=timedelta(seconds=5)) as run:
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for step in range(STEPS):
            time.sleep(0.04 if run.rank else 0.008)
            (model(torch.ones(2, 64)).sum() / 64).backward()
            optimizer.step()
            optimizer.zero_grad()
            if swaps and run.rank == 1 and step % 9 == 8:
                run.swap(sync=DYNAMIC[step // 9 % len(DYNAMIC)])
        run.settle()


def test_one_worker_is_allowed_more_and_no_more_than_the_policy_promises(tmp_path: Path) -> None:
    with served_switch() as address:
        run_workers(2, dynamic, tmp_path, offbeat.Plan(sync=offbeat.DSSP(1, 6), fabric=offbeat.Switch(address)), False)
    result = verify(tmp_path)
    assert result.holds, result.violations
    path = next(tmp_path.rglob("worker-0*"))
    records = list(HistoryLog(path))
    beyond = [one for one in records if isinstance(one, StepGranted) and one.clock - one.low > one.window]
    assert beyond, "it was never let further than the lower bound"
    assert max(one.clock - one.low for one in beyond) <= 6
    assert all(one.until > one.clock for one in beyond)
    for change, says in (({"until": 0}, "it may be 1 ahead"), ({"low": beyond[-1].clock - 7}, "it may be 6 ahead")):
        changed = msgspec.structs.replace(beyond[-1], **change)
        write_log(path, [changed if one is beyond[-1] else one for one in records])
        assert any(says in violation.what for violation in verify(tmp_path).violations), says


def test_allowances_and_swaps_of_the_policy_together(tmp_path: Path) -> None:
    with served_switch() as address:
        run_workers(3, dynamic, tmp_path, offbeat.Plan(sync=offbeat.DSSP(0, 4), fabric=offbeat.Switch(address)), True)
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.releases == 3 * STEPS


THERE_AND_BACK = {8: offbeat.SSP(0), 20: offbeat.BSP(), 32: offbeat.SSP(3), 44: offbeat.LocalSGD(2), 52: offbeat.SSP(1)}


def go_there_and_back(folder: Path, plan: offbeat.Plan) -> None:
    """Go from the stream to a table and back, again and again: each table's clocks begin at 0."""
    net = torch.nn.Linear(300, 4)
    with offbeat.init(plan, history=folder, timeout=timedelta(seconds=5)) as run:
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for step in range(STEPS + 10):
            time.sleep(0.02 if run.rank else 0.01)
            (model(torch.ones(2, 300)).sum() / 640).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.rank == 1 and step in THERE_AND_BACK:
                run.swap(sync=THERE_AND_BACK[step])
        assert run.plan.sync == offbeat.SSP(1)
        run.settle()


def test_tables_that_follow_each_other_are_not_taken_for_one(tmp_path: Path) -> None:
    with served_switch() as address:
        run_workers(2, go_there_and_back, tmp_path, offbeat.Plan(fabric=offbeat.Switch(address)))
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.checked == {1, 2, 3}


def train(folder: Path, plan: offbeat.Plan, mark: Path | None = None) -> int:
    """Make steps of uneven length, and swap the policy again and again; how often it was.

    Args:
        mark: what rank 1 leaves in the middle.
    """
    torch.manual_seed(0)
    net, swaps = torch.nn.Linear(64, 4), 0
    with offbeat.init(plan, history=folder, timeout=timedelta(seconds=5)) as run:
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for step in range(STEPS):
            if run.rank == 1 and step == STEPS // 2 and mark is not None:
                mark.touch()
            time.sleep(0.004 * (1 + (step * (run.rank + 2)) % 3))
            (model(torch.ones(2, 64)).sum() / 64).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.rank == 0 and step % 8 == 3:
                run.swap(sync=POLICIES[step // 8 % len(POLICIES)])
                swaps += 1
        run.settle()
    return swaps


def test_each_step_is_granted_by_one_policy_however_often_it_is_swapped(tmp_path: Path) -> None:
    with served_switch() as address:
        run_workers(3, train, tmp_path, offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address)))
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.checked == {1, 3}
    assert result.releases == 3 * STEPS
    assert result.compared == 3
    epochs = {
        one.epoch for path in tmp_path.rglob("worker-*") for one in HistoryLog(path) if isinstance(one, StepGranted)
    }
    assert len(epochs) > 3
    tampered(tmp_path)


def test_the_same_holds_when_the_switch_is_restarted_in_between(tmp_path: Path) -> None:
    with KilledSwitch() as switch, switch.struck_at(tmp_path / "mark", switch.restart):
        plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(switch.address))
        run_workers(3, train, tmp_path / "history", plan, tmp_path / "mark")
    result = verify(tmp_path / "history")
    assert result.holds, result.violations
    assert result.checked == {1, 3}
    assert result.releases == 3 * STEPS


def tampered(folder: Path) -> None:
    """What is wrong in one worker's history is found."""
    path = next(folder.rglob("worker-1*"))
    before = list(HistoryLog(path))
    places = [index for index, one in enumerate(before) if isinstance(one, StepGranted) and one.clock > one.low > 0]
    for change, says in (
        ({"low": 0, "window": 0}, "it may be 0 ahead"),
        ({"window": 17}, "granted by two windows"),
        ({"low": 0}, "knew less|ahead of step 0"),
    ):
        records = list(before)
        for index in places:
            one = records[index]
            assert isinstance(one, StepGranted)
            records[index] = msgspec.structs.replace(one, **change)
        write_log(path, records)
        found = verify(folder)
        assert any(_matches(says, violation.what) for violation in found.violations), (says, found.violations)
    write_log(path, before)


def _matches(says: str, what: str) -> bool:
    return any(one in what for one in says.split("|"))
