"""The fit of one bucket of groups: its rows, and the models that a spec makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

_GROWTH = 1.25  # of the rows within groups that are padded together
_MOST_PADDED_BYTES = 64 << 20


class GroupStatus(IntEnum):
    """The outcome of a group's fit."""

    OK = 0
    NO_ROWS = 1
    NOT_FINITE = 2
    ONE_CLASS = 3
    SEPARABLE = 4
    NOT_CONVERGED = 5
    TOO_SMALL = 6
    KILLED = 7
    FAILED = 8

    @property
    def text(self) -> str:
        """Return it in words."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class BucketTask:
    """Rows of groups that are fitted, group by group.

    Args:
        features: (rows, features), float64; NaN where one is missing.
        target: (rows,), float64; of a classification the place of each row's class among all of the table.
        offsets: (groups + 1,), where the rows of each group begin and end.
        hashes: (groups,), of their keys: what is random is a function of these.
        classes: of the table, of a classification; else 0.
        start: (groups, width), models close to which a better one is expected: a spec may begin there. NaN for none.
        parents: (groups, width), the models of the groups' parents; None where nothing is shrunk toward them.
    """

    features: np.ndarray
    target: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray
    classes: int = 0
    start: np.ndarray | None = None
    parents: np.ndarray | None = None

    @classmethod
    def empty(cls, features: int) -> Self:
        """Return no group."""
        return cls(np.zeros((0, features)), np.zeros(0), np.zeros(1, np.int64), np.zeros(0, np.uint64))

    def rows(self, which: np.ndarray) -> BucketTask:
        """Return the same groups with some of their rows."""
        kept = np.concatenate(([0], np.cumsum(which)))
        return replace(self, features=self.features[which], target=self.target[which], offsets=kept[self.offsets])

    def groups(self, which: np.ndarray) -> BucketTask:
        """Return some of the groups, ascending."""
        if len(which) == len(self.offsets) - 1:
            return self
        counts = np.diff(self.offsets)
        is_of = np.zeros(len(counts), np.bool_)
        is_of[which] = True
        rows = np.repeat(is_of, counts)
        offsets = np.concatenate(([0], np.cumsum(counts[which])))
        start, parents = (None if models is None else models[which] for models in (self.start, self.parents))
        features, target, hashes = self.features[rows], self.target[rows], self.hashes[which]
        return BucketTask(features, target, offsets, hashes, self.classes, start, parents)

    def finite(self) -> BucketTask:
        """Return the rows that can be computed with."""
        return self.rows(self.is_finite)

    @property
    def is_finite(self) -> np.ndarray:
        """Return (rows,): whether a row can be computed with."""
        return self.usable()

    def usable(self, *, takes_missing: bool = False) -> np.ndarray:
        """Return (rows,): whether a row can be computed with by a model that may take missing features."""
        return np.asarray(usable_rows(self.features, takes_missing=takes_missing) & np.isfinite(self.target))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over the rows of each group; 0 for one without rows.

        Args:
            values: (rows, ...).
        """
        made = np.zeros((len(self.offsets) - 1, *values.shape[1:]))
        is_there = np.diff(self.offsets) > 0
        if is_there.any():
            made[is_there] = np.add.reduceat(values, self.offsets[:-1][is_there], axis=0, dtype=np.float64)
        return made

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over the rows of each group; NaN for one without rows.

        Args:
            values: (rows,).
        """
        counts = np.diff(self.offsets)
        return np.asarray(self.sums(values) / np.where(counts > 0, counts, np.nan))

    @property
    def group(self) -> np.ndarray:
        """Return (rows,): the place of each row's group."""
        counts = np.diff(self.offsets)
        return np.repeat(np.arange(len(counts)), counts)


class GroupModel(Protocol):
    """The Protocol of a model spec, a frozen dataclass: how groups are trained, and how they predict.

    The model of a group is a row of `width` numbers, or of one text or object. A spec with a `Grid`
    in a field stands for several configurations, which differ in such fields alone.
    """

    @property
    def is_classifier(self) -> bool:
        """Return whether the target is a class."""

    @property
    def most_classes(self) -> int:
        """Return how many classes a table may have, of a classification."""

    @property
    def takes_missing(self) -> bool:
        """Return whether features may be missing."""

    @property
    def dtype(self) -> type:
        """Return what a model is made of: `float`, `str` for one text, or `object` for one of another library."""

    def check(self) -> None:
        """Check one configuration.

        Raises:
            GroupDataError: if it cannot be used.
        """

    def shown(self, coefficients: np.ndarray, features: Sequence[str]) -> dict[str, np.ndarray]:
        """Return what users are shown of models, by the name of the column: (groups,) each.

        Args:
            coefficients: (groups, width).
            features: their names.
        """

    def width(self, features: int) -> int:
        """Return how many numbers a model is."""

    def fit(self, task: BucketTask, configs: Sequence[Any]) -> BucketFit:
        """Fit a model for each group of a bucket and each configuration."""

    def fit_together(self, tasks: Callable[[], Iterable[BucketTask]], config: Any) -> np.ndarray:
        """Fit one model to the rows of all groups.

        Args:
            tasks: called as often as the rows are needed, for all buckets.

        Returns:
            (width,).
        """

    def margins(self, coefficients: np.ndarray, features: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return (rows,): the margin of each row, or (rows, classes) where there are more than two.

        Args:
            coefficients: (groups, width).
            features: (rows, features).
            groups: (rows,), which of the coefficients; -1 is the last.
        """

    def means(self, margins: np.ndarray) -> np.ndarray:
        """Return what margins predict: the mean of the target, or the probability of the second class, or of each."""

    def loss_of(self, margins: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the loss of each row."""


@runtime_checkable
class MixedModel(Protocol):
    """The Protocol of a model spec that fits groups with different configurations at once."""

    def fit_each(self, task: BucketTask, configs: Sequence[Any]) -> BucketFit:
        """Fit a model for each group of a bucket, of one configuration.

        Args:
            configs: of each group.
        """


@runtime_checkable
class ShrunkModel(Protocol):
    """The Protocol of a model spec that may shrink groups toward their parents; then it is a `SummingModel`, too.

    Attributes:
        shrink: how much, 0 or greater; `BucketTask.parents` are there where it is not 0.
    """

    shrink: Any


@dataclass
class BucketFit:
    """The models of a bucket.

    Args:
        coefficients: (groups, configs, width); NaN, or None, where there is no model.
        losses: (groups, configs): the objective for each row that was fitted.
        steps: (groups, configs), of training.
        status: (groups,), of `GroupStatus`.
        errors: (groups,), texts, and None where nothing failed.
    """

    coefficients: np.ndarray
    losses: np.ndarray
    steps: np.ndarray
    status: np.ndarray
    errors: np.ndarray

    @classmethod
    def empty(cls, groups: int, configs: int, width: int, dtype: type = float) -> Self:
        """Return one without models."""
        return cls(
            no_models((groups, configs, width), dtype),
            np.full((groups, configs), np.nan),
            np.zeros((groups, configs), np.int64),
            np.full(groups, GroupStatus.OK, np.int8),
            np.full(groups, None),
        )

    def mark_unusable(self, task: BucketTask, *, is_classifier: bool, takes_missing: bool = False) -> np.ndarray:
        """Set the status of the groups that cannot be fitted, and return which groups can be."""
        counts = np.diff(task.offsets)
        self.status[task.sums(~task.usable(takes_missing=takes_missing)) > 0] = GroupStatus.NOT_FINITE
        self.status[counts == 0] = GroupStatus.NO_ROWS
        if is_classifier:
            differs = task.target[1:] != task.target[:-1]
            differs &= task.group[1:] == task.group[:-1]
            is_one = task.sums(np.append(False, differs)) == 0
            self.status[is_one & (self.status == GroupStatus.OK)] = GroupStatus.ONE_CLASS
        return np.asarray(self.status == GroupStatus.OK)


def joined(tasks: Iterable[BucketTask], *, takes_missing: bool = False) -> BucketTask:
    """Return the rows of all groups as one group; rows that cannot be used are left out."""
    parts = [part.rows(part.usable(takes_missing=takes_missing)) for part in tasks]
    features, target = (np.concatenate(one) for one in zip(*((t.features, t.target) for t in parts), strict=True))
    return BucketTask(features, target, np.array([0, len(target)]), np.zeros(1, np.uint64), parts[0].classes)


def no_model(dtype: type) -> Any:
    """Return the value that stands where there is no model."""
    return np.nan if dtype is float else None


def no_models(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Return an array of places for models, of which none is there."""
    return np.full(shape, no_model(dtype), float if dtype is float else object)


def has_model(coefficients: np.ndarray) -> np.ndarray:
    """Return (...): whether there is a model.

    Args:
        coefficients: (..., width).
    """
    is_there = np.not_equal(coefficients, np.array(None)) if coefficients.dtype == object else ~np.isnan(coefficients)
    return np.asarray(is_there[..., 0], np.bool_)


def usable_rows(features: np.ndarray, *, takes_missing: bool) -> np.ndarray:
    """Return (rows,): whether a model can predict by these features.

    Args:
        features: (rows, features).
        takes_missing: whether the model takes NaN.
    """
    return np.asarray(np.isfinite(features).all(1) if not takes_missing else ~np.isinf(features).any(1))


def similar_sizes(
    counts: np.ndarray, usable: np.ndarray, width: int, most_bytes: int = _MOST_PADDED_BYTES
) -> Iterator[np.ndarray]:
    """Return the usable groups, in parts of similar sizes that are padded together.

    Args:
        counts: (groups,), of rows.
        width: how many numbers a row takes.
        most_bytes: of a part, if it is more than one group.
    """
    order = np.flatnonzero(usable)[np.argsort(counts[usable], kind="stable")]
    sizes = counts[order]
    begin = 0
    while begin < len(order):
        end = int(np.searchsorted(sizes, max(sizes[begin] + 1, sizes[begin] * _GROWTH), side="right"))
        most = max(1, most_bytes // int(8 * width * sizes[min(end, len(order)) - 1]))
        end = min(end, begin + most)
        yield order[begin:end]
        begin = end
