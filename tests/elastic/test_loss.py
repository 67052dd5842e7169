"""All-reduce that goes on without the workers it loses: what is left is equal, and right, and soon on its way."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import offbeat
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 4


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count(lost: int, at: int, steps: int) -> tuple[list[float], float, list[str]]:
    """Each gradient is 1 + rank: the mean tells who took part. Returns all moves, the longest step, what was said."""
    said = listen()
    run = offbeat.init(offbeat.Plan(fabric=offbeat.Elastic()), timeout=timedelta(seconds=3))
    model = nn.Linear(300, 300, bias=False)
    nn.init.zeros_(model.weight)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    moves, worst = [], 0.0
    for step in range(steps):
        before, began_s = model.weight.detach().clone(), time.monotonic()
        prepared(torch.ones(1, 300)).sum().mul(1.0 + run.rank).backward()
        if (run.rank, step) == (lost, at):
            kill()
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, time.monotonic() - began_s)
        (moved,) = (before - model.weight.detach()).unique().tolist()
        moves.append(moved)
    run.close()
    return moves, worst, said


@pytest.mark.parametrize("lost", [0, 2])
def test_a_worker_that_is_killed_is_left_out_of_the_mean(lost: int) -> None:
    results = run_workers(WORLD, count, lost, 3, 8, faulty=lost)
    left = [rank for rank in range(WORLD) if rank != lost]
    before, after = sum(1.0 + rank for rank in range(WORLD)) / WORLD, sum(1.0 + rank for rank in left) / len(left)
    for rank in left:
        moves, worst_s, said = results[rank]
        assert moves[:4] == [before] * 4  # it died behind its part of step 3
        assert moves[4:] == pytest.approx([after] * 4)
        assert worst_s < 1.5, worst_s
        assert any(f"Rank {lost} died" in text and "goes on" in text for text in said), said
