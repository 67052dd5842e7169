"""The reducer where things do not go as planned."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.errors import ModelError
from tests.workers import run_workers


def interrupted() -> Any:
    """An exception in the middle of backward, caught by the user, must not be followed by silence."""

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("boom")

    with offbeat.init() as run:
        first, second = nn.Linear(4, 4), nn.Linear(4, 2)
        model = nn.Sequential(first, second)
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        replica(torch.ones(1, 4)).sum().backward()
        first.register_forward_hook(lambda module, inputs, output: Boom.apply(output))  # type: ignore[no-untyped-call]
        with contextlib.suppress(ValueError):
            replica(torch.ones(1, 4)).sum().backward()
        try:
            replica(torch.ones(1, 4))
        except ModelError as error:
            return str(error)
    return "nothing was said"


def test_a_backward_cut_short_is_not_passed_over() -> None:
    (text,) = run_workers(1, interrupted)
    assert "cut short by an exception" in text
