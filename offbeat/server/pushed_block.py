"""One block of a contribution, as it comes from a worker: of a kind that the worker declares, and decoded at the shard.

A kind is a structure of `offbeat.protocol.training`, which travels with the block, and a `BlockReader` in the table
below. The reader says what body such a block has, so that its size is compared before memory is allocated; and it
decodes the body when the block is updated, since until then it is best kept as small as it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat.errors import PeerError
from offbeat.protocol.training import CastPayload, DensePayload
from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from offbeat.protocol.training import BlockPayload

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


class BlockReader(Protocol):
    """The reader of blocks of one kind."""

    def body(self, payload: Any, values: torch.Tensor) -> tuple[int, torch.dtype]:
        """The number of elements of the body, and their type.

        Args:
            payload: what the worker says about it.
            values: [D] the block's parameters.

        Raises:
            PeerError: if there is no such body.
        """

    def decode(self, payload: Any, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Turn the body into [D] of the block's `dtype`; it may be the body itself, which is not changed."""


class DenseReader:
    """The reader of blocks with each element, in the block's own type."""

    def body(self, payload: DensePayload, values: torch.Tensor) -> tuple[int, torch.dtype]:
        return values.numel(), values.dtype

    def decode(self, payload: DensePayload, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body


class CastReader:
    """The reader of blocks with each element, in another float type, such as the codec's that sends 16 bits."""

    def body(self, payload: CastPayload, values: torch.Tensor) -> tuple[int, torch.dtype]:
        if payload.dtype not in DTYPES:
            raise PeerError(f"Cannot take a gradient of type {payload.dtype!r}: a server adds up {', '.join(DTYPES)}.")
        return values.numel(), DTYPES[payload.dtype]

    def decode(self, payload: CastPayload, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body.to(dtype)


_READERS: dict[type, BlockReader] = {DensePayload: DenseReader(), CastPayload: CastReader()}


@dataclass(frozen=True, eq=False)
class PushedBlock:
    """A block as it came.

    Args:
        payload: its kind, and what belongs to that.
        body: as on the wire.
    """

    payload: BlockPayload
    body: torch.Tensor

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Turn it into [D] of the block's `dtype`; not to be changed."""
        return _READERS[type(self.payload)].decode(self.payload, self.body, dtype)


def payload_of(part: torch.Tensor, dtype: str) -> BlockPayload:
    """Declare what a worker sends of a block whose parameters have the type `dtype`."""
    name = dtype_name(part.dtype)
    return DensePayload() if name == dtype else CastPayload(name)


def receive(payload: BlockPayload, values: torch.Tensor, block: int, size_bytes: int) -> PushedBlock:
    """Allocate memory for a block that is on its way.

    Args:
        payload: what the worker says about it.
        values: [D] the block's parameters.
        size_bytes: of the body that comes.

    Raises:
        PeerError: if such a body has another size; nothing is allocated.
    """
    numel, dtype = _READERS[type(payload)].body(payload, values)
    if numel * dtype.itemsize != size_bytes:
        raise PeerError(f"Cannot take {size_bytes} bytes as block {block}: it has {numel * dtype.itemsize}.")
    return PushedBlock(payload, torch.empty(numel, dtype=dtype))
