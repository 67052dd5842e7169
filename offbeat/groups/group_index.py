"""The groups of a table: their keys, in order, and how many rows each has.

A group is numbered by the place of its key among all keys, sorted; nulls are keys like others and come last. So the
numbers are the same however the rows are split into files, batches or workers. Nothing here is a Python object for each
group: keys are an Arrow table, and rows are looked up by Arrow's hashes.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from offbeat.groups.mixing import mixed
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROWS = "rows of a group"
_MERGED_AT = 1 << 20  # keys of parts that are counted together


class GroupIndex:
    """The keys of groups, sorted, and their rows.

    Args:
        keys: one row for each group.
        rows: (groups,), the rows of each.
    """

    def __init__(self, keys: pa.Table, rows: np.ndarray) -> None:
        self.keys, self.rows = keys, rows
        self.by = keys.column_names
        self._levels: list[tuple[pa.Array, np.ndarray]] = []
        codes = np.zeros(keys.num_rows, np.int64)
        for name in self.by:
            values = pc.unique(keys[name])
            codes = codes * len(values) + _places(keys[name], values)
            known = np.unique(codes)
            codes = np.searchsorted(known, codes)
            self._levels.append((values, known))
        self._numbers = np.empty(keys.num_rows, np.int64)
        self._numbers[codes] = np.arange(keys.num_rows)

    @classmethod
    def count(cls, parts: Iterable[pa.Table], by: Sequence[str], schema: pa.Schema) -> GroupIndex:
        """Count the rows of each group.

        Args:
            parts: of the table, with the columns of the keys.
            by: their names.
            schema: of the table.

        Raises:
            GroupDataError: if a key is of a type that has no order.
        """
        keys = pa.schema([schema.field(name) for name in by])
        for field in keys:
            if pa.types.is_nested(field.type):
                raise GroupDataError(f"Cannot group by {field.name!r}: {field.type} is no type of keys.")
        counted: list[pa.Table] = []
        for part in parts:
            ones = part.select(by).append_column(_ROWS, pa.repeat(pa.scalar(1, pa.int64()), part.num_rows))
            counted.append(_merge([ones], by))
            if sum(map(len, counted[1:])) > max(_MERGED_AT, len(counted[0])):
                counted = [_merge(counted, by)]
        if not counted:
            return cls(keys.empty_table(), np.zeros(0, np.int64))
        return cls._of(counted, by)

    @classmethod
    def of_table(cls, table: pa.Table, by: Sequence[str]) -> GroupIndex:
        """Return the groups of `as_table`."""
        return cls(table.select(list(by)), table[_ROWS].to_numpy())

    def as_table(self) -> pa.Table:
        """Return the keys and the rows of each group."""
        return self.keys.append_column(_ROWS, pa.array(self.rows, pa.int64()))

    @classmethod
    def merged(cls, parts: Sequence[GroupIndex]) -> GroupIndex:
        """Return the groups of several tables of the same schema, with the sums of their rows."""
        return cls._of([part.as_table() for part in parts], parts[0].by)

    @classmethod
    def _of(cls, counted: list[pa.Table], by: Sequence[str]) -> GroupIndex:
        found = _merge(counted, by).sort_by([(name, "ascending") for name in by]).combine_chunks()
        return cls(found.select(by), found[_ROWS].to_numpy())

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def hashes(self) -> np.ndarray:
        """Return 64 bits for each group, by its key alone: what is random in a group is a function of them."""
        found: np.ndarray = np.zeros(len(self), np.uint64)
        for name, (values, _) in zip(self.by, self._levels, strict=True):
            of_values = np.array([xxh3_64_intdigest(repr(value).encode()) for value in values.to_pylist()], np.uint64)
            found = mixed(found, of_values[_places(self.keys[name], values)])
        return found

    def numbers_of(self, table: pa.Table) -> np.ndarray:
        """Return the number of each row's group; -1 where a key is not known.

        Raises:
            GroupDataError: if a column of the keys is missing, or of a type that cannot be compared.
        """
        codes, is_known = np.zeros(table.num_rows, np.int64), np.ones(table.num_rows, np.bool_)
        for name, (values, known) in zip(self.by, self._levels, strict=True):
            if name not in table.column_names:
                raise GroupDataError(f"Cannot find groups: the column {name!r} is missing.")
            column = table[name]
            if column.type != values.type:
                try:
                    column = column.cast(values.type)
                except pa.ArrowException as error:
                    raise GroupDataError(
                        f"Cannot find groups: the column {name!r} is {column.type}, and was {values.type} in training."
                    ) from error
            place = _places(column, values)
            codes = codes * len(values) + place
            at = np.searchsorted(known, codes)
            at[at == len(known)] = 0
            is_known &= place >= 0
            is_known &= known[at] == codes if len(known) else False
            codes = at
        return np.where(is_known, self._numbers[codes] if len(self) else -1, -1)


def _places(column: pa.ChunkedArray, values: pa.Array) -> np.ndarray:
    """The place of each value of a column among `values`; -1 if it is not there."""
    found = pc.fill_null(pc.index_in(column, value_set=values), -1)
    return np.asarray(found.to_numpy(), np.int64)


def _merge(parts: list[pa.Table], by: Sequence[str]) -> pa.Table:
    table = pa.concat_tables(parts).group_by(list(by), use_threads=False).aggregate([(_ROWS, "sum")])
    return table.rename_columns([*by, _ROWS] if table.column_names[0] in by else [_ROWS, *by])
