"""Buckets of groups: the unit of files, messages and tasks.

Groups are put into buckets by their sizes, the largest first, until a bucket holds as many bytes as it may. So it holds
groups of similar sizes, and which ones depends on keys and sizes alone. The rows of a bucket are in one Arrow file, and
the process that trains it maps that. A million groups are a few hundred files.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from offbeat.errors import OffbeatError
from offbeat.groups.table_input import GroupDataError, is_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from offbeat.groups.group_index import GroupIndex

BUCKET_BYTES = 32 << 20
_NUMBER = "offbeat group"


@dataclass(frozen=True)
class GroupRows:
    """The rows of the groups of a bucket, group by group, in the order of the table.

    Args:
        numbers: (groups,), of the groups, ascending.
        offsets: (groups + 1,), where the rows of each begin and end.
        table: of all of them.
    """

    numbers: np.ndarray
    offsets: np.ndarray
    table: pa.Table

    def groups(self, which: np.ndarray) -> GroupRows:
        """Return some of the groups, ascending."""
        counts = np.diff(self.offsets)
        rows = np.concatenate([np.arange(begin, end) for begin, end in self.offsets[which[:, None] + [0, 1]]])
        return GroupRows(self.numbers[which], np.append(0, np.cumsum(counts[which])), self.table.take(pa.array(rows)))

    def matrix(self, columns: Sequence[str]) -> np.ndarray:
        """Return the columns as (rows, columns) float64; a null is NaN."""
        return matrix_of(self.table, columns)

    def some(self, every: int, most_rows: int) -> GroupRows:
        """Return one of so many groups, each with its first rows.

        Args:
            most_rows: of a group.
        """
        numbers, begins = self.numbers[::every], self.offsets[:-1][::every]
        counts = np.minimum(np.diff(self.offsets)[::every], most_rows)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(begins - offsets[:-1], counts) + np.arange(offsets[-1])
        return GroupRows(numbers, offsets, self.table.take(pa.array(rows)))


def matrix_of(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return columns of a table as (rows, columns) float64; a null is NaN.

    Raises:
        GroupDataError: if one is not of numbers.
    """
    made = np.empty((table.num_rows, len(columns)))
    for at, name in enumerate(columns):
        made[:, at] = numbers_in(table[name], name)
    return made


def numbers_in(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """The values of a column as float64; a null is NaN.

    Raises:
        GroupDataError: if they are no numbers.
    """
    if not is_number(column.type):
        raise GroupDataError(f"Cannot compute with the column {name!r}, {column.type}: encode it as numbers first.")
    return np.array(column.cast(pa.float64()).to_numpy(), np.float64)


def cut_buckets(rows: np.ndarray, row_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> np.ndarray:
    """Return the bucket of each group.

    Args:
        rows: (groups,), of each group.
        row_bytes: of one row.
        bucket_bytes: of a bucket; a group of a quarter of that or more has one of its own, so that it can be split.
    """
    order = np.lexsort((np.arange(len(rows)), -rows))
    buckets = np.zeros(len(rows), np.int64)
    sizes = rows[order] * max(1, row_bytes)
    ends = np.cumsum(sizes)
    begin = bucket = 0
    while begin < len(order):
        before = ends[begin] - sizes[begin]
        end = max(begin + 1, int(np.searchsorted(ends, before + bucket_bytes, side="right")))
        if sizes[begin] * 4 >= bucket_bytes:
            end = begin + 1
        buckets[order[begin:end]] = bucket
        begin, bucket = end, bucket + 1
    return buckets


class BucketFiles:
    """The rows of a table, in a file for each bucket; those of one bucket alone stay in memory if it is small.

    Args:
        folder: of the files; whoever has made it removes it.
        index: of the groups.
        buckets: (groups,), the bucket of each.
    """

    def __init__(self, folder: Path, index: GroupIndex, buckets: np.ndarray) -> None:
        self._folder, self._index, self.buckets = folder, index, buckets
        self.count = int(buckets.max()) + 1 if len(buckets) else 0
        self._kept: list[pa.Table] = []

    def write(self, parts: Iterable[pa.Table], schema: pa.Schema, rows: int | None = None) -> None:
        """Distribute the rows of a table.

        Args:
            rows: of this table; None for all rows of the groups.

        Raises:
            GroupDataError: if the disk is full, or the table has changed since its groups were counted.
        """
        schema, written = schema.append(pa.field(_NUMBER, pa.int64())), 0
        total = int(self._index.rows.sum())
        try:
            with ExitStack() as files:  # what a full disk could not take is often told when a file is closed
                if self.count == 1 and total * 8 * len(schema) <= BUCKET_BYTES:
                    write = [self._kept.append]
                else:
                    write = [self._writer(bucket, schema, files).write_table for bucket in range(self.count)]
                for part in parts:
                    numbers = self._index.numbers_of(part)
                    if len(numbers) and numbers.min() < 0:
                        raise GroupDataError("The table has other groups than when they were counted.")
                    part = part.append_column(_NUMBER, pa.array(numbers))
                    if self.count > 1:
                        buckets = self.buckets[numbers]
                        order = np.argsort(buckets, kind="stable")
                        part = part.take(pa.array(order)).combine_chunks()
                        begins = np.searchsorted(buckets[order], np.arange(self.count + 1))
                    else:
                        begins = np.array([0, len(numbers)])
                    for bucket in np.flatnonzero(np.diff(begins)):
                        write[bucket](part.slice(begins[bucket], begins[bucket + 1] - begins[bucket]))
                    written += part.num_rows
        except OSError as error:
            if isinstance(error, OffbeatError):  # of those who read the table
                raise
            raise GroupDataError(
                f"Cannot write the buckets of groups to {self._folder}: {error.strerror or error}. "
                "Name a folder with more room by TMPDIR."
            ) from error
        expected = total if rows is None else rows
        if written != expected:
            raise GroupDataError(f"The table had {expected} rows when counted, and {written} then.")

    def read(self, bucket: int) -> GroupRows:
        """Map the rows of a bucket, and sort them by their groups."""
        return _sorted(pa.concat_tables(self._kept)) if self._kept else read_bucket(self._path(bucket))

    def _writer(self, bucket: int, schema: pa.Schema, files: ExitStack) -> pa.RecordBatchFileWriter:
        file = files.enter_context(pa.OSFile(str(self._path(bucket)), "wb"))
        return files.enter_context(pa.ipc.new_file(file, schema))

    def path(self, bucket: int) -> Path:
        """Return the file of a bucket, which is written now if its rows are in memory."""
        if self._kept:
            with ExitStack() as files:
                self._writer(bucket, self._kept[0].schema, files).write_table(pa.concat_tables(self._kept))
            self._kept = []
        return self._path(bucket)

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:06d}.arrow"


def read_bucket(path: Path) -> GroupRows:
    """Map the rows of a bucket's file, and sort them by their groups."""
    with pa.memory_map(str(path)) as file:
        return _sorted(pa.ipc.open_file(file).read_all())


def _sorted(table: pa.Table) -> GroupRows:
    numbers = table[_NUMBER].to_numpy()
    order = np.argsort(numbers, kind="stable")
    found, begins = np.unique(numbers[order], return_index=True)
    return GroupRows(found, np.append(begins, len(order)), table.drop_columns([_NUMBER]).take(pa.array(order)))
