"""Whoever uses a gradient that is not here yet waits for it; who only asks whether there is one does not."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat.engine.pending_gradient import pending

if TYPE_CHECKING:
    from collections.abc import Callable


def parameter_with(uses: list[str]) -> torch.nn.Parameter:
    """A parameter whose gradient arrives when it is used: all ones, where it was zeros."""
    parameter, plain = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)

    def arrive() -> None:
        if not uses:
            plain.fill_(1)
        uses.append("used")

    parameter.grad = pending(plain, arrive)
    return parameter


def clip(parameter: torch.nn.Parameter) -> float:
    return float(torch.nn.utils.clip_grad_norm_([parameter], 10.0)) ** 2 / 3


def unscaled(parameter: torch.nn.Parameter) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))
    assert parameter.grad is not None
    return float(parameter.grad[0])


def stepped(parameter: torch.nn.Parameter) -> float:
    torch.optim.SGD([parameter], lr=1.0).step()
    return -float(parameter.detach()[1])


def zeroed(parameter: torch.nn.Parameter) -> float:
    torch.optim.SGD([parameter], lr=1.0).zero_grad(set_to_none=False)
    assert parameter.grad is not None
    return 1 - float(parameter.grad.sum())


@pytest.mark.parametrize(
    "use",
    [
        clip,
        unscaled,
        stepped,
        zeroed,
        lambda p: float(p.grad.norm()) ** 2 / 3,
        lambda p: float(p.grad[2]),
        lambda p: float(p.grad.data.max()),
        lambda p: float(p.grad.detach().numpy()[0]),
        lambda p: float(torch.stack([p.grad, p.grad]).sum()) / 6,
        lambda p: float(copy.deepcopy(p.grad)[1]),
    ],
)
def test_it_is_waited_for(use: Callable[[torch.nn.Parameter], float]) -> None:
    uses: list[str] = []
    assert use(parameter_with(uses)) == pytest.approx(1.0)
    assert uses


def test_nothing_else_waits() -> None:
    uses: list[str] = []
    parameter = parameter_with(uses)
    assert parameter.grad is not None
    kept = parameter.grad
    parameter.grad = None
    parameter.grad = kept
    torch.optim.SGD([parameter], lr=1.0).zero_grad()
    assert parameter.grad is None
    assert not uses
