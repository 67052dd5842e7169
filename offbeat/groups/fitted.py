"""The models of groups that are fitted: tables of them, and predictions."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offbeat.groups.buckets import matrix_of
from offbeat.groups.fitting import GroupStatus, has_model
from offbeat.groups.parents import ParentModels
from offbeat.groups.saved import load, save
from offbeat.groups.table_input import open_table

if TYPE_CHECKING:
    from offbeat.groups.fitting import GroupModel
    from offbeat.groups.records import GroupModels


class FittedGroups:
    """The models of a table's groups.

    Args:
        made: by a fit, or read from a file.
    """

    def __init__(self, made: GroupModels) -> None:
        self._made = made
        self.model, self.index, self.records = made.model, made.index, made.records
        self.features, self.target, self.classes = made.features, made.target, made.classes
        self._parents = ParentModels(made.parents, made.records.fallback)

    @cached_property
    def models(self) -> pa.Table:
        """Return one row for each group: key, rows, chosen hyper-parameters, status, error, and coefficients."""
        records, table = self.records, self.index.keys
        table = table.append_column("rows", pa.array(self.index.rows))
        for name, values in self._made.tried.items():
            table = table.append_column(name, pa.array(values).take(pa.array(records.chosen)))
        words = pa.array([status.text for status in GroupStatus])
        table = table.append_column("status", words.take(pa.array(records.status)))
        table = table.append_column("error", pa.array(records.errors, pa.string()))
        for name, numbers in self.model.shown(records.coefficients, self.features).items():
            table = table.append_column(name, _without_nan(numbers))
        return table

    @cached_property
    def results(self) -> pa.Table:
        """Return one row for each group and configuration: what was tried, and how well it did."""
        count, records = self.records.losses.shape[1], self.records
        groups = np.repeat(np.arange(len(self.index)), count)
        table = self.index.keys.take(pa.array(groups))
        for name, values in self._made.tried.items():
            table = table.append_column(
                name, pa.array(values).take(pa.array(np.tile(np.arange(count), len(self.index))))
            )
        table = table.append_column("loss", _without_nan(records.losses.ravel()))
        table = table.append_column("loss of held-out rows", _without_nan(records.held_losses.ravel()))
        table = table.append_column("steps", pa.array(records.steps.ravel()))
        return table.append_column("is chosen", pa.array((np.arange(count) == records.chosen[:, None]).ravel()))

    def predict(self, data: Any) -> pa.Table:
        """Predict, for rows in their order.

        Args:
            data: as of `open_table`, with the columns of keys and features.

        Returns:
            prediction: a class, or a number; null where no model is for a row.
            probability: of the second class; of a classification alone. Of more than two classes there is a column
                for each instead: `probability of NAME`.
            model: "group"; for a key that is not known, or whose group has no model, "parent" if that has one (with
                several levels its last column, too: "parent country"), else "global" if there is one of all rows,
                else "none".

        Raises:
            GroupDataError: if a column is missing, or of another type.
        """
        table = open_table(data)
        models = np.concatenate((self.records.coefficients, self._parents.stacked))
        parts = [self._predict(part, models) for part in table.batches([*self.index.by, *self.features])]
        return pa.concat_tables(parts) if parts else self._predict(table.schema.empty_table(), models)

    def save(self, path: Path | str) -> None:
        """Write the models to a file; `load` reads it.

        Raises:
            OSError: if it cannot be written.
        """
        save(self._made, Path(path))

    @staticmethod
    def load(path: Path | str, model: GroupModel | None = None) -> FittedGroups:
        """Read the models of a file.

        Args:
            path: of the file that `save` has written.
            model: the spec; None where the file says it, as for linear models.

        Raises:
            GroupDataError: if the file cannot be read, is damaged, or does not say its spec.
        """
        return FittedGroups(load(Path(path), model))

    def _predict(self, part: pa.Table, models: np.ndarray) -> pa.Table:
        """The predictions of rows.

        Args:
            models: (models, width), of the groups, of the levels above them, and of all rows.
        """
        numbers = self.index.numbers_of(part)
        features = matrix_of(part, self.features)
        has_own = np.append(has_model(self.records.coefficients), False)[numbers]
        numbers[~has_own] = len(self.index) + self._parents.places_of(part.filter(pa.array(~has_own)))
        means = self.model.means(self.model.margins(models, features, numbers))
        made = {}
        if self.classes is None:
            made["prediction"] = _without_nan(means)
        elif len(self.classes) == 2:
            places = pa.array((means > 0.5).astype(np.int64), mask=np.isnan(means))
            made["prediction"] = self.classes.take(places)
            made["probability"] = _without_nan(means)
        else:
            means = np.broadcast_to(means.reshape(len(means), -1), (len(means), len(self.classes)))
            places = pa.array(means.argmax(1), mask=np.isnan(means[:, 0]))
            made["prediction"] = self.classes.take(places)
            for at, value in enumerate(self.classes.to_pylist()):
                made[f"probability of {value}"] = _without_nan(means[:, at])
        ends = np.append(0, self._parents.ends) + len(self.index)
        words = pa.array(["group", *self._parents.words])
        made["model"] = words.take(pa.array(np.searchsorted(ends, numbers, side="right")))
        return pa.table(made)


def _without_nan(values: np.ndarray) -> pa.Array:
    """An Arrow array in which NaN is null."""
    if values.dtype.kind != "f":
        return pa.array(values, pa.string() if values.dtype == object else None)
    return pc.if_else(pc.is_nan(pa.array(values)), None, pa.array(values))
