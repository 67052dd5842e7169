"""The work of a fit that is the same wherever it is done: from the rows of a bucket to the records of its groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offbeat.groups.buckets import GroupRows, numbers_in
from offbeat.groups.fitting import BucketTask, GroupStatus, no_model
from offbeat.groups.records import GroupRecords
from offbeat.groups.search import HoldOut, held_out
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.groups.fitting import GroupModel
    from offbeat.groups.group_index import GroupIndex


@dataclass(frozen=True)
class Small:
    """The treatment of groups that have few rows.

    Args:
        min_rows: below which a group is small.
        fallback: "skip": nothing predicts for it; "global": one model of all rows does, and for keys that are not
            known; "raise": `fit` refuses the table.
    """

    min_rows: int = 1
    fallback: str = "skip"

    def __post_init__(self) -> None:
        if self.fallback not in ("global", "skip", "raise"):
            raise GroupDataError(f"Cannot fall back to {self.fallback!r}: name 'skip', 'global' or 'raise'.")


@dataclass(frozen=True)
class GroupJob:
    """A fit of groups: what is fitted to which columns, and how.

    Args:
        model: the spec, and `configs` the configurations that it stands for.
        by, features, target: columns.
        classes: the values of the target, of a classification; else None.
        schema: of the columns that are needed.
    """

    model: GroupModel
    configs: Sequence[Any]
    by: Sequence[str]
    features: Sequence[str]
    target: str
    classes: pa.Array | None
    schema: pa.Schema
    validation: HoldOut
    small: Small

    @property
    def width(self) -> int:
        """Return how many numbers a model is."""
        return self.model.width(len(self.features))

    def task(self, rows: GroupRows, index: GroupIndex) -> BucketTask:
        """Return the rows of a bucket as numbers."""
        if self.classes is None:
            target = numbers_in(rows.table[self.target], self.target)
        else:
            places = pc.index_in(rows.table[self.target], value_set=self.classes)
            target = np.asarray(places.cast(pa.float64()).to_numpy(), np.float64)
        classes = 0 if self.classes is None else len(self.classes)
        return BucketTask(rows.matrix(self.features), target, rows.offsets, index.hashes[rows.numbers], classes)

    def fit(self, rows: GroupRows, index: GroupIndex) -> GroupRecords:
        """Fit the groups of a bucket, and return their records, in the order of `rows.numbers`."""
        task = self.task(rows, index)
        groups = len(rows.numbers)
        records = GroupRecords.empty(groups, len(self.configs), self.width, self.model.dtype)
        if len(self.configs) > 1:
            held = held_out(task.hashes, task.offsets, self.validation, self._moments(rows), self._strata(task))
            part, rest = task.rows(~held), task.rows(held)
            found = self.model.fit(part, self.configs)
            records.losses[:], records.steps[:] = found.losses, found.steps
            for at in range(len(self.configs)):
                margins = self.model.margins(found.coefficients[:, at], rest.features, rest.group)
                records.held_losses[:, at] = rest.means(self.model.loss_of(margins, rest.target))
            scores = np.where(np.isfinite(records.held_losses), records.held_losses, np.inf)
            records.chosen[:] = scores.argmin(1)
        for at, config in enumerate(self.configs):
            which = np.flatnonzero(records.chosen == at)
            if not len(which):
                continue
            final = self.model.fit(task.groups(which), [config])
            records.coefficients[which] = final.coefficients[:, 0]
            records.status[which], records.errors[which] = final.status, final.errors
            if len(self.configs) == 1:
                records.losses[:], records.steps[:] = final.losses, final.steps
        is_small = np.diff(rows.offsets) < self.small.min_rows
        records.status[is_small] = GroupStatus.TOO_SMALL
        records.coefficients[is_small] = no_model(self.model.dtype)
        return records

    def pooled(self, records: GroupRecords, index: GroupIndex) -> Any:
        """Return the configuration that is best over all groups, each with the weight of its rows."""
        is_known = np.isfinite(records.held_losses)
        # Where a configuration failed that worked for others, it may not win by what it lacks.
        losses = np.where(is_known, records.held_losses, np.where(is_known.any(1, keepdims=True), np.inf, 0))
        scores = (losses * index.rows[:, None]).sum(0)
        return self.configs[int(scores.argmin())]

    def _moments(self, rows: GroupRows) -> np.ndarray | None:
        if self.validation.by is None:
            return None
        column = rows.table[self.validation.by]
        if pa.types.is_temporal(column.type):
            column = column.cast(pa.timestamp("us")).cast(pa.int64())
        return numbers_in(column, self.validation.by)

    def _strata(self, task: BucketTask) -> np.ndarray | None:
        return np.nan_to_num(task.target).astype(np.int64) if self.model.is_classifier else None
