"""The values nearest to the trimmed mean. Xie et al., "Phocas: dimensional Byzantine-resilient stochastic gradient
descent" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.robust.resilient_rule import ResilientRule
from offbeat.robust.rule import by_coordinate, counted, nearest_mean
from offbeat.robust.trimmed_mean import trimmed_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Phocas(ResilientRule):
    """The mean, for each coordinate, of those n - `faulty` values that are nearest to its trimmed mean.

    Args:
        faulty: how many contributions may be anything.

    Raises:
        PlanError: if `faulty` is negative.

    >>> import torch
    >>> Phocas(1)(torch.tensor([[1.0], [2.0], [3.0], [900.0]]))
    tensor([2.])
    """

    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        """Average the nearest values of each coordinate."""

        def nearest(columns: torch.Tensor) -> torch.Tensor:
            return nearest_mean(columns, trimmed_of(columns, self.faulty), len(columns) - self.faulty)

        return by_coordinate(counted(stack_ND, scales_N), nearest)
