"""The history of a run that goes to a server and comes back: each stretch by itself, and what is on both sides."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import offbeat
from offbeat.audit import verify
from offbeat.fabric import ParameterServer
from offbeat.history import FabricMigrated, HistoryLog, write_log
from offbeat.sync import SSP, LocalSGD
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.fabric import FabricSpec

SERVER = ParameterServer(block_bytes=4096)


def cross(folder: str, fabric: FabricSpec) -> None:
    os.environ["OFFBEAT_HISTORY"] = folder
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    here = offbeat.Plan(fabric=fabric)
    with offbeat.init(here) as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))

        def steps(count: int = 1) -> None:
            for _ in range(count):
                prepared(torch.full((2, 40), 1.0 + run.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        for policy in (SSP(2), LocalSGD(3)):
            steps(4)
            run.swap(sync=policy, fabric=SERVER)
            while not run.plan.is_served:
                steps()
            steps(6)
            if run.rank == 1:
                run.swap(here)
            while run.plan.is_served:
                steps()
        steps(4)


@pytest.mark.parametrize(
    "fabric",
    [offbeat.ProcessGroup(), pytest.param(offbeat.Elastic(), marks=pytest.mark.slow)],
    ids=["group", "elastic"],
)
def test_each_stretch_is_checked_and_both_sides_of_every_border(fabric: FabricSpec, tmp_path: Path) -> None:
    run_workers(3, cross, str(tmp_path), fabric)
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.checked == {1, 2, 3}
    assert (result.jobs, result.borders, result.lives) == (5, 4, 2)
    assert not result.notes
    assert result.updates > 0
    logs = [HistoryLog(path) for path in sorted(tmp_path.glob("worker-1*.log"))]
    records = {log.path: list(log) for log in logs}
    path, record = next((path, one) for path, of in records.items() for one in of if isinstance(one, FabricMigrated))
    changed = [
        FabricMigrated(record.border, record.step, record.digest ^ 1) if one is record else one for one in records[path]
    ]
    write_log(path, changed)
    result = verify(tmp_path)
    assert [one.law for one in result.violations] == [1] * len(result.violations)
    assert "Where one stretch ends and another begins" in result.violations[0].what
