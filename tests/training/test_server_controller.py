"""A controller in real processes: a worker that is stopped makes the policy looser, though it cannot answer."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat
from offbeat.control import ByProgress, WaitThreshold
from offbeat.fabric import ParameterServer
from offbeat.sync import ASP, BSP, SSP, LocalSGD
from tests.training.test_server_swap import LR, emitted
from tests.workers import run_workers

SERVER = ParameterServer(block_bytes=4096)
WORLD, STEPS, STOPS_AT = 3, 80, 20


def stop_oneself(folder: Path) -> tuple[torch.Tensor, list[str]]:
    """Rank 1 stops itself between two steps; rank 0 has it go on once another policy decides."""
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    model = nn.Linear(3000, 1, bias=False)
    nn.init.zeros_(model.weight)
    # It does not go back: with ASP rounds keep their size when others are done, so that the sum is exact.
    controller = WaitThreshold(above=0.5, below=1e-9, window_s=1.0, least_s=1.0)
    plan, seen = offbeat.Plan(fabric=SERVER, controller=controller), []
    with offbeat.init(plan, timeout=timedelta(seconds=20), run_dir=folder) as run:
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
    results = run_workers(WORLD, stop_oneself, tmp_path, timeout_s=50)
    everything = torch.stack([emitted(rank, step) for rank in range(WORLD) for step in range(STEPS)])
    for weight, _ in results:
        torch.testing.assert_close(weight, -LR * everything.sum(0) / WORLD, rtol=1e-3, atol=1e-3)
    assert "ASP()" in results[0][1], "rank 1 was stopped then, and had not answered"
    said = (tmp_path / "metrics.jsonl").read_text()
    assert "ASP() decides when workers may go on, not BSP() any more" in said
    assert "of the last 1 s were spent waiting for others, above 50%" in said


def go_by_progress() -> tuple[list[str], str]:
    model = nn.Linear(4, 1)
    controller = ByProgress((BSP(), SSP(2), LocalSGD(2)), at=(0.25, 0.5), steps=24)
    seen = []
    with offbeat.init(offbeat.Plan(fabric=SERVER, controller=controller)) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        for step in range(24):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            seen.append(type(run.plan.sync).__name__)
            if step == 18:
                run.swap(sync=BSP())
        run.settle()
        return seen, repr(run.plan.controller)


@pytest.mark.timeout(90)
def test_by_progress_until_a_person_takes_over() -> None:
    for seen, controller in run_workers(2, go_by_progress, timeout_s=60):
        assert [name for name, before in zip(seen, [None, *seen], strict=False) if name != before] == [
            "BSP",
            "SSP",
            "LocalSGD",
            "BSP",
        ]
        assert seen.index("SSP") in (6, 7, 8, 9)
        assert controller == "None"
