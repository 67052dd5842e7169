"""Tables that are read in batches, as often as needed: in memory, of another library, or files.

Whatever has an Arrow C stream can be read: tables of pyarrow, pandas 2.2 and later, polars and DuckDB. A path or a
pattern is read by `pyarrow.dataset`: Parquet, CSV, or Arrow IPC.
"""

from __future__ import annotations

import glob
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.dataset

from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BATCH_ROWS = 1 << 17
_FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".arrow": "ipc",
    ".ipc": "ipc",
    ".feather": "feather",
}


class GroupDataError(OffbeatError, ValueError):
    """Data of groups that cannot be used, and why."""


class TableInput(Protocol):
    """The Protocol of a table that can be read again."""

    schema: pa.Schema

    def batches(self, columns: Sequence[str], worker: int = 0, workers: int = 1) -> Iterator[pa.Table]:
        """Read these columns, in the order of the rows, a part of them at a time.

        Args:
            worker, workers: of `workers` parts in turn read one, beginning with this one.

        Raises:
            GroupDataError: if they cannot be read.
        """


def open_table(data: Any) -> TableInput:
    """Open a table.

    Args:
        data: a table with an Arrow C stream that can be asked for more than once, a path, or a pattern of paths.

    Raises:
        GroupDataError: if it is something else, or no file is there.
    """
    table = _opened(data)
    return _DecodedTable(table) if any(pa.types.is_dictionary(field.type) for field in table.schema) else table


def _opened(data: Any) -> TableInput:
    if isinstance(data, str | Path):
        return _FileTables(str(data))
    if isinstance(data, pa.RecordBatchReader):
        raise GroupDataError(
            "Cannot read a stream: groups are counted first and read then. Write it to a file, or pass `.read_all()`."
        )
    if isinstance(data, pa.Table):
        return _MemoryTable(data)
    if hasattr(data, "iter_batches") and hasattr(data, "streaming_split"):
        return DatasetTable(data)
    if not hasattr(data, "__arrow_c_stream__"):
        raise GroupDataError(
            f"Cannot read groups from {type(data).__name__}: pass a table of pyarrow, pandas (2.2 or later), polars or "
            "DuckDB, or a path or pattern of Parquet, CSV or Arrow files."
        )
    try:
        return _MemoryTable(pa.table(data))
    except pa.ArrowException as error:
        raise GroupDataError(
            f"Cannot read a {type(data).__name__}: {_first_line(error)}. Give each column one type."
        ) from error


class _DecodedTable:
    """A table with columns that are dictionaries, such as categories of pandas: as their values."""

    def __init__(self, table: TableInput) -> None:
        self._table = table
        self.schema = _decoded(table.schema)

    def batches(self, columns: Sequence[str], worker: int = 0, workers: int = 1) -> Iterator[pa.Table]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        for part in self._table.batches(columns, worker, workers):
            yield part.cast(schema)


def _decoded(schema: pa.Schema) -> pa.Schema:
    """The columns, with values in place of dictionaries."""
    is_plain = [not pa.types.is_dictionary(field.type) for field in schema]
    fields = zip(schema, is_plain, strict=True)
    return pa.schema([field if plain else field.with_type(field.type.value_type) for field, plain in fields])


class _MemoryTable:
    """A table in memory."""

    def __init__(self, table: pa.Table) -> None:
        self._table, self.schema = table, table.schema

    def batches(self, columns: Sequence[str], worker: int = 0, workers: int = 1) -> Iterator[pa.Table]:
        table = self._table.select(list(columns))
        for at in range(worker * _BATCH_ROWS, table.num_rows, workers * _BATCH_ROWS):
            yield table.slice(at, _BATCH_ROWS)


class DatasetTable:
    """A Ray Dataset, which Ray reads each time that it is needed.

    Args:
        dataset: it.

    Raises:
        GroupDataError: if its columns are not those of an Arrow table.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        schema = getattr(dataset.schema(), "base_schema", None)
        if not isinstance(schema, pa.Schema):
            raise GroupDataError(
                "Cannot read groups from a Ray Dataset without an Arrow schema: map it to tables first."
            )
        self.schema = _decoded(schema)

    def split(self, count: int) -> list[DatasetTable]:
        """Return so many parts of about as many rows, which Ray has read then."""
        return [DatasetTable(part) for part in self._dataset.split(count, equal=False)]

    def batches(self, columns: Sequence[str], worker: int = 0, workers: int = 1) -> Iterator[pa.Table]:
        read = self._dataset.iter_batches(batch_format="pyarrow", batch_size=_BATCH_ROWS)
        for batch in itertools.islice(read, worker, None, workers):
            yield batch.select(list(columns)).cast(pa.schema([self.schema.field(name) for name in columns]))


class _FileTables:
    """Files of one schema, in the order of their names."""

    def __init__(self, pattern: str) -> None:
        paths = sorted(glob.glob(pattern, recursive=True)) or [pattern]
        if len(paths) == 1 and Path(paths[0]).is_dir():
            paths = sorted(str(path) for path in Path(paths[0]).rglob("*") if path.suffix in _FORMATS)
        if not paths or not Path(paths[0]).exists():
            raise GroupDataError(f"Cannot read {pattern!r}: no file is there.")
        kinds = {Path(path).suffix for path in paths}
        if len(kinds) > 1 or not kinds <= set(_FORMATS):
            raise GroupDataError(f"Cannot read {pattern!r}: name files of one kind: {', '.join(_FORMATS)}.")
        try:
            self._files = pyarrow.dataset.dataset(paths, format=_FORMATS[kinds.pop()])
        except (pa.ArrowException, OSError) as error:
            raise GroupDataError(f"Cannot read {pattern!r}: {_first_line(error)}.") from error
        self._pattern, self.schema = pattern, self._files.schema
        for part in self._files.get_fragments():
            self._check(part)

    def batches(self, columns: Sequence[str], worker: int = 0, workers: int = 1) -> Iterator[pa.Table]:
        try:
            if workers > 1 and isinstance(self._files.format, pyarrow.dataset.ParquetFileFormat):
                yield from self._row_groups(list(columns), worker, workers)
                return
            read = self._files.to_batches(columns=list(columns), batch_size=_BATCH_ROWS, batch_readahead=2)
            full = (batch for batch in read if batch.num_rows)
            for batch in itertools.islice(full, worker, None, workers):
                yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise GroupDataError(f"Cannot read {self._pattern!r}: {_first_line(error)}.") from error

    def _check(self, part: Any) -> None:
        """Refuse a file in which a column is missing, whose rows would have no value, or is of a kind of its own.

        Args:
            part: the file, of a dataset of pyarrow.
        """
        for field in self.schema:
            at = part.physical_schema.get_field_index(field.name)
            if at < 0:
                raise GroupDataError(
                    f"Cannot read {self._pattern!r}: {part.path} lacks the column {field.name!r}. Add it, or leave the "
                    "file out."
                )
            kind = part.physical_schema.field(at).type
            if _kind(kind) != _kind(field.type) and not pa.types.is_null(kind):
                raise GroupDataError(
                    f"Cannot read {self._pattern!r}: the column {field.name!r} is {kind} in {part.path}, and "
                    f"{field.type} in others. Give it one type."
                )

    def _row_groups(self, columns: list[str], worker: int, workers: int) -> Iterator[pa.Table]:
        """Read one of so many row groups, of which the others need not be decoded."""
        parts = (part for file in self._files.get_fragments() for part in file.split_by_row_group())
        for part in itertools.islice(parts, worker, None, workers):
            yield part.to_table(schema=self.schema, columns=columns)


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type is one of numbers."""
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(test(kind) for test in tests)


def _kind(kind: pa.DataType) -> object:
    """Return the kind of a type: those of one kind are cast to each other."""
    types = pa.types
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if is_number(kind):
        return "number"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    return "time" if types.is_temporal(kind) else kind


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].strip().rstrip(".")
