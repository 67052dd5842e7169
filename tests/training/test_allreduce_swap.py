"""Swaps without a server: all go over behind the same exchange, and nothing is lost or counted twice."""

from __future__ import annotations

import hashlib
import random
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import PlanError
from offbeat.sync import BSP, LocalSGD, OuterSGD, Policy
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fabric import FabricSpec

FABRICS: dict[str, Callable[[], FabricSpec]] = {"gloo": offbeat.ProcessGroup, "elastic": offbeat.Elastic}
POLICIES: tuple[Policy, ...] = (BSP(), LocalSGD(2), LocalSGD(3), LocalSGD(4, after=2), BSP(), LocalSGD(5))


def join(fabric: str, policy: Policy = BSP()) -> offbeat.Run:  # noqa: B008
    return offbeat.init(offbeat.Plan(sync=policy, fabric=FABRICS[fabric]()), timeout=timedelta(seconds=5))


def count(fabric: str, swaps: int, every: int) -> tuple[float, int, list[str], str]:
    """Each step moves every element by -1, whoever takes it: what is left out or counted twice shows."""
    said, r = listen(), random.Random(3)
    run = join(fabric)
    model = nn.Linear(500, 3, bias=False)
    nn.init.zeros_(model.weight)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    steps = every * swaps
    for step in range(steps):
        if step % every == 0:
            policy, asker = r.choice(POLICIES), r.choice([0, 1, 2, None])
            if asker in (None, run.rank):
                run.swap(sync=policy)
        prepared(torch.ones(1, 500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.settle()
    (value,) = model.weight.unique().tolist()
    run.close()
    return value, steps, [text for text in said if "decides when" in text], repr(run.plan.sync)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_hundred_swaps_lose_nothing_and_count_nothing_twice(fabric: str) -> None:
    results = run_workers(3, count, fabric, 100, 7)
    assert len({policy for _, _, _, policy in results}) == 1
    for value, steps, _, _ in results:
        assert value == -steps
    assert sum(len(said) for _, _, said, _ in results) > 50  # they were swaps indeed; said once each


def digest(model: nn.Module) -> str:
    parts = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(optimizer_name: str) -> list[str]:
    """Digests after each step; the data differ, so that optimizers differ after steps of the workers' own."""
    run = join("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    made: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=1e-3)
        if optimizer_name == "Adam"
        else torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    )
    prepared, optimizer = run.prepare(model, made)
    torch.manual_seed(run.rank)
    digests = []
    for step in range(30):
        if step == 8:
            run.swap(sync=LocalSGD(4, outer=OuterSGD()))
        if step == 18:
            run.swap(sync=BSP())
        prepared(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(model))
    run.close()
    return digests


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_replicas_are_equal_again_after_steps_of_their_own(optimizer: str) -> None:
    one, other = run_workers(2, train, optimizer)
    same = [a == b for a, b in zip(one, other, strict=True)]
    assert all(same[:9])
    assert not all(same[9:20])
    assert all(same[21:]), same  # what the optimizers had gathered was averaged, too


def refused() -> tuple[list[str], list[str], str]:
    said, raised = listen(), []
    run = join("gloo")
    model = nn.Linear(3, 3)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for part in ({"sync": offbeat.SSP(2)}, {"bucket_bytes": 7}):
        with pytest.raises(PlanError) as caught:
            run.swap(**part)
        raised.append(str(caught.value))
    run.swap(sync=LocalSGD(2 + run.rank))
    for _ in range(3):
        prepared(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    run.close()
    return raised, said, repr(run.plan.sync)


def test_what_cannot_be_leaves_the_plan_as_it_is() -> None:
    for raised, said, policy in run_workers(2, refused):
        assert raised[0].startswith("Cannot use SSP(bound=2) on ProcessGroup(): ")
        assert raised[1].startswith("Cannot swap 26214400 for 7 while training")
        assert policy == "BSP()"
        assert all("for 2 others at once" in text for text in said)
