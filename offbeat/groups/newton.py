"""Newton's method for many generalised linear models at once.

All groups of one call are padded to the size of the largest, and each is solved for several ridge penalties together.
The objective of a group is that of scikit-learn with `C = 1 / l2`:

    sum over rows of loss(x w + b, y) + l2 / 2 |w|^2        the intercept b is free

With a parent's model v, c there is also `shrink / 2 (|w - v|^2 + (b - c)^2)`. Both penalties together are one, around
a center between 0 and the parent, and a constant.

A Hessian costs as much as some ten gradients. So it is used for as long as the gradient, which is exact in each step,
falls fast by it, and then it is computed anew: by the margins of one penalty of a group, for all of the group's that
have become slow. Far from the optimum a step is damped where the objective would not fall. Close to it, where a full
step leads closer still, the objective is not computed. Models that have ended are taken out once they are half of all.
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
_LEFT = 1e-24  # the same, of the step that would come next: coefficients are then exact to some twelve digits
_SLOW = 3e-3  # of the promised fall, from step to step: above it a Hessian is computed anew
_NEAR = 0.05  # the promised fall of a sum of losses, below which full steps converge
_FLOOR = 1e-12  # of the Hessian's diagonal, relative to its mean
_FIRMER = 1e-6
_MANY = 0.7  # of all groups: to compute with all of them costs no more than to pick these


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


@dataclass(frozen=True)
class Shrinkage:
    """The penalty of what separates groups from their parents.

    Args:
        parents: (groups, features), the models of the parents.
        strengths: (groups, penalties), of `shrink`, each 0 or greater.
    """

    parents: torch.Tensor
    strengths: torch.Tensor


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
    shrinkage: Shrinkage | None = None,
) -> GlmSolution:
    """Fit one model for each group and ridge penalty.

    Args:
        penalties: (penalties,) or (groups, penalties), each 0 or greater.
        has_intercept: whether the last feature is an intercept, which no penalty holds.
        start: (groups, penalties, features), where to begin; None for the parent's model, or 0.
        shrinkage: toward parents.
    """
    problem = _Problem.of(groups, family, penalties, has_intercept, start, shrinkage)
    solution = GlmSolution(
        torch.zeros_like(problem.coefficients),
        torch.zeros_like(problem.objectives),
        torch.zeros_like(problem.steps),
        torch.zeros_like(problem.has_ended),
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
    """The models that have not ended, of groups G with rows R, penalties P and features D.

    Args:
        numbers: [G], which groups of the call these are.
        columns: [G, D, R], 0 in padding.
        factor: [G, P, D, D], of the last Hessian of each model, by Cholesky.
        promised: [G, P], the fall of the objective by the last step.
        penalty: [G, P, D], 0 for the intercept if it is free.
        center: [G, P, D], at which the penalty is least, and `floor` [G, P] is what it is there.
    """

    family: Family
    penalty: torch.Tensor
    center: torch.Tensor
    floor: torch.Tensor
    numbers: torch.Tensor
    counts: torch.Tensor
    columns: torch.Tensor
    target: torch.Tensor  # [G, 1, R]
    coefficients: torch.Tensor
    margins: torch.Tensor  # [G, P, R]
    objectives: torch.Tensor
    factor: torch.Tensor
    promised: torch.Tensor
    steps: torch.Tensor
    has_ended: torch.Tensor
    is_close: bool = False  # the objectives are not those of the coefficients

    @classmethod
    def of(
        cls,
        groups: PaddedGroups,
        family: Family,
        penalties: torch.Tensor,
        has_intercept: bool,
        start: torch.Tensor | None,
        shrinkage: Shrinkage | None,
    ) -> _Problem:
        count, rows, features = groups.features.shape
        penalties = penalties.expand(count, -1)
        shape = penalties.shape
        held = torch.ones(features, dtype=groups.features.dtype)
        if has_intercept:
            held[-1] = 0
        columns = groups.features.mT
        if int(groups.counts.min()) < rows:
            columns = columns * _is_row(groups.counts, rows)
        penalty = penalties[..., None] * held
        center = torch.zeros_like(penalty)
        floor = torch.zeros_like(penalties)
        coefficients = torch.zeros_like(penalty) if start is None else start.clone()
        if shrinkage is not None:
            strengths, parents = shrinkage.strengths[..., None], shrinkage.parents[:, None]
            share = (strengths / (penalty + strengths)).nan_to_num(0.0)  # 0 / 0: the intercept, or no penalty
            center, floor = share * parents, (penalty * share * parents.square()).sum(-1) / 2
            penalty = penalty + strengths
            coefficients = parents.repeat(1, shape[1], 1) if start is None else coefficients
        made = cls(
            family=family,
            penalty=penalty,
            center=center,
            floor=floor,
            numbers=torch.arange(count),
            counts=groups.counts,
            columns=columns,
            target=groups.target[:, None],
            coefficients=coefficients,
            margins=coefficients @ columns,
            objectives=groups.features.new_zeros(shape),
            factor=torch.eye(features, dtype=columns.dtype).repeat(*shape, 1, 1),
            promised=groups.features.new_zeros(shape),
            steps=torch.zeros(shape, dtype=torch.int64),
            has_ended=torch.zeros(shape, dtype=torch.bool),
        )
        made.objectives = made.objective(made.margins, made.coefficients)
        return made

    def objective(self, margins: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        losses = self.family.losses(margins, self.target)
        if int(self.counts.min()) < losses.shape[2]:
            losses.mul_(_is_row(self.counts, losses.shape[2]))
        distance = coefficients - self.center
        return losses.sum(2) + (self.penalty * distance.square_()).sum(-1).mul_(0.5).add_(self.floor)

    def step(self) -> None:
        """Take a step with each model that has not ended."""
        gradient = self.family.slopes(self.margins, self.target) @ self.columns.mT
        gradient += self.penalty * (self.coefficients - self.center)
        step, promised = _step(self.factor, gradient)
        is_fresh = torch.zeros_like(self.has_ended)
        is_slow = ~self.has_ended & (promised > _SLOW * self.promised)
        if bool(is_slow.any()):
            self._compute_hessians(is_slow, promised, is_fresh)
            step, promised = _step(self.factor, gradient)
        step.mul_(~self.has_ended[..., None])
        if bool((self.has_ended | (promised <= _NEAR)).all()):
            self.coefficients += step
            self.margins = self.coefficients @ self.columns
            self.is_close, is_full = True, torch.ones_like(self.has_ended)
        else:
            is_full = self._damped(step)
        self.steps += ~self.has_ended
        # What a step leaves is to what it promised as that is to the promise before, or its square after a Newton step.
        ratio = (promised / self.promised).nan_to_num_(1.0).clamp_(max=1.0)
        left = promised * torch.where(is_fresh, ratio.square(), ratio)
        scale = 1 + self.objectives.abs()
        self.has_ended |= is_full & ((left <= _LEFT * scale) | (is_fresh & (promised <= TOLERANCE * scale)))
        self.promised = promised

    def _damped(self, step: torch.Tensor) -> torch.Tensor:
        """Take steps by which no objective rises, and say which are whole; a model that finds none has ended."""
        along = step @ self.columns
        share = torch.ones_like(self.objectives)
        if self.is_close:
            self.objectives = self.objective(self.margins, self.coefficients)
        for _ in range(_MOST_HALVINGS):
            margins = torch.addcmul(self.margins, along, share[..., None])
            coefficients = torch.addcmul(self.coefficients, step, share[..., None])
            objectives = self.objective(margins, coefficients)
            # Near the optimum what is promised is less than the rounding of the objective.
            is_worse = ~(objectives <= self.objectives + TOLERANCE * (1 + self.objectives.abs()))
            if not bool(is_worse.any()):
                break
            share = torch.where(is_worse, share / 2, share)
        else:
            share = torch.where(is_worse, 0, share)
            margins = torch.addcmul(self.margins, along, share[..., None])
            coefficients = torch.addcmul(self.coefficients, step, share[..., None])
            objectives = self.objective(margins, coefficients)
            self.has_ended |= is_worse
        self.margins, self.coefficients, self.objectives = margins, coefficients, objectives
        self.is_close = False
        return share == 1

    def _compute_hessians(self, is_slow: torch.Tensor, promised: torch.Tensor, is_fresh: torch.Tensor) -> None:
        """Compute the Hessian of each group at the slow penalty that has most to gain, for all that are slow."""
        donors = promised.masked_fill(~is_slow, -1.0).argmax(1)
        picked = is_slow.any(1).nonzero()[:, 0]
        is_fresh[picked, donors[picked]] = True
        if len(picked) > _MANY * len(is_slow):
            picked = torch.arange(len(is_slow))
        columns = self.columns if len(picked) == len(is_slow) else self.columns[picked]
        curvatures = self.family.curvatures(self.margins[picked, donors[picked]])
        found = (columns * curvatures[:, None]) @ columns.mT
        places = torch.empty(len(is_slow), dtype=torch.int64)
        places[picked] = torch.arange(len(picked))
        groups, penalties = is_slow.nonzero(as_tuple=True)
        hessians = found[places[groups]]
        hessians.diagonal(dim1=-2, dim2=-1).add_(self.penalty[groups, penalties])
        self.factor[groups, penalties] = firm_factor(hessians)

    def only(self, which: torch.Tensor) -> _Problem:
        """Return the models of some of the groups."""
        rows = int(self.counts[which].max())
        return _Problem(
            family=self.family,
            penalty=self.penalty[which],
            center=self.center[which],
            floor=self.floor[which],
            numbers=self.numbers[which],
            counts=self.counts[which],
            columns=self.columns[which][..., :rows].contiguous(),
            target=self.target[which][..., :rows],
            coefficients=self.coefficients[which],
            margins=self.margins[which][..., :rows],
            objectives=self.objectives[which],
            factor=self.factor[which],
            promised=self.promised[which],
            steps=self.steps[which],
            has_ended=self.has_ended[which],
            is_close=self.is_close,
        )

    def write(self, solution: GlmSolution) -> None:
        """Write what the models are now where they belong."""
        solution.coefficients[self.numbers] = self.coefficients
        solution.objectives[self.numbers] = self.objective(self.margins, self.coefficients)
        solution.steps[self.numbers] = self.steps
        solution.has_ended[self.numbers] = self.has_ended


def newton_step(hessian: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return Newton's step.

    Args:
        hessian: (..., features, features), which is changed.
        gradient: (..., features).
    """
    return _step(firm_factor(hessian), gradient)[0]


def firm_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the Cholesky factor; where features are collinear the diagonal is made firmer until there is one.

    Args:
        hessian: (..., features, features), which is changed.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.mean(-1, keepdim=True).clamp(min=torch.finfo(hessian.dtype).tiny)
    diagonal.add_(_FLOOR * scale)
    factor: torch.Tensor
    factor, failed = torch.linalg.cholesky_ex(hessian)
    firmer = _FIRMER
    while bool(failed.any()) and firmer < 1:
        diagonal.add_(torch.where(failed[..., None] > 0, firmer * scale, 0))
        factor, failed = torch.linalg.cholesky_ex(hessian)
        firmer *= 100
    return factor


def _step(factor: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step by a Hessian's factor, and the fall that it promises: twice the fall of the quadratic model."""
    step = torch.cholesky_solve(gradient[..., None], factor)[..., 0].neg_()
    promised: torch.Tensor = -(gradient * step).sum(-1)
    return step, promised.nan_to_num_(0.0).clamp_(min=0.0)


def _is_row(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """[G, 1, R]: whether a place holds a row, and no padding."""
    return (torch.arange(rows) < counts[:, None])[:, None]
