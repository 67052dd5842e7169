"""Whole jobs on a switch's table whose plan has a controller."""

from __future__ import annotations

import itertools
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
from tests.switch.local_switch import served_switch
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

Pace = tuple[tuple[int, float], ...]  # from which step on a step takes how long


def train(plan: offbeat.Plan, steps: int, paces: tuple[Pace, ...], victim: int | None = None) -> tuple[list[str], str]:
    """Train; each step's policy, and what was said of the last swap.

    Args:
        paces: of each rank.
        victim: the worker that is killed in the middle.
    """
    run = offbeat.init(plan, timeout=timedelta(seconds=6))
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    policies = []
    for step in range(steps):
        if run.rank == victim and step == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep([seconds for since, seconds in paces[run.rank] if since <= step][-1])
        (prepared(torch.ones(4, 300)).sum() / 640).backward()
        optimizer.step()
        optimizer.zero_grad()
        policies.append(repr(run.plan.sync))
    said = [text for _, text in run._session.context.metrics.events if "decides when" in text]
    run.settle()
    run.close()
    return policies, "\n".join(said)


def job(
    plan: Callable[[str], offbeat.Plan], steps: int, *paces: Pace, victim: int | None = None
) -> list[tuple[list[str], str]]:
    with served_switch() as address:
        workers = len(paces)
        return run_workers(workers, train, plan(address), steps, paces, victim, faulty=victim)


@pytest.mark.slow
def test_by_progress_goes_from_policy_to_policy_on_a_table() -> None:
    policies = (offbeat.SSP(0), offbeat.SSP(3), offbeat.ASP())
    controller = offbeat.ByProgress(policies, at=(0.25, 0.5), steps=80)
    results = job(
        lambda address: offbeat.Plan(sync=policies[0], fabric=offbeat.Switch(address), controller=controller),
        80, ((0, 0.01),), ((0, 0.02),),
    )  # fmt: skip
    (first, said), (second, other) = results
    assert first == second, "they went over at different steps"
    assert 20 <= first.index("SSP(bound=3)") <= 32
    assert 40 <= first.index("ASP()") <= 54
    assert "of 80 steps are done" in said
    assert "of 80 steps are done" in other


@pytest.mark.slow  # how soon it goes back depends on what else the machine does
def test_a_controller_goes_to_a_looser_policy_while_somebody_is_late_and_back() -> None:
    controller = offbeat.WaitThreshold(
        tight=offbeat.SSP(0), loose=offbeat.SSP(8), above=0.35, window_s=0.5, least_s=0.7
    )
    results = job(
        lambda address: offbeat.Plan(sync=offbeat.SSP(0), fabric=offbeat.Switch(address), controller=controller),
        280, ((0, 0.02),), ((0, 0.02), (40, 0.1), (80, 0.02)), ((0, 0.02),),
    )  # fmt: skip
    (first, said), *others = results
    assert all(first == other for other, _ in others)
    loose = first.index("SSP(bound=8)")
    assert 40 <= loose <= 75, "nobody was late before, and somebody was then"
    assert "SSP(bound=0)" in first[loose:], "it never went back"
    assert "spent waiting for others" in said


def stop_in_the_middle(plan: offbeat.Plan) -> tuple[list[str], list[float]]:
    """Train, and have rank 1 be stopped for a while; each step's policy, and when each step ended."""
    run = offbeat.init(plan, timeout=timedelta(seconds=8))
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    policies, ends = [], []
    for step in range(80):
        if run.rank == 1 and step == 30:
            with subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.02)
        (prepared(torch.ones(4, 300)).sum() / 640).backward()
        optimizer.step()
        optimizer.zero_grad()
        policies.append(repr(run.plan.sync))
        ends.append(time.monotonic())
    run.settle()
    run.close()
    return policies, ends


@pytest.mark.slow
def test_a_controller_hears_of_a_worker_that_is_stopped_while_it_is() -> None:
    controller = offbeat.WaitThreshold(tight=offbeat.SSP(0), loose=offbeat.ASP(), window_s=0.5, least_s=0.7)
    with served_switch(timeout=timedelta(seconds=8)) as address:
        plan = offbeat.Plan(sync=offbeat.SSP(0), fabric=offbeat.Switch(address), controller=controller)
        (policies, ends), (_, others) = run_workers(2, stop_in_the_middle, plan)
    assert max(after - before for before, after in itertools.pairwise(others)) > 2.9, "it was stopped"
    assert max(after - before for before, after in itertools.pairwise(ends)) < 2.5, "the other one waited for it"
    assert "ASP()" in policies


@pytest.mark.slow
def test_a_controller_goes_on_without_the_worker_that_asked_it() -> None:
    policies = (offbeat.SSP(1), offbeat.SSP(6))
    controller = offbeat.ByProgress(policies, at=(0.7,), steps=80)
    results = job(
        lambda address: offbeat.Plan(sync=policies[0], fabric=offbeat.Switch(address), controller=controller),
        80, ((0, 0.02),), ((0, 0.02),), ((0, 0.03),), victim=0,
    )  # fmt: skip
    (first, _), (second, _) = results[1:]
    assert first == second
    assert 56 <= first.index("SSP(bound=6)") <= 70


@pytest.mark.slow
def test_a_controller_goes_from_the_stream_to_the_table_and_back() -> None:
    policies = (offbeat.BSP(), offbeat.SSP(4), offbeat.LocalSGD(4))
    controller = offbeat.ByProgress(policies, at=(0.25, 0.5), steps=80)
    results = job(
        lambda address: offbeat.Plan(sync=policies[0], fabric=offbeat.Switch(address), controller=controller),
        80, ((0, 0.01),), ((0, 0.02),),
    )  # fmt: skip
    (first, _), (second, _) = results
    assert first == second
    assert list(dict.fromkeys(one.partition("(")[0] for one in first)) == ["BSP", "SSP", "LocalSGD"]
