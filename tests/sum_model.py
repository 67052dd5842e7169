"""A model whose parameters say which gradients were applied, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import offbeat

LR = 0.1


class Adding:
    """Plain SGD adds up: the gradient of rank r in its n-th step is (r + 1) n in every element.

    Args:
        run: prepares it.
        numel: elements of its only parameter.
    """

    def __init__(self, run: offbeat.Run, numel: int) -> None:
        self._rank = run.rank
        self._model = nn.Linear(numel, 1, bias=False).double()
        nn.init.zeros_(self._model.weight)
        _, self._optimizer = run.prepare(self._model, torch.optim.SGD(self._model.parameters(), lr=LR))
        self.steps = 0

    def step(self) -> None:
        """Make one."""
        self.steps += 1
        (self._model.weight * ((self._rank + 1.0) * self.steps)).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def value(self) -> float:
        """Of all elements, which have to be equal."""
        (value,) = self._model.weight.detach().unique().tolist()
        return float(value)


def added(ranks: Sequence[int], steps: int, begun: int = 0) -> float:
    """What the value changes by where each of these ranks has its gradient of each step in the parameters once.

    Args:
        steps: the last one.
        begun: the last one that is not counted.
    """
    mean = sum(rank + 1.0 for rank in ranks) / len(ranks)
    return -LR * mean * sum(range(begun + 1, steps + 1))
