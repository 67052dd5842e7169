"""The reducer where things do not go as planned."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.errors import ModelError, WorkerLostError
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


def skipped_step() -> list[float]:
    """The optimizer's step is left out once, as GradScaler does; then rank 1 reaches no parameter."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(1, 1, bias=False)
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        seen = []
        for step in range(4):
            output = replica(torch.ones(1, 1))
            loss = torch.zeros(1, requires_grad=True).sum() if step == 2 and rank == 1 else output.sum()
            loss.backward()
            if step != 1:
                optimizer.step()
            seen.append(-1.0 if model.weight.grad is None else model.weight.grad.item())
            optimizer.zero_grad()
        return seen


def test_a_step_that_was_left_out_is_no_exchange_of_the_next() -> None:
    assert run_workers(2, skipped_step) == [[1.0, 1.0, 0.5, 1.0]] * 2


class Either(nn.Module):
    """One of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)])

    def forward(self, which: int, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers[which](x)
        return output


def unused_keep() -> bool:
    """A gradient that nobody adds to stays as it was, to the bit, whatever the codec rounds."""
    model = Either()
    with offbeat.init(offbeat.Plan(codec=offbeat.Cast("bf16"))) as run:
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for which in (0, 1):
            replica(which, torch.full((1, 3), 1 / 3)).sum().backward()
        grad = model.layers[0].weight.grad
        assert isinstance(grad, torch.Tensor)
        exact = torch.full((1, 3), 0.123456789)
        grad.copy_(exact)
        replica(1, torch.full((1, 3), 1 / 3)).sum().backward()
        return torch.equal(grad, exact)


def test_a_gradient_that_nobody_adds_to_is_kept() -> None:
    assert run_workers(3, unused_keep) == [True] * 3


class Table(nn.Module):
    """A sparse gradient that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(i, self.weight, sparse=True)


def sparse_unknown() -> str:
    model = Table()
    with offbeat.init() as run:
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            replica(torch.tensor([1])).sum().backward()
        except ModelError as error:
            return str(error)
    return "nothing was said"


def test_a_sparse_gradient_out_of_the_blue() -> None:
    for text in run_workers(2, sparse_unknown):
        assert "Cannot exchange the gradient of weight: it is sparse" in text


def crossed() -> str:
    """Two models, used in another order on rank 1: nothing can match, and nobody may hang on the way out either."""
    rank = int(os.environ["RANK"])
    models = [nn.Linear(2, 2), nn.Linear(3, 3)]
    try:
        with offbeat.init(timeout=timedelta(seconds=2)) as run:
            replicas = [run.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))[0] for m in models]
            for which in (rank, 1 - rank):
                replicas[which](torch.ones(1, which + 2)).sum().backward()
    except WorkerLostError as error:
        return str(error)
    return "nothing was said"


def test_models_used_in_another_order() -> None:
    first, second = run_workers(2, crossed, timeout_s=30)
    assert "waits elsewhere" in first + second
    assert "of model 2" in first + second


def test_a_backward_cut_short_is_not_passed_over() -> None:
    (text,) = run_workers(1, interrupted)
    assert "cut short by an exception" in text


def frozen_late() -> list[float]:
    """Rank 1 freezes a parameter between forward and backward; the others' gradient still moves it, on both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(5):
            loss = replica(torch.randn(2, 4)).square().mean()
            if step == 2 and run.rank == 1:
                model[0].weight.requires_grad_(False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def test_a_parameter_that_is_frozen_on_one_rank_stays_the_same_on_all() -> None:
    first, second = run_workers(2, frozen_late)
    assert first == second
