"""Newton's method for many generalised linear models at once.

All groups of one call are padded to the size of the largest, and each is solved for several ridge penalties together:
the features are read once for all of them. A step is damped where the objective would not fall; models that have ended
are taken out once they are half of all. The objective of a group is that of scikit-learn with `C = 1 / l2`:

    sum over rows of loss(x w + b, y) + l2 / 2 |w|^2        the intercept b is free
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offbeat.groups.families import Family

MOST_STEPS, _MOST_HALVINGS = 100, 40
TOLERANCE = 1e-12
"""The fall of the objective, relative to it, at which a model has ended."""
_FLOOR = 1e-12  # of the Hessian's diagonal, relative to its mean
_FIRMER = 1e-6


@dataclass(frozen=True)
class PaddedGroups:
    """The rows of groups of similar sizes.

    Args:
        features: (groups, rows, features); with an intercept the last feature is 1.
        target: (groups, rows).
        counts: (groups,), the rows of each that are no padding. Values in padding are finite, and are not looked at.
    """

    features: torch.Tensor
    target: torch.Tensor
    counts: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """Return (groups, rows, 1): 1 for a row, 0 for padding."""
        rows = torch.arange(self.features.shape[1])
        return (rows < self.counts[:, None]).to(self.features.dtype)[..., None]


@dataclass(frozen=True)
class GlmSolution:
    """The models of a call, as far as they have come.

    Args:
        coefficients: (groups, penalties, features).
        objectives: (groups, penalties), at these.
        steps: (groups, penalties), that were taken.
        has_ended: (groups, penalties): whether the objective falls no more.
    """

    coefficients: torch.Tensor
    objectives: torch.Tensor
    steps: torch.Tensor
    has_ended: torch.Tensor


def solve(
    groups: PaddedGroups,
    family: Family,
    penalties: torch.Tensor,
    *,
    has_intercept: bool,
    start: torch.Tensor | None = None,
) -> GlmSolution:
    """Fit one model for each group and ridge penalty.

    Args:
        penalties: (penalties,) or (groups, penalties), each 0 or greater.
        has_intercept: whether the last feature is an intercept, which no penalty holds.
        start: (groups, penalties, features), where to begin; None for 0.
    """
    problem = _Problem.of(groups, family, penalties, has_intercept, start)
    shape = problem.coefficients.shape
    solution = GlmSolution(
        torch.zeros(shape, dtype=problem.coefficients.dtype),
        torch.zeros(shape[:2], dtype=problem.coefficients.dtype),
        torch.zeros(shape[:2], dtype=torch.int64),
        torch.zeros(shape[:2], dtype=torch.bool),
    )
    for _ in range(MOST_STEPS):
        problem.step()
        ended = problem.has_ended.all(1)
        if bool(ended.all()):
            break
        if int(ended.sum()) * 2 >= len(ended):
            problem.write(solution)
            problem = problem.only(~ended)
    problem.write(solution)
    return solution


@dataclass
class _Problem:
    """The models that have not ended; `numbers` says which groups of the call they are of."""

    groups: PaddedGroups
    family: Family
    penalty: torch.Tensor  # (groups, penalties, features), 0 for the intercept
    numbers: torch.Tensor
    mask: torch.Tensor
    coefficients: torch.Tensor
    margins: torch.Tensor  # (groups, rows, penalties)
    objectives: torch.Tensor
    steps: torch.Tensor
    has_ended: torch.Tensor

    @classmethod
    def of(
        cls,
        groups: PaddedGroups,
        family: Family,
        penalties: torch.Tensor,
        has_intercept: bool,
        start: torch.Tensor | None,
    ) -> _Problem:
        count, _, features = groups.features.shape
        held = torch.ones(features, dtype=groups.features.dtype)
        if has_intercept:
            held[-1] = 0
        penalties = penalties.expand(count, -1)
        if start is None:
            start = groups.features.new_zeros(*penalties.shape, features)
        margins = groups.features @ start.mT
        made = cls(
            groups,
            family,
            penalties[..., None] * held,
            torch.arange(count),
            groups.mask,
            start.clone(),
            margins,
            groups.features.new_zeros(penalties.shape),
            torch.zeros(penalties.shape, dtype=torch.int64),
            torch.zeros(penalties.shape, dtype=torch.bool),
        )
        made.objectives = made.objective(made.margins, made.coefficients)
        return made

    def objective(self, margins: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        losses = self.family.losses(margins, self.groups.target[..., None]).mul_(self.mask)
        return losses.sum(1) + (self.penalty * coefficients.square()).sum(-1).mul_(0.5)

    def step(self) -> None:
        """Take a step with each model that has not ended."""
        x = self.groups.features
        first, second = self.family.derivatives(self.margins, self.groups.target[..., None])
        gradient = (x.mT @ first.mul_(self.mask)).mT + self.penalty * self.coefficients
        second = second.mul_(self.mask)
        hessian = torch.stack([(x * second[..., at : at + 1]).mT @ x for at in range(second.shape[-1])], 1)
        hessian.diagonal(dim1=-2, dim2=-1).add_(self.penalty)
        step = newton_step(hessian, gradient)
        promised = -(gradient * step).sum(-1)
        promised = promised.nan_to_num_(0.0).clamp_(min=0.0)
        along = x @ step.mT
        share = torch.ones_like(promised)
        for _ in range(_MOST_HALVINGS):
            margins = self.margins + along * share[:, None]
            coefficients = self.coefficients + step * share[..., None]
            objectives = self.objective(margins, coefficients)
            # Near the optimum what is promised is less than the rounding of the objective.
            is_worse = ~(objectives <= self.objectives + TOLERANCE * (1 + self.objectives.abs()))
            is_worse &= ~self.has_ended
            if not bool(is_worse.any()):
                break
            share = torch.where(is_worse, share / 2, share)
        else:
            share = torch.where(is_worse, 0, share)
            margins = self.margins + along * share[:, None]
            coefficients = self.coefficients + step * share[..., None]
            objectives = self.objective(margins, coefficients)
        moves = ~self.has_ended
        self.margins = torch.where(moves[:, None], margins, self.margins)
        self.coefficients = torch.where(moves[..., None], coefficients, self.coefficients)
        self.objectives = torch.where(moves, objectives, self.objectives)
        self.steps += moves
        # A Newton step that promises little has been taken in full, so what is left is its square.
        self.has_ended = self.has_ended | (promised <= TOLERANCE * (1 + objectives.abs())) | (share == 0)

    def only(self, which: torch.Tensor) -> _Problem:
        """Return the models of some of the groups."""
        counts = self.groups.counts[which]
        rows = int(counts.max())
        groups = PaddedGroups(self.groups.features[which, :rows], self.groups.target[which, :rows], counts)
        return _Problem(
            groups,
            self.family,
            self.penalty[which],
            self.numbers[which],
            groups.mask,
            self.coefficients[which],
            self.margins[which, :rows],
            self.objectives[which],
            self.steps[which],
            self.has_ended[which],
        )

    def write(self, solution: GlmSolution) -> None:
        """Write what the models are now where they belong."""
        solution.coefficients[self.numbers] = self.coefficients
        solution.objectives[self.numbers] = self.objectives
        solution.steps[self.numbers] = self.steps
        solution.has_ended[self.numbers] = self.has_ended


def newton_step(hessian: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return Newton's step; where features are collinear the diagonal is made firmer until it can be solved.

    Args:
        hessian: (..., features, features), which is changed.
        gradient: (..., features).
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(hessian.dtype).tiny)
    diagonal.add_(_FLOOR * scale)
    factor, failed = torch.linalg.cholesky_ex(hessian)
    firmer = _FIRMER
    while bool(failed.any()) and firmer < 1:
        diagonal.add_(torch.where(failed[..., None] > 0, firmer * scale, 0))
        factor, failed = torch.linalg.cholesky_ex(hessian)
        firmer *= 100
    return -torch.cholesky_solve(gradient[..., None], factor)[..., 0]
