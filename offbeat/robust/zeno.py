"""Contributions by what they do to the loss on trusted samples. Xie et al., "Zeno: distributed stochastic gradient
descent with suspicion-based fault-tolerance" (ICML 2019), definitions 2 and 3.

    score(g) = loss(x) - loss(x - gamma g) - rho |g|^2     on a few trusted samples, drawn anew each time
    the update is the mean of those with the n - b highest scores

With changes of several steps in place of gradients the second loss is that of x + change. One honest worker is enough,
since nobody is compared with the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.robust.krum import chosen
from offbeat.robust.loss_rule import LossRule
from offbeat.robust.resilient_rule import check_faulty
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Zeno(LossRule):
    """The mean of the contributions with the highest scores.

    Args:
        faulty: b, how many are left out; of n one at least is left.
        penalty: rho, per unit of the square of a contribution's norm, which is the sum over its elements and not their
            mean.

    Raises:
        PlanError: if `faulty` or `penalty` is negative.

    >>> Zeno(1)(torch.tensor([[0.1], [9.0]]), losses=[1.0, 0.9, 3.0])
    tensor([0.1000])
    """

    faulty: int
    penalty: float = 0.0005

    def __post_init__(self) -> None:
        check_faulty(self.faulty, "plan.validator.faulty")
        if self.penalty not in RealNumbers(0):
            raise PlanError(f"Cannot reward the norm by {self.penalty!r}: 0 or more - at `plan.validator.penalty`.")

    def least(self) -> int:
        return self.faulty + 1

    def most_faulty(self, n: int) -> int:
        return n - 1

    def check(self, n: int) -> str:
        """Say why it cannot be used with n contributions, and the way out; "" if it can be."""
        if n > self.faulty:
            return ""
        return f"{short_name(self)} leaves out all of {n} contributions. Use faulty={max(0, n - 1)}, or more workers"

    def scores(self, before: float, after: Sequence[float], squares: Sequence[float]) -> torch.Tensor:
        """The scores [n]; of what is not finite the lowest there is.

        Args:
            before: the loss without any update.
            after: the loss with each.
            squares: of the norm of each.
        """
        found = before - torch.tensor(after, dtype=torch.float64) - self.penalty * torch.tensor(squares).double()
        return found.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)

    def judge(self, gram: torch.Tensor, weights: torch.Tensor, losses: Sequence[float] = ()) -> torch.Tensor:
        """Equal scales for the best, 0 for the others; of equal ones the first counts, of what is not finite none."""
        if not losses:
            return torch.zeros(len(gram), dtype=torch.float64)
        scores = self.scores(losses[0], losses[1:], gram.diagonal().tolist())
        count = min(len(scores) - self.faulty, int(scores.isfinite().sum()))
        return chosen(-scores, count) if count > 0 else torch.zeros_like(scores)
