"""Contributions by what they do to the loss on trusted samples. Xie et al., "Zeno: distributed stochastic gradient
descent with suspicion-based fault-tolerance" (ICML 2019), definitions 2 and 3.

    score(u) = loss(x) - loss(x + u) - rho |u|^2         on a few trusted samples, drawn anew each time
    the update is the mean of those with the n - b highest scores

One honest worker is enough, since nobody is compared with the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.errors import PlanError
from offbeat.robust.krum import chosen
from offbeat.robust.resilient_rule import check_faulty

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Zeno:
    """The mean of the updates with the highest scores.

    Args:
        faulty: b, how many are left out; of n one at least is left.
        penalty: rho, per unit of the square of an update's norm, which is the sum over its elements and not their mean.

    Raises:
        PlanError: if `faulty` or `penalty` is negative.

    >>> scores = Zeno(1).scores(before=1.0, after=[0.9, 3.0], squares=[0.01, 4.0])
    >>> Zeno(1).judge(scores)
    tensor([1., 0.], dtype=torch.float64)
    """

    faulty: int
    penalty: float = 0.0005

    def __post_init__(self) -> None:
        check_faulty(self.faulty)
        if not self.penalty >= 0:
            raise PlanError(f"Cannot reward the norm by {self.penalty!r}: 0 or more - at `plan.validator.penalty`.")

    def check(self, n: int) -> str:
        """Say why it cannot be used with n contributions, and the way out; "" if it can be."""
        if n > self.faulty:
            return ""
        return f"{self!r} leaves out all of {n} contributions. Use faulty={max(0, n - 1)}, or more workers"

    def scores(self, before: float, after: Sequence[float], squares: Sequence[float]) -> torch.Tensor:
        """The scores [n]; of what is not finite the lowest there is.

        Args:
            before: the loss without any update.
            after: the loss with each.
            squares: of the norm of each.
        """
        found = before - torch.tensor(after, dtype=torch.float64) - self.penalty * torch.tensor(squares).double()
        return found.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)

    def judge(self, scores: torch.Tensor) -> torch.Tensor:
        """Equal scales [n] for the best, 0 for the others; of equal ones the first counts."""
        return chosen(-scores, len(scores) - self.faulty)
