"""Krum again and again, and then the values nearest to the median. El Mhamdi et al., "The hidden vulnerability of
distributed learning in Byzantium" (ICML 2018), algorithm 1.

    n - 2 f times:   choose by Krum, among those that are left, and take it away
    each coordinate: of those chosen, the mean of the n - 4 f values nearest to their median
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.robust.krum import krum_scores
from offbeat.robust.median import median_of
from offbeat.robust.resilient_rule import ResilientRule
from offbeat.robust.rule import by_coordinate, counted, distances_of, nearest_mean


@dataclass(frozen=True)
class Bulyan(ResilientRule):
    """A selection by Krum whose coordinates are trimmed, against a lie in few coordinates, which no distance shows.

    Args:
        faulty: how many contributions may be anything.

    Raises:
        PlanError: if `faulty` is negative.

    >>> import torch
    >>> Bulyan(1)(torch.tensor([[1.0], [2.0], [3.0], [2.1], [1.9], [2.2], [900.0]]))
    tensor([2.1000])
    """

    needs_gram = True

    def least(self) -> int:
        return 4 * self.faulty + 3

    def most_faulty(self, n: int) -> int:
        return max(0, (n - 3) // 4)

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Choose n - 2 f of them, one after the other."""
        squares, left = distances_of(gram), list(range(len(gram)))
        scales = torch.zeros(len(gram), dtype=torch.float64)
        count = len(gram) - 2 * self.faulty
        for _ in range(count):
            index = torch.tensor(left)
            best = left[int(krum_scores(squares[index][:, index], self.faulty).argmin())]
            left.remove(best)
            scales[best] = 1 / count
        return scales

    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        """Average the nearest values of each coordinate of those chosen."""

        def nearest(columns: torch.Tensor) -> torch.Tensor:
            return nearest_mean(columns, median_of(columns), max(1, len(columns) - 2 * self.faulty))

        return by_coordinate(counted(stack_ND, scales_N), nearest)
