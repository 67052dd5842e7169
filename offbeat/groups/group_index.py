"""The groups of a table: their keys, in order, and how many rows each has.

A group is numbered by the place of its key among all keys, sorted; nulls are keys like others and come last. So the
numbers are the same however the rows are split into files, batches or workers. Nothing here is a Python object for each
group: keys are an Arrow table, and rows are looked up by Arrow's hashes.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from offbeat.groups.mixing import mixed
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROWS = "rows of a group"
_FEW_KEYS = 1 << 14  # up to here a hash table for each batch is as fast
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
        self._levels: list[tuple[KeyValues, np.ndarray]] = []
        codes = np.zeros(keys.num_rows, np.int64)
        for name in self.by:
            values = KeyValues(pc.unique(keys[name]))
            codes = codes * len(values) + values.places_of(keys[name])
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

    def prefix(self, columns: int) -> GroupIndex:
        """Return the groups by the first columns of the key, with all rows of theirs."""
        return self._of([self.as_table()], self.by[:columns])

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
            texts = map(repr, values.values.to_pylist())
            of_values = np.array([xxh3_64_intdigest(text.encode()) for text in texts], np.uint64)
            found = mixed(found, of_values[values.places_of(self.keys[name])])
        return found

    def number_of(self, key: Sequence[Any]) -> int:
        """Return the number of a group; -1 where its key is not known, or of another type."""
        try:
            columns = [pa.array([value], self.keys[name].type) for name, value in zip(self.by, key, strict=True)]
        except (pa.ArrowException, TypeError):
            return -1
        return int(self.numbers_of(pa.table(columns, names=self.by))[0])

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
            place = values.places_of(column)
            codes = codes * len(values) + place
            is_known &= place >= 0
            if len(known) and known[-1] == len(known) - 1:  # all combinations are there
                codes = np.where((codes >= 0) & (codes < len(known)), codes, 0)
                continue
            at = np.searchsorted(known, codes)
            at[at == len(known)] = 0
            is_known &= known[at] == codes if len(known) else False
            codes = at
        return np.where(is_known, self._numbers[codes] if len(self) else -1, -1)


class KeyValues:
    """The distinct values of a column of keys, and the place of each.

    A hash table of Arrow's is made anew for each batch of rows, which takes longer than a look-up if there are a
    million keys. So whole numbers are looked up in an array by value, if these are dense, else by bisection.

    Args:
        values: in any order.
    """

    def __init__(self, values: pa.Array) -> None:
        self.values, self.type = values, values.type
        self._low, self._places = 0, np.zeros(0, np.int64)
        known = values.drop_null()
        if not pa.types.is_signed_integer(self.type) or len(known) < _FEW_KEYS:
            self._sorted = np.zeros(0, np.int64)
            return
        numbers = known.cast(pa.int64()).to_numpy()
        order = np.argsort(numbers)
        self._sorted, self._order = numbers[order], np.flatnonzero(values.is_valid())[order]
        self._null = int(np.argmax(values.is_null())) if values.null_count else -1
        low, high = int(self._sorted[0]), int(self._sorted[-1])
        if high - low < 4 * len(known):
            self._low, self._places = low, np.full(high - low + 1, -1, np.int64)
            self._places[self._sorted - low] = self._order

    def __len__(self) -> int:
        return len(self.values)

    def places_of(self, column: pa.ChunkedArray) -> np.ndarray:
        """Return the place of each value of a column, of the same type; -1 if it is not there."""
        if not len(self._sorted):
            found = pc.fill_null(pc.index_in(column, value_set=self.values), -1)
            return np.asarray(found.to_numpy(), np.int64)
        numbers = pc.fill_null(column.cast(pa.int64()), self._low).to_numpy()
        if len(self._places):
            is_within = (numbers >= self._low) & (numbers < self._low + len(self._places))
            made = np.where(is_within, self._places[np.where(is_within, numbers - self._low, 0)], -1)
        else:
            at = np.minimum(np.searchsorted(self._sorted, numbers), len(self._sorted) - 1)
            made = np.where(self._sorted[at] == numbers, self._order[at], -1)
        if column.null_count:
            made[np.asarray(column.is_null())] = self._null
        return np.asarray(made)


def _merge(parts: list[pa.Table], by: Sequence[str]) -> pa.Table:
    table = pa.concat_tables(parts).group_by(list(by), use_threads=False).aggregate([(_ROWS, "sum")])
    return table.rename_columns([*by, _ROWS] if table.column_names[0] in by else [_ROWS, *by])
