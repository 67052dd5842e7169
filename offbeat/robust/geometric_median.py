"""The point with the least sum of distances. Pillutla et al., "Robust aggregation for federated learning" (RFA, IEEE
TSP 2022), algorithm 2: smoothed Weiszfeld iterations. They begin with the contribution that is nearest to all others,
which a few that are far away do not move, as they do the mean.

    z = sum of b_i x_i / sum of b_i,    b_i = w_i / max(nu, |z - x_i|)

nu is a part of a distance between contributions, so their scale makes no difference. Where most contributions are equal
that distance is 0, and they are the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.robust.rule import Rule, distances_of

_ROUNDING = 1e-7  # of a norm: a Gram matrix in float64 does not show smaller distances


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The geometric median, weighted, after a few iterations.

    Args:
        iterations: how many.
        smoothing: nu, relative to the median of the distances to where it begins: nearer than that all are alike.

    Raises:
        PlanError: if there is no iteration, or `smoothing` is not above 0.

    >>> import torch
    >>> GeometricMedian(iterations=100)(torch.tensor([[0.0], [1.0], [900.0]])).round()
    tensor([1.])
    """

    iterations: int = 8
    smoothing: float = 0.1
    needs_gram = True
    is_weighted = True

    def __post_init__(self) -> None:
        if self.iterations not in WholeNumbers(1) or self.smoothing not in RealNumbers(above=0):
            raise PlanError(
                f"Cannot iterate {self.iterations!r} times with a smoothing of {self.smoothing!r}: choose 1 or more, "
                "and something above 0 - at `plan.rule`."
            )

    def least(self) -> int:
        return 1

    def most_faulty(self, n: int) -> int:
        return (n - 1) // 2

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Iterate, with all distances from the Gram matrix."""
        scales = torch.zeros_like(weights)
        scales[int((distances_of(gram).sqrt() @ weights).argmin())] = 1.0
        away = distances_to(gram, scales)
        equal = away <= _ROUNDING * (gram.diagonal() @ scales).sqrt()
        if 2 * int(equal.sum()) > len(gram):
            parts = weights * equal
            return parts / parts.sum()
        nu = self.smoothing * float(away.quantile(0.5))
        for _ in range(self.iterations):
            parts = weights / distances_to(gram, scales).clamp(min=nu)
            scales = parts / parts.sum()
        return scales


def distances_to(gram: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The distances [n] of vectors to the sum of them all multiplied by `scales` [n], which add up to 1."""
    along = gram @ scales
    return (gram.diagonal() - 2 * along + scales @ along).clamp_(min=0).sqrt_()
