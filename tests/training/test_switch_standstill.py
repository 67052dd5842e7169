"""Whole jobs whose switch, or a worker, stands still for longer than links may be silent: nobody is lost for that."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import offbeat
from tests.switch.killed_switch import KilledSwitch
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

STEPS, SILENT_S, STILL_S = 16, 3.0, 4.0  # it is given up after twice the silence
SYNCS = [
    offbeat.BSP(),
    pytest.param(offbeat.SSP(2), marks=pytest.mark.slow),
    pytest.param(offbeat.KSync(2), marks=pytest.mark.slow),
]


def train(plan: offbeat.Plan, mark: Path, still: int | None = None, then: str = "CONT") -> tuple[str, float, list[str]]:
    """Move parameters by as much as the worker's number says in each step; their digest, the longest step, and what
    was told.

    Args:
        mark: that rank 1 leaves in the middle.
        still: the rank that stands still then.
        then: the signal that it gets in the end.
    """
    told = listen()
    run = offbeat.init(plan, timeout=timedelta(seconds=SILENT_S))
    torch.manual_seed(0)
    model = nn.Linear(3000, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    longest_s = 0.0
    for step in range(STEPS):
        began_s = time.monotonic()
        if run.rank == 1 and step == STEPS // 2:
            mark.touch()
        if run.rank == still and step == STEPS // 2:
            stand_still(then)
        (prepared(torch.ones(1, 3000)).sum() * (run.rank + 1) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
        longest_s = max(longest_s, time.monotonic() - began_s)
    run.settle()
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    run.close()
    return digest, longest_s, told


def stand_still(then: str, still_s: float = STILL_S) -> None:
    """Stop this process until another one has it go on, or end."""
    with subprocess.Popen(["/bin/sh", "-c", f"sleep {still_s}; kill -{then} {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("sync", SYNCS)
def test_nobody_is_lost_to_a_switch_that_stands_still(
    sync: offbeat.BSP | offbeat.SSP | offbeat.KSync, tmp_path: Path
) -> None:
    with KilledSwitch(timeout_s=SILENT_S) as switch:
        plan = offbeat.Plan(sync=sync, fabric=offbeat.Switch(switch.address))
        with switch.struck_at(tmp_path / "mark", lambda: switch.stand_still(STILL_S)):
            results = run_workers(3, train, plan, tmp_path / "mark")
    assert len({digest for digest, *_ in results}) == 1
    for _, longest_s, told in results:
        assert longest_s > STILL_S - 0.5
        assert "The switch is back, and all go on." in told


@pytest.mark.parametrize("sync", SYNCS)
def test_a_worker_that_stands_still_is_not_lost(
    sync: offbeat.BSP | offbeat.SSP | offbeat.KSync, tmp_path: Path
) -> None:
    with KilledSwitch(timeout_s=SILENT_S) as switch:
        plan = offbeat.Plan(sync=sync, fabric=offbeat.Switch(switch.address))
        results = run_workers(3, train, plan, tmp_path / "mark", 2)
    assert len({digest for digest, *_ in results}) == 1
    assert results[2][1] > STILL_S


@pytest.mark.slow
@pytest.mark.parametrize("sync", [offbeat.BSP(), offbeat.SSP(2), offbeat.KSync(2)])
def test_one_that_is_killed_while_it_stands_still_is_lost(
    sync: offbeat.BSP | offbeat.SSP | offbeat.KSync, tmp_path: Path
) -> None:
    with KilledSwitch(timeout_s=SILENT_S) as switch:
        plan = offbeat.Plan(sync=sync, fabric=offbeat.Switch(switch.address))
        results = run_workers(3, train, plan, tmp_path / "mark", 2, "KILL", faulty=2)
    assert results[0][0] == results[1][0]
