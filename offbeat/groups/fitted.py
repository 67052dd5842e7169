"""The models of groups that are fitted: tables of them, and predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offbeat.groups.buckets import numbers_in
from offbeat.groups.fitting import GroupStatus
from offbeat.groups.search import searched, values_of
from offbeat.groups.table_input import open_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.groups.fitting import GroupModel
    from offbeat.groups.group_index import GroupIndex


@dataclass
class GroupRecords:
    """The record of each group.

    Args:
        coefficients: (groups, width), of the chosen configuration, fitted to all rows; NaN where there is no model.
        chosen: (groups,), the configuration.
        losses, held_losses: (groups, configs), the objective for each row that was fitted, and the mean loss of a row
            that was held out.
        steps: (groups, configs).
        status: (groups,), of `GroupStatus`.
        seconds: (groups,), an equal share of the bucket's.
    """

    coefficients: np.ndarray
    chosen: np.ndarray
    losses: np.ndarray
    held_losses: np.ndarray
    steps: np.ndarray
    status: np.ndarray
    seconds: np.ndarray

    @classmethod
    def empty(cls, index: GroupIndex, configs: int, width: int) -> Self:
        """Return those of groups that are not fitted yet."""
        groups = len(index)
        return cls(
            np.full((groups, width), np.nan),
            np.zeros(groups, np.int64),
            np.full((groups, configs), np.nan),
            np.full((groups, configs), np.nan),
            np.zeros((groups, configs), np.int64),
            np.full(groups, GroupStatus.NO_ROWS, np.int8),
            np.zeros(groups),
        )


class FittedGroups:
    """The models of a table's groups.

    Args:
        model: the spec, and `configs` those that it stands for.
        features, target, classes: of the table; `classes` of a classification, else None.
    """

    def __init__(
        self,
        model: GroupModel,
        configs: Sequence[GroupModel],
        index: GroupIndex,
        records: GroupRecords,
        *,
        features: Sequence[str],
        target: str,
        classes: pa.Array | None,
    ) -> None:
        self.model, self.configs, self.index, self.records = model, list(configs), index, records
        self.features, self.target, self.classes = list(features), target, classes

    @cached_property
    def models(self) -> pa.Table:
        """Return one row for each group: key, rows, chosen hyper-parameters, status, and coefficients."""
        records, table = self.records, self.index.keys
        table = table.append_column("rows", pa.array(self.index.rows))
        for name in searched(self.model):
            values = pa.array(values_of(name, self.configs))
            table = table.append_column(name, values.take(pa.array(records.chosen)))
        words = pa.array([status.text for status in GroupStatus])
        table = table.append_column("status", words.take(pa.array(records.status)))
        for at, name in enumerate(self.model.columns(self.features)):
            table = table.append_column(name, _without_nan(records.coefficients[:, at]))
        return table

    @cached_property
    def results(self) -> pa.Table:
        """Return one row for each group and configuration: what was tried, and how well it did."""
        count, records = len(self.configs), self.records
        groups = np.repeat(np.arange(len(self.index)), count)
        table = self.index.keys.take(pa.array(groups))
        for name in searched(self.model):
            values = pa.array(values_of(name, self.configs))
            table = table.append_column(name, values.take(pa.array(np.tile(np.arange(count), len(self.index)))))
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
            probability: of the second class; of a classification alone.
            model: "group", or "none" for a key that is not known or whose group has no model.

        Raises:
            GroupDataError: if a column is missing, or of another type.
        """
        table = open_table(data)
        parts = [self._predict(part) for part in table.batches([*self.index.by, *self.features])]
        return pa.concat_tables(parts) if parts else self._predict(table.schema.empty_table())

    def _predict(self, part: pa.Table) -> pa.Table:
        numbers = self.index.numbers_of(part)
        coefficients = np.concatenate((self.records.coefficients, np.full((1, self._width), np.nan)))
        features = np.empty((part.num_rows, len(self.features)))
        for at, name in enumerate(self.features):
            features[:, at] = numbers_in(part[name], name)
        means = self.model.means(self.model.margins(coefficients, features, numbers))
        has_model = ~np.isnan(coefficients[numbers, 0])
        made = {}
        if self.classes is None:
            made["prediction"] = _without_nan(means)
        else:
            places = pa.array((means > 0.5).astype(np.int64), mask=np.isnan(means))
            made["prediction"] = self.classes.take(places)
            made["probability"] = _without_nan(means)
        words = pa.array(["none", "group"])
        made["model"] = words.take(pa.array(has_model.astype(np.int64)))
        return pa.table(made)

    @property
    def _width(self) -> int:
        return int(self.records.coefficients.shape[1])


def _without_nan(values: np.ndarray) -> pa.Array:
    """An Arrow array in which NaN is null."""
    return pc.if_else(pc.is_nan(pa.array(values)), None, pa.array(values))
