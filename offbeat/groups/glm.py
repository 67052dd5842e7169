"""Generalised linear models of groups: specs that own their training.

    Logistic(l2=Grid(0.1, 1, 10))       one model for each group and penalty, all solved together (`newton`)

The objective is scikit-learn's with `C = 1 / l2`: the sum of the losses of a group's rows and half the squared norm of
the coefficients times `l2`; the intercept is free. For `Linear` that is Ridge with `alpha = l2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from offbeat.groups.families import BernoulliFamily, Family, GaussianFamily, PoissonFamily
from offbeat.groups.fitting import BucketFit, BucketTask, GroupStatus, similar_sizes
from offbeat.groups.newton import PaddedGroups, Shrinkage, solve
from offbeat.groups.summed_newton import GlmSums, SummedNewton, sums_of
from offbeat.groups.summing import Summand, run_alone
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from offbeat.groups.search import Searched
    from offbeat.groups.summing import Summing

_LARGE_MARGIN = 30.0
_ROWS_AT_ONCE = 1 << 14  # of a large group, which are copied with their intercept
_CACHED_BYTES = 4 << 20  # of groups that are solved together: each step reads all of them


@dataclass(frozen=True)
class Glm:
    """The common part of generalised linear models.

    Args:
        l2: the ridge penalty, 0 or greater.
        intercept: whether there is one; it is not penalized.
        standardize: whether each group's features are scaled to a mean of 0 and a variance of 1 there before they are
            penalized; coefficients are told for the features as they are.
        per_row: whether `l2` is a penalty for each row, so that it weighs as much in large groups as in small ones.
        shrink: the weight of `|w - parent's w|^2 / 2`, 0 or greater, which pulls small groups to the model of their
            parent and large ones hardly; with `Small(fallback="parent")`. The intercept is pulled, too: the level of a
            small group is as uncertain as its slopes, and a group of one class has a model so. It is a penalty of the
            group, also with `per_row`, and of coefficients for scaled features with `standardize`. A parent has seen
            all rows of its children, so a search of `shrink` favors it a little where a parent has few children.
    """

    l2: float | Searched = 1.0
    intercept: bool = True
    standardize: bool = False
    per_row: bool = False
    shrink: float | Searched = 0.0
    family: ClassVar[Family]
    is_classifier: ClassVar[bool] = False
    most_classes: ClassVar[int] = 2
    takes_missing: ClassVar[bool] = False
    dtype: ClassVar[type] = float

    def check(self) -> None:
        """Check one configuration.

        Raises:
            GroupDataError: if it cannot be used.
        """
        for name, value in (("l2", self.l2), ("shrink", self.shrink)):
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise GroupDataError(f"Cannot use {name}={value!r}: name a number that is 0 or greater.")

    def shown(self, coefficients: np.ndarray, features: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the coefficients by their names."""
        names = [*(f"coefficient of {name}" for name in features), *(["intercept"] if self.intercept else [])]
        return dict(zip(names, coefficients.T, strict=True))

    def width(self, features: int) -> int:
        """Return how many there are."""
        return features + self.intercept

    def fit(self, task: BucketTask, configs: Sequence[Glm]) -> BucketFit:
        """Fit a model for each group of a bucket and each configuration.

        Args:
            configs: which differ in `l2` and `shrink` alone.
        """
        groups = len(task.offsets) - 1
        return self._fit(task, _penalties(configs).expand(groups, -1), _strengths(configs).expand(groups, -1))

    def fit_each(self, task: BucketTask, configs: Sequence[Glm]) -> BucketFit:
        """Fit a model for each group of a bucket, of one configuration.

        Args:
            configs: of each group.
        """
        return self._fit(task, _penalties(configs)[:, None], _strengths(configs)[:, None])

    def _fit(self, task: BucketTask, penalties: torch.Tensor, strengths: torch.Tensor) -> BucketFit:
        """Fit a model for each group of a bucket and each of its penalties.

        Args:
            penalties: (groups, configs), of `l2`.
            strengths: (groups, configs), of `shrink`.
        """
        groups, count = penalties.shape
        width = self.width(task.features.shape[1])
        found = BucketFit.empty(groups, count, width)
        counts = np.diff(task.offsets)
        usable = found.mark_unusable(task, is_classifier=self.is_classifier)
        is_one = found.status == GroupStatus.ONE_CLASS
        mean, scale = self._scales(task)
        parents = None
        if task.parents is not None:
            parents = torch.from_numpy(self._as_scaled(np.nan_to_num(task.parents), mean, scale))
            is_free = torch.from_numpy(is_one)[:, None] & (strengths == 0)
            usable |= is_one & ~is_free.all(1).numpy()
            strengths = torch.where(is_free, 1.0, strengths)  # which ends; its model is a constant
        else:
            assert not strengths.any(), "the parents of groups are missing"
            is_free = torch.from_numpy(is_one)[:, None].expand(-1, count)
        start = None if task.start is None else self._as_scaled(np.nan_to_num(task.start), mean, scale)[:, None]
        for at in similar_sizes(counts, usable, width, _CACHED_BYTES):
            x, target = self._padded(task, at, mean, scale)
            solution = solve(
                PaddedGroups(x, target, torch.from_numpy(counts[at])),
                self.family,
                penalties[at] * torch.from_numpy(counts[at, None]) if self.per_row else penalties[at],
                has_intercept=self.intercept,
                start=None if start is None else torch.from_numpy(start[at].repeat(count, 1)),
                shrinkage=None if parents is None else Shrinkage(parents[at], strengths[at]),
            )
            found.coefficients[at] = self._as_they_are(solution.coefficients.numpy(), mean[at], scale[at])
            found.losses[at] = solution.objectives.numpy() / np.maximum(counts[at], 1)[:, None]
            found.steps[at] = solution.steps.numpy()
            found.status[at[~solution.has_ended.all(1).numpy()]] = GroupStatus.NOT_CONVERGED
            if self.is_classifier:
                margins = (solution.coefficients @ x.mT).abs().amax((1, 2)).numpy()
                found.status[at[margins > _LARGE_MARGIN]] = GroupStatus.SEPARABLE
        found.status[is_one] = GroupStatus.ONE_CLASS
        groups_of, configs_of = is_free.numpy().nonzero()
        constants = self._constant(task.sums(task.target)[groups_of], counts[groups_of], width)
        found.coefficients[groups_of, configs_of] = constants
        found.losses[groups_of, configs_of], found.steps[groups_of, configs_of] = np.nan, 0
        return found

    def fit_summed(self, tasks: Callable[[], Iterable[BucketTask]], configs: Sequence[Glm]) -> Summing[BucketFit]:
        """Fit one model for each configuration to rows in several places, of which this is one; none is shrunk."""
        penalties = _penalties(configs)
        facts = np.sum(
            [np.hstack((len(t.target), (~t.is_finite).sum(), t.target.sum(), t.features.sum(0))) for t in tasks()], 0
        )
        count, unusable, ones, *sums = (yield Summand(torch.from_numpy(facts))).tolist()
        width = len(sums) + self.intercept
        found = BucketFit.empty(1, len(configs), width)
        if not count or unusable or (self.is_classifier and ones in (0, count)):
            found.status[0] = GroupStatus.NO_ROWS if not count else GroupStatus.NOT_FINITE
            if count and not unusable:
                found.status[0] = GroupStatus.ONE_CLASS
                found.coefficients[0] = self._constant(np.array([ones]), np.array([count]), width)
            return found
        mean, scale = np.zeros((1, len(sums))), np.ones((1, len(sums)))
        if self.standardize:
            mean = np.array([sums]) / count
            spread = sum((np.square(task.features - mean).sum(0) for task in tasks()), np.zeros(len(sums)))
            spread = (yield Summand(torch.from_numpy(spread))).numpy()[None] / count
            scale = np.where(spread > 0, np.sqrt(spread), 1.0)

        def rows() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for task in tasks():
                for begin in range(0, len(task.target), _ROWS_AT_ONCE):
                    part = slice(begin, begin + _ROWS_AT_ONCE)
                    target = task.target[part]
                    x = np.ones((len(target), width))
                    x[:, : len(sums)] = task.features[part]
                    if self.standardize:
                        x[:, : len(sums)] = (x[:, : len(sums)] - mean) / scale
                    yield torch.from_numpy(x), torch.from_numpy(target)

        newton = SummedNewton(penalties * count if self.per_row else penalties, width, has_intercept=self.intercept)
        while not newton.has_ended:
            part = torch.zeros(len(configs) * (1 + width + width**2), dtype=torch.float64)
            for x, target in rows():
                part += sums_of(x, target, self.family, newton.coefficients).flat
            newton.told(GlmSums.of_flat((yield Summand(part)), len(configs), width))
        found.coefficients[0] = self._as_they_are(newton.coefficients.numpy()[None], mean, scale)[0]
        found.losses[0], found.steps[0] = newton.objectives.numpy() / count, newton.steps
        if not newton.has_converged.all():
            found.status[0] = GroupStatus.NOT_CONVERGED
        if self.is_classifier:
            margins = [(x @ newton.coefficients.T).abs().amax() for x, _ in rows() if len(x)]
            greatest = torch.stack(margins).amax(0, keepdim=True) if margins else torch.zeros(1, dtype=torch.float64)
            if float((yield Summand(greatest, "max"))) > _LARGE_MARGIN:
                found.status[0] = GroupStatus.SEPARABLE
        return found

    def fit_together(self, tasks: Callable[[], Iterable[BucketTask]], config: Glm) -> np.ndarray:
        """Fit one model to the rows of all groups; rows that are not finite are left out."""
        found = run_alone(self.fit_summed(lambda: (task.finite() for task in tasks()), [config]))
        return np.asarray(found.coefficients[0, 0])

    def margins(self, coefficients: np.ndarray, features: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return the margins of rows.

        Args:
            coefficients: (groups, ...), as `fit` has made them.
            features: (rows, features).
            groups: (rows,), which of the coefficients.
        """
        count = features.shape[1]
        made = np.einsum("rf,rf->r", features, coefficients[groups, :count])
        return np.asarray(made + coefficients[groups, count] if self.intercept else made)

    def means(self, margins: np.ndarray) -> np.ndarray:
        """Return what the margins of rows predict."""
        return np.asarray(self.family.means(torch.from_numpy(margins)))

    def loss_of(self, margins: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the loss of each row."""
        return np.asarray(self.family.losses(torch.from_numpy(margins), torch.tensor(target)))

    def _constant(self, ones: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
        """The models of groups of one class, for which the best intercept is infinite: one by the rule of succession.

        Args:
            ones, counts: (groups,).
        """
        made = np.full((len(counts), width), 0.0 if self.intercept else np.nan)
        if self.intercept:
            made[:, -1] = np.log((ones + 0.5) / (counts - ones + 0.5))
        return made

    def _scales(self, task: BucketTask) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the scale of each group's features."""
        groups, features = len(task.offsets) - 1, task.features.shape[1]
        mean, scale = np.zeros((groups, features)), np.ones((groups, features))
        if self.standardize:
            counts = np.maximum(np.diff(task.offsets), 1)[:, None]
            mean = task.sums(task.features) / counts
            spread = task.sums(np.square(task.features - mean[task.group])) / counts
            scale = np.where(spread > 0, np.sqrt(spread), 1.0)
        return mean, scale

    def _padded(
        self, task: BucketTask, at: np.ndarray, mean: np.ndarray, scale: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = np.diff(task.offsets)[at]
        rows = task.offsets[:-1][at, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        count = task.features.shape[1]
        x = np.empty((len(at), count + self.intercept, rows.shape[1]))  # all rows of a feature, side by side
        x[:, :count] = task.features[rows].transpose(0, 2, 1)
        if self.standardize:
            x[:, :count] = (x[:, :count] - mean[at, :, None]) / scale[at, :, None]
        if self.intercept:
            x[:, -1] = 1.0
        return torch.from_numpy(x).mT, torch.from_numpy(task.target[rows])

    def _as_they_are(self, coefficients: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Coefficients for the features as they are, of those for scaled ones."""
        if not self.standardize:
            return coefficients
        made, count = coefficients.copy(), mean.shape[1]
        made[..., :count] /= scale[:, None]
        if self.intercept:
            made[..., -1] -= (made[..., :count] * mean[:, None]).sum(-1)
        return made

    def _as_scaled(self, coefficients: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """(groups, width): coefficients for scaled features, of those for the features as they are."""
        made, count = coefficients.copy(), mean.shape[1]
        if self.standardize and self.intercept:
            made[:, -1] += (made[:, :count] * mean).sum(1)
        made[:, :count] *= scale
        return made


def _penalties(configs: Sequence[Glm]) -> torch.Tensor:
    return torch.tensor([float(config.l2) for config in configs], dtype=torch.float64)  # type: ignore[arg-type]


def _strengths(configs: Sequence[Glm]) -> torch.Tensor:
    return torch.tensor([float(config.shrink) for config in configs], dtype=torch.float64)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Linear(Glm):
    """Linear regression with a ridge penalty: scikit-learn's `Ridge(alpha=l2)`."""

    family: ClassVar[Family] = GaussianFamily()


@dataclass(frozen=True)
class Logistic(Glm):
    """Logistic regression of two classes with a ridge penalty: scikit-learn's `LogisticRegression(C=1 / l2)`."""

    family: ClassVar[Family] = BernoulliFamily()
    is_classifier: ClassVar[bool] = True


@dataclass(frozen=True)
class Poisson(Glm):
    """Poisson regression with a ridge penalty: scikit-learn's `PoissonRegressor(alpha=l2 / rows)`, or
    `PoissonRegressor(alpha=l2)` with `per_row`."""

    family: ClassVar[Family] = PoissonFamily()
