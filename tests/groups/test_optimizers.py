"""Tests of optimizers of many models: each row is what torch.optim makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat.groups import SGD, Adam, AdamW, Grid, GroupDataError

CASES: list[tuple[Any, Any]] = [
    (SGD(), {}),
    (SGD(momentum=0.9), {"momentum": 0.9}),
    (SGD(momentum=0.9, weight_decay=0.1), {"momentum": 0.9, "weight_decay": 0.1}),
    (Adam(), {}),
    (Adam(betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1), {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    (AdamW(), {}),
    (AdamW(weight_decay=0.3), {"weight_decay": 0.3}),
]


@pytest.mark.parametrize(("ours", "settings"), CASES, ids=lambda case: repr(case))
def test_each_row_is_what_torch_makes_of_it(ours: Any, settings: dict[str, Any]) -> None:
    chance = torch.Generator().manual_seed(0)
    begin, pull = torch.randn(5, 37, generator=chance), torch.randn(20, 5, 37, generator=chance)
    rates, steps = torch.tensor([1e-3, 3e-3, 0.01, 0.03, 0.1], dtype=torch.float64), [20, 20, 13, 7, 1]
    rows = begin.clone()
    slots = [torch.zeros_like(rows) for _ in range(ours.slots)]
    for number in range(20):
        active = sum(count > number for count in steps)
        mine = [slot[:active] for slot in slots]
        ours.step(rows[:active], pull[number, :active].clone(), mine, rates[:active], number + 1)
    for at, (rate, count) in enumerate(zip(rates.tolist(), steps, strict=True)):
        row = begin[at].clone().requires_grad_()
        theirs = getattr(torch.optim, type(ours).__name__)([row], lr=rate, foreach=False, **settings)
        for number in range(count):
            row.grad = pull[number, at].clone()
            theirs.step()
        torch.testing.assert_close(rows[at], row.detach(), rtol=1e-6, atol=1e-6)
        for slot, name in zip(slots, _state_names(ours), strict=True):
            assert torch.equal(slot[at], theirs.state[row][name]), "what is kept has no learning rate in it"


def _state_names(ours: Any) -> list[str]:
    return ["exp_avg", "exp_avg_sq"] if isinstance(ours, Adam) else ["momentum_buffer"][: ours.slots]


@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=-1.0), SGD(momentum=1.0), Adam(betas=(0.9, 1.0)), Adam(betas=0.9), AdamW(lr=Grid(1.0))],  # type: ignore[arg-type]
)
def test_a_value_that_cannot_be_used_is_named(optimizer: Any) -> None:
    with pytest.raises(GroupDataError, match=r"Cannot use (lr|momentum|betas)="):
        optimizer.check()


def test_weight_decay_is_not_half_of_itself() -> None:
    """Weights with nothing to learn decay by lr * weight_decay in AdamW, and follow the penalty in SGD."""
    for ours in (AdamW(weight_decay=0.5), SGD(weight_decay=0.5)):
        rows = torch.ones(1, 3)
        slots = [torch.zeros_like(rows) for _ in range(ours.slots)]
        ours.step(rows, torch.zeros(1, 3), slots, torch.tensor([0.1], dtype=torch.float64), 1)
        torch.testing.assert_close(rows, torch.full((1, 3), 0.95))
