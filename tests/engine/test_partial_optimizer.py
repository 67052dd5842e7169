"""An optimizer that steps its parameters some at a time makes the same of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

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


@pytest.mark.parametrize("overflows", [False, True])
def test_what_a_scaler_told_it_holds_for_the_step_that_it_was_told_for(*, overflows: bool) -> None:
    """A fused optimizer unscales by itself; `GradScaler` takes back what it told as soon as `step` has returned."""
    (p, *_) = ps = parameters()
    optimizer: Any = torch.optim.SGD(ps, lr=1.0, fused=True)
    partial = PartialOptimizer(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(overflows))
    partial.capture()
    del optimizer.grad_scale, optimizer.found_inf
    partial.step([(p, torch.full((3,), 8.0))])
    assert p.tolist() == [0.0 if overflows else -2.0] * 3


def test_hooks_for_all_optimizers_run_where_the_script_steps_and_nowhere_else() -> None:
    (p, *_) = ps = parameters()
    optimizer, calls = torch.optim.SGD(ps, lr=1.0), list[object]()
    optimizer.step()  # torch puts the hooks around `step` when the first optimizer of a class is made
    hook = register_optimizer_step_post_hook(lambda one, *_: calls.append(one))
    try:
        partial = PartialOptimizer(optimizer)
        partial.capture()
        partial.step([(p, torch.ones(3))])
    finally:
        hook.remove()
    assert calls == []
    assert p.tolist() == [-1.0] * 3


def test_what_holds_for_a_forward_pass_does_not_hold_for_it() -> None:
    """Adafactor multiplies matrices, which autocast would do in bfloat16."""
    came_to = []
    for within in (False, True):
        p = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        optimizer = torch.optim.Adafactor([p], lr=0.1)
        partial = PartialOptimizer(optimizer)
        partial.capture()
        with torch.autocast("cpu", torch.bfloat16, enabled=within), torch.inference_mode(mode=within):
            partial.step([(p, torch.linspace(-1.0, 1.0, 12).reshape(3, 4))])
        came_to.append(p.detach().clone())
    assert torch.equal(*came_to)
