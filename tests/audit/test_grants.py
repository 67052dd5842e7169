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
from tests.switch.served import served_switch
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 60
POLICIES = (offbeat.SSP(0), offbeat.SSP(4), offbeat.ASP(), offbeat.SSP(1))


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
