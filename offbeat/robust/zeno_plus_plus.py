"""One update at a time by its angle to a reference on trusted samples, which may be a little old. Xie et al., "Zeno++:
robust fully asynchronous SGD" (ICML 2020), definition 2 and algorithm 1.

    u' = u |v| / |u|                                         as long as the reference v
    score(u) = gamma <v, u'> - rho |u|^2 + gamma epsilon     with gradients in place of updates; |u| is from before
    accepted if score(u) >= 0:    cos(u, v) >= penalty (|u| / |v|)^2 - epsilon / |v|^2,   penalty = rho / gamma
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.robust.reference_rule import ReferenceRule
from offbeat.robust.rule import Scope, check_scope


@dataclass(frozen=True)
class ZenoPlusPlus(ReferenceRule):
    """The mean of the updates that point where the reference does, none of them longer than it is.

    Args:
        penalty: rho / gamma, on the square of how often an update is as long as the reference.
        epsilon: what is forgiven, in units of the square of the reference's norm.
        shrinks: whether updates are only made shorter; else also those that are shorter are made as long.
        scope: whether all blocks of the "model" are judged together, or each "block" by itself.
        calibrate: how long an honest contribution is, in units of the reference's norm, see `ReferenceRule`.

    Raises:
        PlanError: if `penalty` is negative, `epsilon` no number, `calibrate` not above 0, or there is no such scope.

    >>> rule, reference = ZenoPlusPlus(), torch.tensor([1.0, 0.0])
    >>> updates = [2.0, 0.0], [-1.0, 0.0], [50.0, 0.0]
    >>> [rule(torch.tensor([update]), reference=reference).tolist() for update in updates]
    [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """

    penalty: float = 0.01
    epsilon: float = 0.0
    shrinks: bool = False
    scope: Scope = "model"
    calibrate: float = 1.0
    judges_norms = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scope(self.scope)
        if self.penalty not in RealNumbers(0):
            raise PlanError(f"Cannot reward the norm by {self.penalty!r}: 0 or more - at `plan.validator.penalty`.")
        if self.epsilon not in RealNumbers():
            raise PlanError(
                f"Cannot be lenient by {self.epsilon!r}: choose a number, such as 0.0 - at `plan.validator.epsilon`."
            )

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Accept each by its score."""
        norms = gram.diagonal().sqrt()
        ratio = norms[:-1] / norms[-1]
        cosine = gram[:-1, -1] / (norms[:-1] * norms[-1])
        accepted = cosine >= self.penalty * ratio.square() - self.epsilon  # NaN, of zeros, is not
        length = torch.where(ratio > 1, 1 / ratio, 1.0) if self.shrinks else 1 / ratio
        return mean_of_accepted(accepted, torch.where(accepted, length, 0.0))


def mean_of_accepted(accepted: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The scales [n + 1] of a mean over those that are accepted, each multiplied by its factor; the reference has 0."""
    scales = torch.zeros(len(accepted) + 1, dtype=torch.float64)
    if bool(accepted.any()):
        scales[:-1] = torch.where(accepted, factors, 0.0) / accepted.sum()
    return scales
