"""The median of each coordinate. Yin et al., "Byzantine-robust distributed learning" (ICML 2018), definition 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.robust.rule import Rule, by_coordinate, counted

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Median(Rule):
    """The median of each coordinate; the mean of the two in the middle, if their number is even.

    >>> import torch
    >>> Median()(torch.tensor([[1.0], [2.0], [900.0]]))
    tensor([2.])
    """

    def least(self) -> int:
        return 1

    def most_faulty(self, n: int) -> int:
        return (n - 1) // 2

    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        """Take the median of each coordinate."""
        return by_coordinate(counted(stack_ND, scales_N), median_of)


def median_of(sorted_NC: torch.Tensor) -> torch.Tensor:
    """The median [C] of sorted columns."""
    low, high = sorted_NC[(len(sorted_NC) - 1) // 2], sorted_NC[len(sorted_NC) // 2]
    return low if len(sorted_NC) % 2 else (low + high) / 2
