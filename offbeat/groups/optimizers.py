"""Optimizers of many models at once: torch.optim's, on tensors that have a row for each model.

    SGD(lr=0.1, momentum=0.9)
    AdamW(lr=Grid(1e-2, 1e-3))       each model has a learning rate of its own

A step takes the operations of `torch.optim` in their order, so all results are equal to 1e-6 in float32; only the
product with the learning rate, a vector here, is rounded otherwise. A model that has ended is in no step: its row is
not passed. So all models of a step have taken equally many steps before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from offbeat.groups.search import Searched


class StackedOptimizer(Protocol):
    """The Protocol of an optimizer spec, a frozen dataclass; models in a step differ in `lr` alone."""

    @property
    def lr(self) -> float | Searched:
        """Return the learning rate."""

    @property
    def slots(self) -> int:
        """Return how many numbers are kept for each parameter between steps, 0 at first."""

    def check(self) -> None:
        """Check one configuration.

        Raises:
            GroupDataError: if it cannot be used.
        """

    def step(self, parameters: Tensor, gradients: Tensor, slots: Sequence[Tensor], rates: Tensor, number: int) -> None:
        """Change the parameters, and what is kept, in place.

        Args:
            parameters: (models, width).
            gradients: (models, width); they may be overwritten.
            slots: each (models, width).
            rates: (models,), float64: the learning rate of each.
            number: of the step, from 1 on.
        """


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: `torch.optim.SGD`."""

    lr: float | Searched = 1e-3
    momentum: float | Searched = 0.0
    weight_decay: float | Searched = 0.0

    @property
    def slots(self) -> int:
        return 1 if self.momentum else 0

    def check(self) -> None:
        _check_number("lr", self.lr)
        _check_number("weight_decay", self.weight_decay)
        _check_number("momentum", self.momentum, below=1.0)

    def step(self, parameters: Tensor, gradients: Tensor, slots: Sequence[Tensor], rates: Tensor, number: int) -> None:
        if self.weight_decay:
            gradients.add_(parameters, alpha=self.weight_decay)  # type: ignore[arg-type]
        if self.momentum:
            gradients = slots[0].mul_(self.momentum).add_(gradients)  # type: ignore[arg-type]
        parameters.addcmul_(gradients, _column(rates, parameters), value=-1)


@dataclass(frozen=True)
class Adam:
    """Adam, with the penalty of weights in the gradient: `torch.optim.Adam`."""

    lr: float | Searched = 1e-3
    betas: tuple[float, float] | Searched = (0.9, 0.999)
    eps: float | Searched = 1e-8
    weight_decay: float | Searched = 0.0

    @property
    def slots(self) -> int:
        return 2

    def check(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            _check_number(name, getattr(self, name))
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise GroupDataError(f"Cannot use betas={self.betas!r}: name two numbers, as in betas=(0.9, 0.999).")
        for beta in self.betas:
            _check_number("betas", beta, below=1.0)

    def step(self, parameters: Tensor, gradients: Tensor, slots: Sequence[Tensor], rates: Tensor, number: int) -> None:
        self._decay(parameters, gradients, rates)
        first, second = self.betas  # type: ignore[misc]
        average, square = slots
        average.lerp_(gradients, 1 - first)
        square.mul_(second).addcmul_(gradients, gradients, value=1 - second)
        scale = torch.sqrt(square, out=gradients).div_((1 - second**number) ** 0.5).add_(self.eps)  # type: ignore[arg-type]
        change = torch.div(average, scale, out=scale)
        parameters.addcmul_(change, _column(rates / (1 - first**number), parameters), value=-1)

    def _decay(self, parameters: Tensor, gradients: Tensor, rates: Tensor) -> None:
        if self.weight_decay:
            gradients.add_(parameters, alpha=self.weight_decay)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam, with the decay of weights beside it: `torch.optim.AdamW`."""

    weight_decay: float | Searched = 1e-2

    def _decay(self, parameters: Tensor, gradients: Tensor, rates: Tensor) -> None:
        if self.weight_decay:
            parameters.mul_(_column(1 - rates * self.weight_decay, parameters))  # type: ignore[operator]


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype)[:, None]


def _check_number(name: str, value: object, below: float = float("inf")) -> None:
    if not isinstance(value, int | float) or not 0 <= value < below:
        limit = "" if below == float("inf") else f" and less than {below:g}"
        raise GroupDataError(f"Cannot use {name}={value!r}: name a number that is 0 or greater{limit}.")
