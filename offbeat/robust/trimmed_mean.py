"""The mean of each coordinate without its extremes. Yin et al., "Byzantine-robust distributed learning" (ICML 2018),
definition 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.robust.resilient_rule import ResilientRule
from offbeat.robust.rule import by_coordinate, counted

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TrimmedMean(ResilientRule):
    """The mean of each coordinate, without the `faulty` largest and the `faulty` smallest values.

    Args:
        faulty: how many contributions may be anything.

    Raises:
        PlanError: if `faulty` is negative.

    >>> import torch
    >>> TrimmedMean(1)(torch.tensor([[1.0], [2.0], [3.0], [900.0]]))
    tensor([2.5000])
    """

    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        """Trim each coordinate."""
        return by_coordinate(counted(stack_ND, scales_N), lambda columns: trimmed_of(columns, self.faulty))


def trimmed_of(sorted_NC: torch.Tensor, faulty: int) -> torch.Tensor:
    """The mean [C] of sorted columns without so many at both ends."""
    return sorted_NC[faulty : len(sorted_NC) - faulty].mean(0)
