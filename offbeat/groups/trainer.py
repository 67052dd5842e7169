"""The training of one model for each group of a table.

    trainer = GroupedTrainer(Logistic(l2=Grid(0.1, 1, 10)), by=["country", "store"], target="sold")
    fitted = trainer.fit("sales/*.parquet")
    fitted.predict(frame)

A fit reads the table twice: groups are counted, then rows are written to files of buckets, and each bucket is fitted by
itself. Each group is a row of a few arrays, and no object of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offbeat.groups.buckets import BucketFiles, GroupRows, cut_buckets, is_number, numbers_in
from offbeat.groups.fitted import FittedGroups
from offbeat.groups.fitting import BucketTask, GroupStatus
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.records import GroupModels, GroupRecords
from offbeat.groups.search import HoldOut, configs, held_out
from offbeat.groups.table_input import GroupDataError, TableInput, open_table

if TYPE_CHECKING:
    from offbeat.groups.fitting import GroupModel

Progress = Callable[[int, int], None]
"""Called after each bucket with the number of groups that have ended, and of all."""


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


class GroupedTrainer:
    """One model for each group of a table.

    Args:
        model: the spec, with `Grid(...)` where values are to be tried.
        by: the column, or columns, of the keys.
        target: the column that is predicted.
        features: the columns by which; None for all others, which have to be numbers.
        validation: by which part of a group's rows a configuration is chosen. The model of that configuration is then
            fitted to all rows.
        small: what becomes of groups that have few rows.
    """

    def __init__(
        self,
        model: GroupModel,
        *,
        by: str | Sequence[str],
        target: str,
        features: Sequence[str] | None = None,
        validation: HoldOut = HoldOut(),  # noqa: B008  (frozen)
        small: Small = Small(),
    ) -> None:
        self.model, self.target, self.validation, self.small = model, target, validation, small
        self.by = [by] if isinstance(by, str) else list(by)
        self.features = None if features is None else list(features)
        self.configs = configs(model)
        for config in self.configs:
            config.check()
        if not self.by:
            raise GroupDataError("Cannot group by no column: name one in `by`.")

    def fit(self, data: Any, progress: Progress | None = None) -> FittedGroups:
        """Fit all groups.

        Args:
            data: as of `open_table`.
            progress: told after each bucket.

        Raises:
            GroupDataError: if the table cannot be used; a group that cannot be fitted is a row of `models` instead.
        """
        table = open_table(data)
        features = self._features(table)
        classes = self._classes(table) if self.model.is_classifier else None
        index = GroupIndex.count(table.batches(self.by), self.by, table.schema)
        if self.small.fallback == "raise" and (index.rows < self.small.min_rows).any():
            first = index.keys.slice(int(np.argmax(index.rows < self.small.min_rows)), 1).to_pylist()[0]
            raise GroupDataError(f"Cannot fit the group {first}: it has less than {self.small.min_rows} rows.")
        records = GroupRecords.empty(index, len(self.configs), self.model.width(len(features)))
        moment = [self.validation.by] if self.validation.by is not None and len(self.configs) > 1 else []
        needed = list(dict.fromkeys([*self.by, *features, self.target, *moment]))
        schema = pa.schema([table.schema.field(name) for name in needed])
        with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as folder:
            files = BucketFiles(Path(folder), index, cut_buckets(index.rows, 8 * len(needed)))
            files.write(table.batches(needed), schema)
            ended = 0
            for bucket in range(files.count):
                rows = files.read(bucket)
                self._fit_bucket(rows, self._task(rows, features, classes, index), records)
                ended += len(rows.numbers)
                if progress is not None:
                    progress(ended, len(index))
            if self.small.fallback == "global" and len(index):
                config = self.configs[self._pooled(records, index)]
                records.fallback = self.model.fit_together(
                    lambda: (self._task(files.read(at), features, classes, index) for at in range(files.count)), config
                )
        return FittedGroups(GroupModels(self.model, index, records, features, self.target, classes))

    def _fit_bucket(self, rows: GroupRows, task: BucketTask, records: GroupRecords) -> None:
        numbers, chosen = rows.numbers, np.zeros(len(rows.numbers), np.int64)
        if len(self.configs) > 1:
            held = held_out(task.hashes, task.offsets, self.validation, self._moments(rows), self._strata(task))
            part, rest = task.rows(~held), task.rows(held)
            found = self.model.fit(part, self.configs)
            records.losses[numbers] = found.losses
            for at in range(len(self.configs)):
                margins = self.model.margins(found.coefficients[:, at], rest.features, rest.group)
                records.held_losses[numbers, at] = rest.means(self.model.loss_of(margins, rest.target))
            scores = np.where(np.isfinite(records.held_losses[numbers]), records.held_losses[numbers], np.inf)
            chosen = scores.argmin(1)
            records.steps[numbers] = found.steps
        for at, config in enumerate(self.configs):
            which = np.flatnonzero(chosen == at)
            if not len(which):
                continue
            final = self.model.fit(task.groups(which), [config])
            records.coefficients[numbers[which]] = final.coefficients[:, 0]
            records.status[numbers[which]] = final.status
            if len(self.configs) == 1:
                records.losses[numbers], records.steps[numbers] = final.losses, final.steps
        records.chosen[numbers] = chosen
        is_small = np.diff(rows.offsets) < self.small.min_rows
        records.status[numbers[is_small]] = GroupStatus.TOO_SMALL
        records.coefficients[numbers[is_small]] = np.nan

    def _pooled(self, records: GroupRecords, index: GroupIndex) -> int:
        """The configuration that is best over all groups, each with the weight of its rows."""
        scores = np.nansum(records.held_losses * index.rows[:, None], 0)
        return int(scores.argmin())

    def _task(
        self, rows: GroupRows, features: Sequence[str], classes: pa.Array | None, index: GroupIndex
    ) -> BucketTask:
        if classes is None:
            target = numbers_in(rows.table[self.target], self.target)
        else:
            places = pc.index_in(rows.table[self.target], value_set=classes)
            target = np.asarray(places.cast(pa.float64()).to_numpy(), np.float64)
        return BucketTask(rows.matrix(features), target, rows.offsets, index.hashes[rows.numbers])

    def _moments(self, rows: GroupRows) -> np.ndarray | None:
        if self.validation.by is None:
            return None
        column = rows.table[self.validation.by]
        if pa.types.is_temporal(column.type):
            column = column.cast(pa.timestamp("us")).cast(pa.int64())
        return numbers_in(column, self.validation.by)

    def _strata(self, task: BucketTask) -> np.ndarray | None:
        return np.nan_to_num(task.target).astype(np.int64) if self.model.is_classifier else None

    def _features(self, table: TableInput) -> list[str]:
        """The columns by which a model predicts."""
        names = table.schema.names
        asked = [*self.by, self.target, *(self.features or []), *([self.validation.by] if self.validation.by else [])]
        for name in asked:
            if name not in names:
                raise GroupDataError(f"Cannot fit: there is no column {name!r} among {', '.join(names)}.")
        if self.features is not None:
            found = self.features
        else:
            found = [name for name in names if name not in {*self.by, self.target, self.validation.by}]
        for name in found:
            if not is_number(table.schema.field(name).type):
                raise GroupDataError(
                    f"Cannot compute with the column {name!r}, {table.schema.field(name).type}: encode it as numbers, "
                    "or name the columns to use in `features`."
                )
        return found

    def _classes(self, table: TableInput) -> pa.Array:
        """The two values of the target."""
        values = pa.array([], table.schema.field(self.target).type)
        for part in table.batches([self.target]):
            values = pc.unique(pa.chunked_array([values, *part[self.target].chunks]))
            if len(values) > 3:
                break
        values = values.drop_null()
        if len(values) != 2:
            raise GroupDataError(
                f"Cannot classify by {self.target!r}: a logistic regression needs two classes, and there are "
                f"{'more' if len(values) > 2 else len(values)}."
            )
        return values.take(pc.sort_indices(values))
