"""The rules of ZenoPS: updates of several steps beside the validator's own of as many. Xie, Koyejo, Gupta, "ZenoPS: a
distributed learning system integrating communication efficiency and security" (Algorithms 15(7), 2022).

    synchronous     accepted if  <u, v> > eta |v|^2  and  |u|^2 < (1 + rho) |v|^2;  the mean of those
    asynchronous    s = min(1, |v| / |u|);  alpha s u if cos(u, v) >= eta, else alpha cos(u, v) s u, which points back

The second never adds what leads away from the reference: <v, cos u> >= 0. Both are asked block by block, or once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.robust.reference_rule import ReferenceRule
from offbeat.robust.rule import Scope, check_scope
from offbeat.robust.zeno_plus_plus import mean_of_accepted


@dataclass(frozen=True)
class ZenoPS(ReferenceRule):
    """The mean of the updates that neither lead away from the reference nor are much longer than it is.

    Args:
        eta: the least inner product with the reference, in units of the square of its norm. Below 0 a block that a
            worker left out is accepted as the zero that it is, and counts in the mean.
        rho: how much longer an update may be: the square of its norm is less than 1 + rho that of the reference's.
        scope: whether all blocks of the "model" are judged together, or each "block" by itself.
        calibrate: how long an honest contribution is, in units of the reference's norm, see `ReferenceRule`.

    Raises:
        PlanError: if `eta` is no number, `rho` not above -1, `calibrate` not above 0, or there is no such scope.

    >>> reference = torch.tensor([1.0, 0.0])
    >>> ZenoPS()(torch.tensor([[1.0, 0.2], [1.0, -0.2], [-6.0, 0.0]]), reference=reference)
    tensor([1., 0.])
    """

    eta: float = -0.001
    rho: float = 0.6
    scope: Scope = "model"
    calibrate: float = 1.0
    judges_norms = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scope(self.scope)
        _check_eta(self.eta)
        if self.rho not in RealNumbers(above=-1, finite=False):
            raise PlanError(
                f"Cannot accept norms by rho={self.rho!r}: choose a number above -1, such as 0.6 "
                "- at `plan.validator.rho`."
            )

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Accept each by its inner product and its norm."""
        own = gram[-1, -1]
        accepted = (gram[:-1, -1] > self.eta * own) & (gram.diagonal()[:-1] < (1 + self.rho) * own)
        return mean_of_accepted(accepted, torch.ones(len(accepted), dtype=torch.float64))


@dataclass(frozen=True)
class ZenoPSAsync(ReferenceRule):
    """The mixing of one update at a time; of several, their sum.

    Args:
        eta: the least cosine of an update that is added as it is.
        alpha: the part of an update that is added.
        scope: whether all blocks of the "model" are judged together, or each "block" by itself.
        calibrate: how long an honest contribution is, in units of the reference's norm, see `ReferenceRule`.

    Raises:
        PlanError: if `eta` is no number, `alpha` not above 0 and at most 1, `calibrate` not above 0, or there is no
            such scope.

    >>> rule, reference = ZenoPSAsync(alpha=0.5), torch.tensor([1.0, 0.0])
    >>> [rule(torch.tensor([update]), reference=reference).tolist() for update in ([1.0, 0.0], [-4.0, 0.0])]
    [[0.5, 0.0], [0.5, 0.0]]
    """

    eta: float = -0.02
    alpha: float = 0.4
    scope: Scope = "model"
    calibrate: float = 1.0
    judges_norms = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scope(self.scope)
        _check_eta(self.eta)
        if self.alpha not in RealNumbers(above=0, most=1):
            raise PlanError(
                f"Cannot add a part {self.alpha!r} of an update: above 0 and at most 1 - at `plan.validator.alpha`."
            )

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Shorten each, and turn those that lead away."""
        norms = gram.diagonal().sqrt()
        shorter = torch.where(norms[:-1] > norms[-1], norms[-1] / norms[:-1], 1.0)
        cosine = (gram[:-1, -1] / (norms[:-1] * norms[-1])).nan_to_num(0.0)
        scales = torch.zeros(len(gram), dtype=torch.float64)
        scales[:-1] = self.alpha * shorter * torch.where(cosine >= self.eta, 1.0, cosine)
        return scales


def _check_eta(eta: float) -> None:
    if eta not in RealNumbers():
        raise PlanError(f"Cannot compare with eta={eta!r}: choose a number, such as -0.001 - at `plan.validator.eta`.")
