"""The weighted mean of contributions none of which is longer than most: the one rule that counts samples.

Sun et al., "Can you really backdoor federated learning?" (2019). A liar moves the mean by as much as an honest worker
may, and no further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.robust.rule import Rule


@dataclass(frozen=True)
class ClippedMean(Rule):
    """The weighted mean, each contribution first shortened to a norm.

    Args:
        norm: that none has more than; None for the median of all norms in each update.

    Raises:
        PlanError: if `norm` is not above 0.

    >>> import torch
    >>> ClippedMean()(torch.tensor([[1.0], [1.0], [900.0]]))
    tensor([1.])
    """

    norm: float | None = None
    needs_gram = True
    is_weighted = True
    compares = False
    minority_counts = "each contribution counts, with a norm that is at most the median norm"

    def __post_init__(self) -> None:
        if self.norm is not None and self.norm not in RealNumbers(above=0, finite=False):
            raise PlanError(f"Cannot shorten to a norm of {self.norm!r}: choose one above 0 - at `plan.rule.norm`.")

    def least(self) -> int:
        return 1

    def most_faulty(self, n: int) -> int:
        return (n - 1) // 2

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Give each its weight, and less if it is longer."""
        norms = gram.diagonal().sqrt()
        most = torch.tensor(self.norm, dtype=torch.float64) if self.norm else norms.quantile(0.5)
        return weights / weights.sum() * torch.where(norms > most, most / norms, 1.0)
