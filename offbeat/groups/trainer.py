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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offbeat.groups.buckets import BucketFiles, cut_buckets, is_number
from offbeat.groups.fitted import FittedGroups
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.group_job import GroupJob, Small
from offbeat.groups.records import GroupModels, GroupRecords
from offbeat.groups.search import HoldOut, configs
from offbeat.groups.table_input import GroupDataError, TableInput, open_table

if TYPE_CHECKING:
    from offbeat.groups.fitting import GroupModel

Progress = Callable[[int, int], None]
"""Called after each bucket with the number of groups that have ended, and of all."""


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
        small: Small = Small(),  # noqa: B008  (frozen)
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
        job = self._job(table)
        index = GroupIndex.count(table.batches(self.by), self.by, table.schema)
        self._check_sizes(index)
        records = GroupRecords.empty(len(index), len(job.configs), job.width, self.model.dtype)
        with tempfile.TemporaryDirectory(prefix="offbeat-groups-") as folder:
            files = BucketFiles(Path(folder), index, cut_buckets(index.rows, 8 * len(job.schema)))
            files.write(table.batches(job.schema.names), job.schema)
            ended = 0
            for bucket in range(files.count):
                rows = files.read(bucket)
                records.put(rows.numbers, job.fit(rows, index))
                ended += len(rows.numbers)
                if progress is not None:
                    progress(ended, len(index))
            if self.small.fallback == "global" and len(index):
                records.fallback = self.model.fit_together(
                    lambda: (job.task(files.read(at), index) for at in range(files.count)), job.pooled(records, index)
                )
        return FittedGroups(GroupModels(self.model, index, records, list(job.features), self.target, job.classes))

    def _job(self, table: TableInput) -> GroupJob:
        """The work, with the columns that this table has."""
        features = self._features(table)
        classes = self._classes(table) if self.model.is_classifier else None
        moment = [self.validation.by] if self.validation.by is not None and len(self.configs) > 1 else []
        needed = list(dict.fromkeys([*self.by, *features, self.target, *moment]))
        schema = pa.schema([table.schema.field(name) for name in needed])
        return GroupJob(
            self.model, self.configs, self.by, features, self.target, classes, schema, self.validation, self.small
        )

    def _check_sizes(self, index: GroupIndex) -> None:
        is_small = index.rows < self.small.min_rows
        if self.small.fallback == "raise" and is_small.any():
            first = index.keys.slice(int(np.argmax(is_small)), 1).to_pylist()[0]
            raise GroupDataError(f"Cannot fit the group {first}: it has less than {self.small.min_rows} rows.")

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
        """The values of the target."""
        most = self.model.most_classes
        values = pa.array([], table.schema.field(self.target).type)
        for part in table.batches([self.target]):
            values = pc.unique(pa.chunked_array([values, *part[self.target].chunks]))
            if len(values) > most + 1:
                break
        values = values.drop_null()
        if not 2 <= len(values) <= most:
            needed = "two classes" if most == 2 else f"2 to {most} classes"
            raise GroupDataError(
                f"Cannot classify by {self.target!r}: {type(self.model).__name__} needs {needed}, and there are "
                f"{'more' if len(values) > most else len(values)}."
            )
        return values.take(pc.sort_indices(values))
