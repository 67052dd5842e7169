"""The mean without those that are farthest from it. Xia et al., "FABA: an algorithm for fast aggregation against
Byzantine attacks in distributed neural networks" (IJCAI 2019), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.robust.geometric_median import distances_to
from offbeat.robust.resilient_rule import ResilientRule


@dataclass(frozen=True)
class FABA(ResilientRule):
    """The mean, after the contribution farthest from the mean of the others has been taken away `faulty` times.

    Args:
        faulty: how many contributions may be anything.

    Raises:
        PlanError: if `faulty` is negative.

    >>> import torch
    >>> FABA(1)(torch.tensor([[1.0], [2.0], [3.0], [900.0]]))
    tensor([2.])
    """

    needs_gram = True

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Take the farthest away, one after the other."""
        left = torch.ones(len(gram), dtype=torch.bool)
        for _ in range(self.faulty):
            away = distances_to(gram, left / left.sum(dtype=torch.float64))
            left[int(torch.where(left, away, -1.0).argmax())] = False
        return left / left.sum(dtype=torch.float64)
