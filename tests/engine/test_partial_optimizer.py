"""An optimizer that steps its parameters some at a time makes the same of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat.engine.partial_optimizer import PartialOptimizer


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(4)]


def groups(ps: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": ps[:3]}, {"params": ps[3:], "lr": 0.5}]


def test_some_at_a_time_in_any_order_is_all_at_once() -> None:
    whole, parts = parameters(), parameters()
    optimizer, other = (torch.optim.Adam(groups(ps), lr=0.1, weight_decay=0.01) for ps in (whole, parts))
    partial = PartialOptimizer(other)
    for step in range(3):
        gradients = [torch.full((3,), 1.0 + step + i) for i in range(4)]
        for p, gradient in zip(whole, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        partial.capture()
        partial.step([(parts[3], gradients[3]), (parts[0], gradients[0])])
        partial.step([(parts[2], gradients[2]), (parts[1], gradients[1])])
        assert all(p.grad is None for p in parts)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    states = [sorted(one.state_dict()["state"].items()) for one in (optimizer, other)]
    assert str(states[0]) == str(states[1])


def test_it_goes_by_the_learning_rate_of_when_it_was_told() -> None:
    (p, *_) = ps = parameters()
    optimizer = torch.optim.SGD(ps, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    partial = PartialOptimizer(optimizer)
    partial.capture()
    optimizer.step()
    schedule.step()
    partial.step([(p, torch.ones(3))])
    assert p.tolist() == [-1.0] * 3


class Own(torch.optim.SGD):
    """Nobody knows what it does."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Own])
def test_what_may_look_at_all_parameters_is_not_stepped_in_parts(kind: type[torch.optim.Optimizer]) -> None:
    assert kind.__name__ in PartialOptimizer(kind(parameters(), lr=0.1)).objection  # type: ignore[call-arg]
    assert not PartialOptimizer(torch.optim.AdamW(parameters())).objection
