"""Arrow tables as tensors that a carrier takes, and texts as bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from offbeat.errors import PeerError

if TYPE_CHECKING:
    from offbeat.groups.carrier import Tensors


def table_message(table: pa.Table, *, has_more: bool = False) -> Tensors:
    """Return a table, and whether another one follows, as tensors."""
    return {"table": torch.from_numpy(_stream_of(table)), "has_more": torch.tensor([has_more])}


def table_in(message: Tensors, schema: pa.Schema) -> tuple[pa.Table, bool]:
    """Read a table, and whether another one follows.

    Args:
        schema: that it has to have.

    Raises:
        PeerError: if the message holds no such table.
    """
    try:
        return _table_of(message["table"].numpy(), schema), bool(message["has_more"])
    except (KeyError, RuntimeError) as error:
        raise PeerError(f"Cannot read a table of another worker: {error}") from error


def text_stream(texts: np.ndarray) -> np.ndarray:
    """Return texts, and None where there is none, as bytes."""
    return _stream_of(pa.table({"text": pa.array(texts.ravel(), pa.large_string())}))


def texts_in(stream: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Read texts, and None where there is none.

    Raises:
        PeerError: if the bytes hold no such texts.
    """
    column = _table_of(stream, pa.schema({"text": pa.large_string()}))["text"]
    if len(column) != math.prod(shape):
        raise PeerError(
            f"Cannot read the texts of another worker: there are {len(column)}, and not {math.prod(shape)}."
        )
    return np.array(column.to_pylist(), object).reshape(shape)


def _stream_of(table: pa.Table) -> np.ndarray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8).copy()


def _table_of(stream: np.ndarray, schema: pa.Schema) -> pa.Table:
    try:
        with pa.ipc.open_stream(pa.py_buffer(stream)) as opened:
            table = opened.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, TypeError) as error:
        raise PeerError(f"Cannot read a table of another worker: {error}") from error
    if not table.schema.equals(schema):
        raise PeerError(f"Cannot read a table of another worker: it has the columns {table.schema}, and not {schema}.")
    return table
