"""Arrow tables as tensors that a carrier takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from offbeat.errors import PeerError

if TYPE_CHECKING:
    from offbeat.groups.carrier import Tensors


def table_message(table: pa.Table, *, has_more: bool = False) -> Tensors:
    """Return a table, and whether another one follows, as tensors."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data = np.frombuffer(sink.getvalue(), np.uint8)
    return {"table": torch.from_numpy(data.copy()), "has_more": torch.tensor([has_more])}


def table_in(message: Tensors, schema: pa.Schema) -> tuple[pa.Table, bool]:
    """Read a table, and whether another one follows.

    Args:
        schema: that it has to have.

    Raises:
        PeerError: if the message holds no such table.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(message["table"].numpy())) as stream:
            table = stream.read_all()
        table.validate(full=True)
        has_more = bool(message["has_more"])
    except (pa.ArrowException, OSError, KeyError, RuntimeError) as error:
        raise PeerError(f"Cannot read a table of another worker: {error}") from error
    if not table.schema.equals(schema):
        raise PeerError(f"Cannot read a table of another worker: it has the columns {table.schema}, and not {schema}.")
    return table, has_more
