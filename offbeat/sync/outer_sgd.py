"""The outer optimizer of local SGD: how the mean change of the workers is applied to what they had in common.

Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OuterSGD:
    """The outer optimizer of `LocalSGD`: SGD, with the mean change of the parameters for a (negative) gradient.

    Args:
        lr: learning rate; 1 with no momentum is the plain average.
        momentum: of the outer steps, from 0 to below 1.
        nesterov: look ahead along the momentum.

    Raises:
        PlanError: if a value cannot be.

    >>> OuterSGD()
    OuterSGD(lr=0.7, momentum=0.9, nesterov=True)
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.lr not in RealNumbers(above=0):
            raise PlanError(
                f"Cannot step with a learning rate of {self.lr!r}: choose above 0 - at `plan.sync.outer.lr`."
            )
        if self.momentum not in RealNumbers(0, below=1):
            raise PlanError(
                f"Cannot use a momentum of {self.momentum!r}: choose from 0 to below 1 - at `plan.sync.outer.momentum`."
            )
        if type(self.nesterov) is not bool:
            raise PlanError(
                f"Cannot look ahead with nesterov={self.nesterov!r}: choose True or False "
                "- at `plan.sync.outer.nesterov`."
            )
        if self.nesterov and self.momentum == 0:
            raise PlanError(
                "Cannot look ahead along a momentum of 0. Use nesterov=False, or a momentum "
                "- at `plan.sync.outer.nesterov`."
            )


def apply_change_(
    anchor: torch.Tensor, mean: torch.Tensor, *, outer: OuterSGD | None, momentum: torch.Tensor, rate: float = 1.0
) -> None:
    """Move `anchor` by the mean change of the workers.

    Args:
        anchor: [D] the parameters after the last average; updated in place.
        mean: [D] anchor - parameters, on average; not changed.
        outer: how it is applied; None for a plain average.
        momentum: [D] of the outer steps, zeros at the beginning; updated in place, and not used by a plain average.
        rate: the step is multiplied by it.
    """
    if outer is None:
        anchor.sub_(mean, alpha=rate)
        return
    momentum.mul_(outer.momentum).add_(mean)
    step = mean.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
    anchor.sub_(step, alpha=outer.lr * rate)
