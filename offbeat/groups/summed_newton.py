"""Newton's method for one generalised linear model whose rows are in several places.

Each place computes the sums over its own rows: losses, gradients and Hessians, d x d + d numbers for each penalty,
however many rows there are. They are added, in the order of the places, and the step is taken once: the result is that
of one process that has all rows, up to the order of additions: Kingpin's gradient accumulation for algebraic models (Li
and Kumar, PVLDB 14(11), 2021). Without I/O: whoever calls carries coefficients out and sums back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.groups.newton import MOST_STEPS, TOLERANCE, newton_step

if TYPE_CHECKING:
    from offbeat.groups.families import Family

_LEAST_SHARE = 2.0**-40


@dataclass(frozen=True)
class GlmSums:
    """Sums over rows, at given coefficients.

    Args:
        losses: (penalties,).
        gradients: (penalties, features).
        hessians: (penalties, features, features).
    """

    losses: torch.Tensor
    gradients: torch.Tensor
    hessians: torch.Tensor

    @property
    def flat(self) -> torch.Tensor:
        """Return all of them in one vector."""
        return torch.cat((self.losses, self.gradients.flatten(), self.hessians.flatten()))

    @classmethod
    def of_flat(cls, values: torch.Tensor, penalties: int, features: int) -> GlmSums:
        """Return the sums that are in a vector."""
        losses, gradients, hessians = values.split((penalties, penalties * features, penalties * features**2))
        return cls(losses, gradients.view(penalties, features), hessians.view(penalties, features, features))


def sums_of(features: torch.Tensor, target: torch.Tensor, family: Family, coefficients: torch.Tensor) -> GlmSums:
    """Return the sums over the rows of one place.

    Args:
        features: (rows, features).
        target: (rows,).
        coefficients: (penalties, features).
    """
    margins = features @ coefficients.T
    losses = family.losses(margins, target[:, None]).sum(0)
    curvatures = family.curvatures(margins)
    hessians = [(features * curvatures[:, at : at + 1]).T @ features for at in range(len(coefficients))]
    return GlmSums(losses, (features.T @ family.slopes(margins, target[:, None])).T, torch.stack(hessians))


class SummedNewton:
    """One model for each ridge penalty, whose sums come from elsewhere.

    Args:
        penalties: (penalties,).
        features: how many there are, with the intercept.
        has_intercept: whether the last feature is one, which no penalty holds.

    Attributes:
        coefficients: (penalties, features), at which sums are wanted next.
        has_ended: whether the objectives fall no more, or were to fall for too long.
        has_converged: (penalties,), which of them fall no more.
        objectives: (penalties,).
        steps: that were taken.
    """

    def __init__(self, penalties: torch.Tensor, features: int, *, has_intercept: bool) -> None:
        held = torch.ones(features, dtype=penalties.dtype)
        if has_intercept:
            held[-1] = 0
        self._penalty = penalties[:, None] * held
        self._best = torch.zeros_like(self._penalty)
        self._step = torch.zeros_like(self._penalty)
        self._promised = torch.zeros_like(penalties)
        self._share = torch.ones_like(penalties)
        self.objectives = torch.full_like(penalties, torch.inf)
        self.steps = 0
        self.coefficients = self._best.clone()
        self.has_ended, self.has_converged = False, torch.zeros_like(penalties, dtype=torch.bool)

    def told(self, sums: GlmSums) -> None:
        """Take a step, by the sums at `coefficients` over all rows; a step that went too far is halved instead."""
        objectives = sums.losses + (self._penalty * self.coefficients.square()).sum(-1) / 2
        falls = objectives <= self.objectives + TOLERANCE * (1 + objectives.abs())
        is_small = self._promised <= TOLERANCE * (1 + objectives.abs())
        gradient = sums.gradients + self._penalty * self.coefficients
        hessian = sums.hessians.clone()
        hessian.diagonal(dim1=-2, dim2=-1).add_(self._penalty)
        step = newton_step(hessian, gradient)
        has_ended = (falls & is_small & (self.steps > 0)) | (self._share < _LEAST_SHARE)
        self._best = torch.where(falls[:, None], self.coefficients, self._best)
        self.objectives = torch.where(falls, objectives, self.objectives)
        self._step = torch.where(falls[:, None], step, self._step)
        promised = -(gradient * step).sum(-1)
        self._promised = torch.where(falls, promised.clamp(min=0), self._promised)
        self._share = torch.where(falls, torch.ones_like(self._share), self._share / 2)
        self.steps += 1
        self.has_converged = has_ended
        self.has_ended = bool(has_ended.all()) or self.steps >= MOST_STEPS
        if self.has_ended:
            self.coefficients = self._best
        else:
            self.coefficients = self._best + self._step * torch.where(has_ended, 0, self._share)[:, None]
