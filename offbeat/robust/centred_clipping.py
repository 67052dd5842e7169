"""Contributions cut to a radius around what was agreed before. Karimireddy et al., "Learning from history for Byzantine
robust optimization" (ICML 2021), algorithm 2; use it with momentum on the workers.

    v <- v + mean of (x_i - v) min(1, radius / |x_i - v|)          a few times; v: the reference, the update before
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.robust.geometric_median import distances_to
from offbeat.robust.rule import Rule


@dataclass(frozen=True)
class CentredClipping(Rule):
    """The mean of what each contribution adds to the update before, cut to a radius.

    Args:
        radius: of the cut; None for the median of the distances, in each iteration.
        iterations: how many.

    Raises:
        PlanError: if `radius` is not above 0, or there is no iteration.

    >>> import torch
    >>> CentredClipping(radius=1.0, iterations=1)(torch.tensor([[1.0], [900.0]]), reference=torch.tensor([0.0]))
    tensor([1.])
    """

    radius: float | None = None
    iterations: int = 3
    needs_gram = True
    needs_reference = True
    reference_is_previous = True
    is_weighted = True
    minority_counts = "each contribution moves the update before by as much as the radius, which most are within"

    def __post_init__(self) -> None:
        has_radius = self.radius is None or self.radius in RealNumbers(above=0, finite=False)
        if self.iterations not in WholeNumbers(1) or not has_radius:
            raise PlanError(
                f"Cannot cut to a radius of {self.radius!r} in {self.iterations!r} iterations: choose something above "
                "0, and 1 or more - at `plan.rule`."
            )

    def least(self) -> int:
        return 1

    def most_faulty(self, n: int) -> int:
        return (n - 1) // 2

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Iterate, with all distances from the Gram matrix."""
        shares = weights / weights.sum()
        center = torch.zeros(len(gram), dtype=torch.float64)
        center[-1] = 1.0
        for _ in range(self.iterations):
            away = distances_to(gram, center)[:-1]
            radius = away.quantile(0.5) if self.radius is None else torch.tensor(self.radius, dtype=torch.float64)
            parts = shares * torch.where(away > radius, radius / away, 1.0)
            center *= 1 - parts.sum()
            center[:-1] += parts
        return center
