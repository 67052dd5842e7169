"""Whole jobs on a switch whose updates are of the first k workers."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from torch import nn

import offbeat
from tests.switch.served import served_switch
from tests.workers import run_workers

STEPS, SLOW_S = 10, 0.25


class Job:
    """A job whose gradients are known: in step s worker r has (r + 1) 2^-s for each of its parameters; steps of 1 add
    them up.
    """

    def __init__(self, plan: offbeat.Plan) -> None:
        self.run = offbeat.init(plan, timeout=timedelta(seconds=4))
        torch.manual_seed(0)
        self.model = nn.Linear(700, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.replica, self.optimizer = self.run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.digests: list[str] = []
        self.ends: list[float] = []

    def step(self, number: int) -> None:
        gradient = (self.run.rank + 1) * 2.0**-number
        (self.replica(torch.ones(1, 700)).sum() * gradient).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.digests.append(hashlib.sha256(self.model.weight.detach().numpy().tobytes()).hexdigest())
        self.ends.append(time.monotonic())


def train(
    plan: offbeat.Plan, slow: int | None = None, victim: int | None = None
) -> tuple[list[str], list[float], list[float]]:
    """Train; digests after each step, when steps ended, and all values that there are in the end.

    Args:
        slow: the worker that computes longer in step 2.
        victim: the worker that is killed in the middle.
    """
    job = Job(plan)
    for number in range(STEPS):
        if job.run.rank == slow and number == 2:
            time.sleep(SLOW_S)
        if job.run.rank == victim and number == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        job.step(number)
    moved = (-job.model.weight.detach()).unique().tolist()
    job.run.close()
    return job.digests, job.ends, moved


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_nobody_waits_for_who_comes_too_late_and_all_have_the_same_bits(late: str) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.KSync(2, late), fabric=offbeat.Switch(address))  # type: ignore[arg-type]
        results = run_workers(3, train, plan, 1)
    assert all(digests == results[0][0] for digests, _, _ in results)
    assert len(set(results[0][0])) == STEPS
    (_, first, _), (_, slow, _), (_, third, _) = results
    assert max(first[5], third[5]) < slow[2]
