"""The contributions that have the most others near them. Blanchard et al., "Machine learning with adversaries:
Byzantine tolerant gradient descent" (NeurIPS 2017), section 4.

    score(i) = sum of the squares of the distances from i to the n - f - 2 others that are nearest to it
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.robust.resilient_rule import ResilientRule
from offbeat.robust.rule import distances_of


@dataclass(frozen=True)
class Krum(ResilientRule):
    """The contribution with the best score, as it is.

    Args:
        faulty: how many contributions may be anything.

    Raises:
        PlanError: if `faulty` is negative.

    >>> import torch
    >>> Krum(1)(torch.tensor([[1.0], [2.0], [3.0], [2.1], [900.0]]))
    tensor([2.1000])
    """

    needs_gram = True

    def least(self) -> int:
        return 2 * self.faulty + 3

    def most_faulty(self, n: int) -> int:
        return max(0, (n - 3) // 2)

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Choose the best one."""
        return chosen(krum_scores(distances_of(gram), self.faulty), 1)


@dataclass(frozen=True)
class MultiKrum(ResilientRule):
    """The mean of the contributions with the best scores.

    Args:
        faulty: how many contributions may be anything.
        best: how many are averaged; None for n - `faulty` - 2.

    Raises:
        PlanError: if `faulty` is negative, or `best` less than 1.

    >>> import torch
    >>> MultiKrum(1)(torch.tensor([[1.0], [2.0], [3.0], [2.1], [900.0]]))
    tensor([2.0500])
    """

    best: int | None = None
    needs_gram = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best is not None and self.best not in WholeNumbers(1):
            raise PlanError(f"Cannot average the {self.best!r} best: one at least - at `plan.rule.best`.")

    def least(self) -> int:
        return max(2 * self.faulty + 3, (self.best or 1) + self.faulty + 2)

    def most_faulty(self, n: int) -> int:
        return max(0, min((n - 3) // 2, n - 2 - (self.best or 1)))

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Choose the best ones."""
        return chosen(krum_scores(distances_of(gram), self.faulty), self.best or len(gram) - self.faulty - 2)


def krum_scores(squares: torch.Tensor, faulty: int) -> torch.Tensor:
    """The scores [n] of contributions from the squares of their distances [n, n]; the lowest is the best.

    Never fewer than f + 1 others are looked at, which it takes 2 f + 3 contributions for: when Bulyan chooses its last
    ones, fewer are left.
    """
    n = len(squares)
    others = squares.clone().fill_diagonal_(float("inf")).sort(1).values
    return others[:, : min(n - 1, max(faulty + 1, n - faulty - 2))].sum(1)


def chosen(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Equal scales [n] for the `count` lowest scores, and 0 for the others; of equal ones the first count."""
    scales = torch.zeros(len(scores), dtype=torch.float64)
    scales[scores.sort(stable=True).indices[:count]] = 1 / count
    return scales
