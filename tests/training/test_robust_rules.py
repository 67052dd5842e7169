"""Workers that lie to a parameter server: with a rule their lies move nothing, or no further than the rule says."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat import ASP, BSP, SSP, KSync, LocalSGD, ParameterServer, Plan, RoundRobin
from offbeat.errors import PlanError
from offbeat.robust import FABA, CentredClipping, FLTrust, Krum, MeaMed, Mean, Median, Phocas, Rule, TrimmedMean
from tests.workers import run_workers

WORLD, STEPS, LR = 5, 6, 0.2
LIAR = WORLD - 1


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (torch.randn(4, 6, generator=generator).double(), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(STEPS)
    ]


def lie(net: nn.Module, how: str) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        if how == "sign":
            parameter.grad.mul_(-6)
        elif how == "nan":
            parameter.grad.fill_(float("nan"))
        elif how == "huge":
            parameter.grad.mul_(1e30)


def train(plan: Plan, how: str) -> list[torch.Tensor]:
    net, rank = model(), int(os.environ["RANK"])
    with offbeat.init(plan) as run:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        replica, optimizer = run.prepare(net, optimizer)
        for x, y in batches(rank):
            F.cross_entropy(replica(x), y).backward()
            if rank == LIAR:
                lie(net, how)
                optimizer.param_groups[0]["lr"] = 1e9 if how == "lr" else LR
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
        return [parameter.detach().clone() for parameter in net.parameters()]


def simulated_start() -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model().parameters()]


def simulate(rule: Rule, how: str) -> list[torch.Tensor]:
    """All workers in one loop, and one update of what the rule makes of their gradients."""
    net = model()
    for step in range(STEPS):
        gradients: list[list[torch.Tensor]] = []
        for rank in range(WORLD):
            net.zero_grad()
            x, y = batches(rank)[step]
            F.cross_entropy(net(x), y).backward()
            if rank == LIAR:
                lie(net, how)
            gradients.append([p.grad.detach().clone() for p in net.parameters() if p.grad is not None])
        for index, parameter in enumerate(net.parameters()):
            stack = torch.stack([one[index].reshape(-1) for one in gradients])
            stack = stack[torch.isfinite(stack).all(1)]
            parameter.data -= LR * rule(stack).view_as(parameter)
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "how"),
    [
        *((rule, how) for rule in (Median(), TrimmedMean(1), Phocas(1), MeaMed(1)) for how in ("sign", "huge")),
        *((Median(), how) for how in ("nan", "lr")),
    ],
    ids=repr,
)
def test_one_liar_of_five(rule: Rule, how: str) -> None:
    expected = simulate(rule, how)
    for got in run_workers(WORLD, train, Plan(fabric=ParameterServer(block_bytes=4096), rule=rule), how):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_the_mean_is_what_it_was() -> None:
    """As a rule, and without one: the same, but for rounding."""
    plans = [Plan(fabric=ParameterServer(block_bytes=4096), rule=rule) for rule in (None, Mean())]
    without, with_one = (run_workers(WORLD, train, plan, "")[0] for plan in plans)
    for one, other in zip(without, with_one, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("sync", [LocalSGD(2), KSync(4)], ids=repr)
def test_changes_and_the_first_k(sync: Any) -> None:
    """With each of them the model goes where honest workers take it, and not a thousand times as far."""
    results = run_workers(WORLD, train, Plan(sync=sync, fabric=ParameterServer(), rule=Median()), "huge")
    for got in results:
        moved = sum(float((one - other).norm()) for one, other in zip(got, simulated_start(), strict=True))
        assert 0.01 < moved < 5
        for one, other in zip(got, results[0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plan(rule=Median()), "nobody sees one by itself: use fabric=ParameterServer()"),
        (lambda: Plan(rule=Krum(1)), "nobody sees one by itself: use fabric=ParameterServer()"),
        (lambda: Plan(sync=ASP(), fabric=ParameterServer(), rule=Krum(1)), "nobody to compare it with: use BSP()"),
        (
            lambda: Plan(fabric=ParameterServer(), rule=FLTrust()),
            "Cannot combine by FLTrust(): it compares contributions with a reference on trusted data, "
            "which only a validator can bring: give it as validator=, or "
            "use Median(), MultiKrum(...) or GeometricMedian(), which compare them with each "
            "other - at `plan.rule`.",
        ),
        (
            lambda: Plan(fabric=ParameterServer(), rule=FABA(1)).check_world(257),
            "Cannot compare 257 contributions by FABA(faulty=1): 256 is the most. Use Median(), which looks at each "
            "coordinate, or KSync(...) - at `plan.rule`.",
        ),
        (
            lambda: Plan(fabric=ParameterServer(), rule=FABA(1), tuning=offbeat.BatchTuning()),
            "it counts all workers alike",
        ),
        (lambda: Plan(sync=ASP(), fabric=ParameterServer(), rule=Median()), "nobody to compare it with: use BSP()"),
        (lambda: Plan(sync=SSP(4), fabric=ParameterServer(), rule=Median()), "nobody to compare it with"),
        (lambda: Plan(sync=RoundRobin(), fabric=ParameterServer(), rule=Median()), "nobody to compare it with"),
        (lambda: Plan(sync=KSync(1), fabric=ParameterServer(), rule=Median()), "nobody to compare it with"),
        (
            lambda: Plan(fabric=ParameterServer(), rule=Median(), tuning=offbeat.BatchTuning()),
            "it counts all workers alike",
        ),
        (lambda: Plan(fabric=ParameterServer(), rule=TrimmedMean), "made with (...)"),  # type: ignore[arg-type]
        (lambda: Plan(fabric=ParameterServer(), rule=TrimmedMean(2)).check_world(4), "Use faulty=1, or more workers"),
        (
            lambda: Plan(sync=KSync(3), fabric=ParameterServer(), rule=TrimmedMean(2)).check_world(9),
            "needs at least 5 contributions, and there are 3",
        ),
        (lambda: Plan(fabric=ParameterServer(), rule=Median()).swapped('sync = { kind = "ASP" }'), "nobody to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make()


def test_a_plan_with_a_rule_is_read_back() -> None:
    for rule in (Median(), TrimmedMean(2), Phocas(1), Krum(1), CentredClipping(), None):
        plan = Plan(fabric=ParameterServer(), rule=rule)
        assert Plan.from_toml(plan.to_toml()) == plan
    assert "rule" not in Plan().to_toml(), "older plans keep their digest"
    assert Plan(sync=BSP()).rule is None
