"""The values nearest to the median. Xie et al., "Generalized Byzantine-tolerant SGD" (2018), definition 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.robust.median import median_of
from offbeat.robust.resilient_rule import ResilientRule
from offbeat.robust.rule import by_coordinate, counted, nearest_mean

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MeaMed(ResilientRule):
    """The mean, for each coordinate, of those n - `faulty` values that are nearest to its median.

    Args:
        faulty: how many contributions may be anything.

    Raises:
        PlanError: if `faulty` is negative.

    >>> import torch
    >>> MeaMed(1)(torch.tensor([[1.0], [2.0], [3.0], [900.0]]))
    tensor([2.])
    """

    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        """Average the nearest values of each coordinate."""

        def nearest(columns: torch.Tensor) -> torch.Tensor:
            return nearest_mean(columns, median_of(columns), len(columns) - self.faulty)

        return by_coordinate(counted(stack_ND, scales_N), nearest)
