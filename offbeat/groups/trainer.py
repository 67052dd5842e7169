"""The training of one model for each group of a table.

    trainer = GroupedTrainer(Logistic(l2=Grid(0.1, 1, 10)), by=["country", "store"], target="sold")
    fitted = trainer.fit("sales/*.parquet")
    fitted.predict(frame)

A fit reads the table twice: groups are counted, then rows are written to files of buckets, and each bucket is fitted by
itself. Each group is a row of a few arrays, and no object of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from offbeat.groups.cost import FitForecast, forecast
from offbeat.groups.fitted import FittedGroups
from offbeat.groups.group_job import GroupJob, Small, is_shrunk
from offbeat.groups.overrides import GroupOverrides
from offbeat.groups.search import HoldOut
from offbeat.groups.search_methods import GridSearch
from offbeat.groups.table_input import GroupDataError, is_number, open_table
from offbeat.groups.this_process import ThisProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from offbeat.groups.fitting import GroupModel
    from offbeat.groups.search_methods import SearchMethod
    from offbeat.groups.this_process import Executor, Progress


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
        executor: where groups are fitted: in this process, by several (`Processes(8)`), or by all workers of a job
            (`Ranks()`).
        search: what is tried of the spec, and how: `GridSearch`, `RandomSearch`, `Halving` or `Pooled`.
        overrides: hyper-parameters of single groups by their keys, `{("FR", "Lyon"): {"l2": 10}}`, which are fitted
            so and not searched.
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
        executor: Executor = ThisProcess(),  # noqa: B008  (frozen)
        search: SearchMethod = GridSearch(),  # noqa: B008  (frozen)
        overrides: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> None:
        self.model, self.target, self.validation, self.small = model, target, validation, small
        self.executor, self.search = executor, search
        self.by = [by] if isinstance(by, str) else list(by)
        self.features = None if features is None else list(features)
        self.configs = search.configs(model)
        for config in self.configs:
            config.check()
        if not self.by:
            raise GroupDataError("Cannot group by no column: name one in `by`.")
        self.overrides = GroupOverrides.of(overrides or {}, len(self.by))
        every = [*self.configs, *self.overrides.configs(model)]
        if small.fallback != "parent" and any(map(is_shrunk, every)):
            raise GroupDataError(
                "Cannot shrink groups toward their parents: no parent has a model. Set small=Small(fallback='parent'), "
                "or shrink=0."
            )

    def fit(self, data: Any, progress: Progress | None = None, *, folder: str | Path | None = None) -> FittedGroups:
        """Fit all groups.

        Args:
            data: as of `open_table`.
            progress: told after each bucket.
            folder: where to leave what was fitted, bucket by bucket; a fit that was ended continues there.

        Raises:
            GroupDataError: if the table cannot be used, or the folder is of another fit; a group that cannot be fitted
                is a row of `models` instead.
        """
        tell = progress or (lambda ended, groups: None)
        return FittedGroups(self.executor.fit(self, open_table(data), tell, None if folder is None else Path(folder)))

    def explain(self, data: Any, workers: int = 4) -> FitForecast:
        """Return how a fit would go, and how long it would take: a few groups are fitted and timed.

        Args:
            data: as of `open_table`; it is read twice.
            workers: the most that are asked about.

        Raises:
            GroupDataError: if the table cannot be used.
        """
        if workers < 1:
            raise GroupDataError(f"Cannot explain a fit by {workers} workers: name 1 or more.")
        return forecast(self, open_table(data), workers)

    def job(self, schema: pa.Schema, values: pa.Array | None) -> GroupJob:
        """Return the work with a table of these columns.

        Args:
            values: the distinct values of the target, of a classification; else None.

        Raises:
            GroupDataError: if a column is missing or cannot be used, or there are too many or too few classes.
        """
        features = self._features(schema)
        classes = None if values is None else self._sorted(values)
        moment = [self.validation.by] if self.validation.by is not None and len(self.configs) > 1 else []
        needed = list(dict.fromkeys([*self.by, *features, self.target, *moment]))
        schema = pa.schema([schema.field(name) for name in needed])
        return GroupJob(
            self.model,
            self.configs,
            self.by,
            features,
            self.target,
            classes,
            schema,
            self.validation,
            self.small,
            self.search,
            self.overrides,
        )

    def classes(self, parts: Iterable[pa.Table], schema: pa.Schema) -> pa.Array | None:
        """Return the distinct values of the target, or those found until there were too many; None for a regression.

        Args:
            parts: of the table, with the column of the target.
        """
        if not self.model.is_classifier:
            return None
        self._features(schema)  # so that a missing column is named
        values = pa.array([], schema.field(self.target).type)
        for part in parts:
            values = pc.unique(pa.chunked_array([values, *part[self.target].chunks]))
            if len(values) > self.model.most_classes + 1:
                break
        return values.drop_null()

    def _sorted(self, values: pa.Array) -> pa.Array:
        most = self.model.most_classes
        if not 2 <= len(values) <= most:
            needed = "two classes" if most == 2 else f"2 to {most} classes"
            raise GroupDataError(
                f"Cannot classify by {self.target!r}: {type(self.model).__name__} needs {needed}, and there are "
                f"{'more' if len(values) > most else len(values)}."
            )
        return values.take(pc.sort_indices(values))

    def _features(self, schema: pa.Schema) -> list[str]:
        """The columns by which a model predicts."""
        names = schema.names
        asked = [*self.by, self.target, *(self.features or []), *([self.validation.by] if self.validation.by else [])]
        for name in asked:
            if name not in names:
                raise GroupDataError(f"Cannot fit: there is no column {name!r} among {', '.join(names)}.")
        if self.features is not None:
            found = self.features
        else:
            found = [name for name in names if name not in {*self.by, self.target, self.validation.by}]
        for name in found:
            if not is_number(schema.field(name).type):
                raise GroupDataError(
                    f"Cannot compute with the column {name!r}, {schema.field(name).type}: encode it as numbers, "
                    "or name the columns to use in `features`."
                )
        return found
