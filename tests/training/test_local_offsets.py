"""What is not sent of local steps at a server stays in the worker's own parameters: carried into the next contribution,
or dropped with it.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import (
    ASP,
    GRBS,
    SSP,
    Carry,
    Dense,
    ErrorFeedback,
    ErrorReset,
    KSync,
    LocalSGD,
    LookAhead,
    ParameterServer,
    Plan,
    PowerSGD,
    RandomK,
    RoundRobin,
    Switch,
    TopK,
)
from offbeat.errors import PlanError
from offbeat.robust import Median
from tests.resume_check import is_the_same_when_resumed
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

WORLD, STEPS, NUMEL, EVERY = 3, 12, 2000, 3
FABRIC = ParameterServer(block_bytes=4096)
INNER: list[Any] = [GRBS(8, 16), TopK(0.05)]


def gradient(rank: int, step: int) -> torch.Tensor:
    """A known one [D], whatever the parameters are."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(NUMEL, generator=generator, dtype=torch.float64)


def train(plan: Plan, meeting: Path | None = None) -> dict[str, Any]:
    """Step by known gradients with a learning rate of 1, and look at the server's and at this worker's parameters."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(NUMEL, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    given, own, common = torch.zeros(NUMEL, dtype=torch.float64), [], []
    with offbeat.init(plan, seed=3) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(STEPS):
            (model.weight.flatten() * gradient(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            given += gradient(rank, step)
            own.append(-model.weight.detach().flatten().clone())
            with run.averaged():
                common.append(-model.weight.detach().flatten().clone())
            assert torch.equal(own[-1], -model.weight.detach().flatten()), "its own parameters are back"
        if meeting is not None:
            run.settle()
            meet(meeting / "settled", rank)  # all that was sent is in the parameters that come next
            for _ in range(EVERY):
                (model.weight.flatten() * 0).sum().backward()
                optimizer.step()
            own.append(-model.weight.detach().flatten().clone())
            meet(meeting / "looked", rank)  # who leaves has the others' shares grow
    return {"given": given, "own": own, "common": common}


def meet(where: Path, rank: int) -> None:
    """Wait until all are here."""
    where.mkdir(parents=True, exist_ok=True)
    (where / str(rank)).touch()
    while len(list(where.iterdir())) < WORLD:
        time.sleep(0.005)


def train_each(plans: list[Plan], meeting: Path | None = None) -> list[dict[str, Any]]:
    """One after the other in the same processes, which take longer to start than to train."""
    return [train(plan, None if meeting is None else meeting / str(n)) for n, plan in enumerate(plans)]


def zeros() -> torch.Tensor:
    return torch.zeros(NUMEL, dtype=torch.float64)


@pytest.mark.slow
def test_what_is_carried_is_in_the_consensus_or_in_the_offset() -> None:
    """ErrorReset and Carry are one algorithm where all wait: x_i - e_i is what the server has, on all workers."""
    codecs = [make(inner) for inner in INNER for make in (Carry, lambda inner: ErrorReset(inner, variant="explicit"))]
    plans = [Plan(sync=LocalSGD(EVERY), codec=codec, fabric=FABRIC) for codec in codecs]
    results = [list(one) for one in zip(*run_workers(WORLD, train_each, plans), strict=True)]
    for plan, of_workers in zip(plans, results, strict=True):
        for number in range(EVERY - 1, STEPS, EVERY):  # behind each contribution
            common = [one["common"][number] for one in of_workers]
            assert all(torch.equal(one, common[0]) for one in common), plan
            offsets = [one["own"][number] - one["common"][number] for one in of_workers]
            assert all(bool(offset.any()) for offset in offsets)
            given = [sum((gradient(rank, step) for step in range(number + 1)), zeros()) for rank in range(WORLD)]
            whole = sum((one - left for one, left in zip(given, offsets, strict=True)), zeros()) / WORLD
            torch.testing.assert_close(common[0], whole, rtol=1e-10, atol=1e-10)
    for carried, reset in zip(results[::2], results[1::2], strict=True):
        for one, other in zip(carried, reset, strict=True):
            assert torch.equal(one["common"][-1], other["common"][-1])


@pytest.mark.slow
def test_what_is_dropped_leads_one_interval_and_is_gone() -> None:
    plans = [Plan(sync=LocalSGD(EVERY), codec=LookAhead(inner), fabric=FABRIC) for inner in INNER]
    for of_workers in zip(*run_workers(WORLD, train_each, plans), strict=True):
        before, leads = zeros(), [zeros()] * WORLD
        for number in range(EVERY - 1, STEPS, EVERY):
            common = of_workers[0]["common"][number]
            assert all(torch.equal(one["common"][number], common) for one in of_workers)
            steps = [
                sum((gradient(rank, step) for step in range(number + 1 - EVERY, number + 1)), zeros())
                for rank in range(WORLD)
            ]
            leads = [one["own"][number] - common for one in of_workers]
            sent = sum((one - lead for one, lead in zip(steps, leads, strict=True)), zeros()) / WORLD
            torch.testing.assert_close(common - before, sent, rtol=1e-10, atol=1e-10)
            before = common


@pytest.mark.parametrize("policy", [ASP(), pytest.param(SSP(2), marks=pytest.mark.slow)], ids=repr)
def test_nobody_waits_and_nothing_is_lost(policy: Any, tmp_path: Path) -> None:
    """Each change moves the server by a worker's share of it; behind the last, pushed whole, nothing is left."""
    plans = [Plan(sync=LocalSGD(EVERY, policy=policy), codec=Carry(inner), fabric=FABRIC) for inner in INNER]
    for of_workers in zip(*run_workers(WORLD, train_each, plans, tmp_path), strict=True):
        whole = sum((one["given"] for one in of_workers), zeros()) / WORLD
        for one in of_workers:
            torch.testing.assert_close(one["own"][-1], whole, rtol=1e-10, atol=1e-10)


def test_a_rule_makes_the_consensus() -> None:
    """With the median in the place of the mean x_i - e_i is still what all have in common."""
    plan = Plan(sync=LocalSGD(EVERY), codec=Carry(GRBS(4, 16)), fabric=FABRIC, rule=Median())
    results = run_workers(WORLD, train, plan)
    for number in range(EVERY - 1, STEPS, EVERY):
        assert all(torch.equal(one["common"][number], results[0]["common"][number]) for one in results)
        assert all(bool((one["own"][number] != one["common"][number]).any()) for one in results)


def classifier() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(STEPS)
    ]


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def resume(plan: Plan, stop: int) -> bool:
    return is_the_same_when_resumed(plan, classifier, momentum, batches, stop)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Carry(GRBS(4, 4)), LookAhead(GRBS(4, 4)), ErrorReset(TopK(0.2), variant="explicit")])
def test_a_run_goes_on_to_the_bit_in_the_middle_of_an_interval(codec: Any) -> None:
    plan = Plan(sync=LocalSGD(EVERY), codec=codec, fabric=FABRIC)
    assert all(run_workers(2, resume, plan, 2 * EVERY + 1))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plan(codec=Carry()), "it is for workers of a server, which may go on at their own pace"),
        (lambda: Plan(codec=ErrorReset(Dense(), every=8), fabric=Switch()), "this fabric's switch has others for all"),
        (
            lambda: Plan(codec=LookAhead(), fabric=FABRIC, sync=ASP()),
            "Use sync=LocalSGD(8), or LocalSGD(8, policy=ASP()) to wait for nobody",
        ),
        (
            lambda: Plan(codec=ErrorReset(GRBS(8)), fabric=FABRIC, sync=LocalSGD(8, policy=ASP())),
            "Use LookAhead(GRBS(ratio=8)) or Carry(GRBS(ratio=8))",
        ),
        (lambda: Plan(codec=ErrorReset(every=8), fabric=FABRIC, sync=LocalSGD(8)), "both say how often is averaged"),
        (lambda: Plan(sync=LocalSGD(8, policy=ASP())), "only a server takes the changes of workers that go on"),
        (lambda: LocalSGD(8, policy=KSync(2)), "Cannot have KSync(k=2) decide about changes"),
        (lambda: LocalSGD(8, policy=RoundRobin()), "not every worker contributes alike with it"),
        (lambda: LocalSGD(8, policy=LocalSGD(2)), "not every worker contributes alike with it"),
        (lambda: Carry(PowerSGD(2)), "use a codec of one round, such as GRBS(8)"),
        (lambda: LookAhead(ErrorFeedback(GRBS(8))), "use GRBS(ratio=8)"),
        (lambda: Carry(RandomK(0.1, is_unbiased=True)), "would part from the common ones without end"),
        (lambda: ErrorFeedback(Carry()), "it keeps that in the worker's own parameters"),
        (
            lambda: Plan(codec=Carry(), fabric=FABRIC, sync=LocalSGD(2)).swapped('fabric = { kind = "ProcessGroup" }'),
            "it is for workers of a server",
        ),
    ],
)
def test_where_no_offset_can_be_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make()


def test_such_plans_are_read_back() -> None:
    for codec in (Carry(GRBS(5)), LookAhead(TopK(0.1)), ErrorReset(GRBS(5))):
        plan = Plan(sync=LocalSGD(4), codec=codec, fabric=FABRIC)
        assert Plan.from_toml(plan.to_toml()) == plan
    plan = Plan(sync=LocalSGD(4, policy=SSP(2)), codec=Carry(), fabric=FABRIC)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert "policy" not in Plan(sync=LocalSGD(4)).to_toml(), "older plans keep their digest"
