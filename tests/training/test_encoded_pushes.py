"""Codecs at a parameter server: workers encode blocks, shards decode them, and what is not sent is not lost."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import (
    ASP,
    BSP,
    GRBS,
    QSGD,
    SSP,
    Cast,
    Dense,
    ErrorFeedback,
    KSync,
    LocalSGD,
    ParameterServer,
    Plan,
    RandomK,
    RoundRobin,
    Sign,
    TopK,
)
from offbeat.robust import Median
from tests.training.server_jobs import look
from tests.workers import run_workers

WORLD, STEPS, NUMEL = 3, 12, 3000
FABRIC = ParameterServer(block_bytes=4096)
FEEDBACK: list[Any] = [
    ErrorFeedback(TopK(0.05)),
    ErrorFeedback(GRBS(8, 16)),
    ErrorFeedback(Sign()),
    ErrorFeedback(Cast("bf16")),
    ErrorFeedback(RandomK(0.1, "private")),
]


def gradients(rank: int) -> torch.Tensor:
    """Known ones [steps, D], whatever the parameters are."""
    return torch.randn(STEPS, NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def train(plan: Plan) -> dict[str, Any]:
    """Push known gradients with a learning rate of 1: what the parameters moved by, and what this worker has kept."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(NUMEL, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    given = torch.zeros(NUMEL, dtype=torch.float64)
    with offbeat.init(plan, seed=3) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for gradient in gradients(rank):
            (model.weight.flatten() * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            given += gradient
        run.settle()
        state = run._session.models.prepared[0].codec_state.state_dict()
        kept = sum(
            (state[kind]["weight"]["residual"] for kind in ("gradients", "deltas") if state.get(kind)),
            torch.zeros(NUMEL, dtype=torch.float64),
        )
        dropped = sum(worker.dropped for worker in look(run))
        sent = run._session.context.metrics.total_sent_bytes
    return {"moved": -model.weight.detach().flatten(), "given": given, "kept": kept, "dropped": dropped, "sent": sent}


def train_each(plans: list[Plan]) -> list[dict[str, Any]]:
    """One after the other in the same processes, which take longer to start than to train."""
    return [train(plan) for plan in plans]


POLICIES: list[Any] = [
    BSP(),
    ASP(),
    *(pytest.param(policy, marks=pytest.mark.slow) for policy in (SSP(3), RoundRobin(), LocalSGD(2))),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_updates_and_residuals_are_the_gradients(policy: Any) -> None:
    plans = [Plan(sync=policy, codec=codec, fabric=FABRIC) for codec in FEEDBACK]
    for plan, results in zip(plans, zip(*run_workers(WORLD, train_each, plans), strict=True), strict=True):
        moved = results[0]["moved"]
        whole = sum((one["given"] - one["kept"] for one in results), torch.zeros(NUMEL, dtype=torch.float64)) / WORLD
        assert all(bool(one["kept"].any()) for one in results), f"{plan.codec!r} left nothing"
        torch.testing.assert_close(moved, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_what_a_policy_drops_stays_a_residual() -> None:
    """Updates are of the first of three; what came too late is sent with a later gradient."""
    plans = [Plan(sync=KSync(1), codec=codec, fabric=FABRIC) for codec in FEEDBACK[:3]]
    for results in zip(*run_workers(WORLD, train_each, plans), strict=True):
        whole = sum((one["given"] - one["kept"] for one in results), torch.zeros(NUMEL, dtype=torch.float64))
        assert sum(one["dropped"] for one in results) > 0, "nothing was dropped"
        torch.testing.assert_close(results[0]["moved"], whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_unbiased_codecs_need_no_residual_and_plain_ones_change_nothing() -> None:
    plans = [Plan(codec=codec, fabric=FABRIC) for codec in (Dense(), QSGD(8), RandomK(0.5, is_unbiased=True))]
    results = run_workers(WORLD, train_each, plans)[0]
    dense, rounded, drawn = (one["moved"] for one in results)
    expected = sum((gradients(rank).sum(0) for rank in range(WORLD)), torch.zeros(NUMEL).double()) / WORLD
    torch.testing.assert_close(dense, expected, rtol=1e-12, atol=1e-12)
    assert 0 < float((rounded - dense).norm()) < 0.05 * float(dense.norm())
    parts = [one["sent"] / (8 * NUMEL * STEPS) for one in results]
    assert parts == pytest.approx([1, (1 + 4 / 512) / 8, 0.5], rel=0.05)  # float64, and a scale for 512 elements
    assert 0.3 < float((drawn * dense).sum() / dense.square().sum()) < 1.7


@pytest.mark.slow
def test_a_rule_compares_what_was_decoded() -> None:
    """Blocks that all workers send: where none is sent, the median is zero."""
    plans = [Plan(codec=ErrorFeedback(GRBS(4, 16)), fabric=FABRIC, rule=Median())]
    ((one,), *_) = run_workers(WORLD, train_each, plans)
    zero = Plan(codec=ErrorFeedback(GRBS(4, 16)), fabric=FABRIC)
    ((other,), *_) = run_workers(WORLD, train_each, [zero])
    assert torch.equal(one["moved"] != 0, other["moved"] != 0), "both move what is sent"
    assert not torch.equal(one["moved"], other["moved"])
