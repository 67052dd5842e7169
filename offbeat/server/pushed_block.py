"""One block of a contribution, as it comes from a worker: of a kind that the worker declares, and decoded at the shard.

A kind is a structure of `offbeat.protocol.training`, which travels with the block, and a `BlockReader`, which says
what body such a block has, so that its size is compared before memory is allocated; and which decodes the body when the
block is updated, since until then it is best kept as small as it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat.errors import PeerError
from offbeat.protocol.training import CastPayload, DensePayload, EncodedPayload
from offbeat.server.encoded_block import EncodedBlock
from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from offbeat.codec import Turn
    from offbeat.protocol.training import BlockPayload
    from offbeat.server.encoded_block import BlockCodec

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

    def check(self, payload: Any, body: torch.Tensor) -> None:
        """See that the body, which is here now, can be decoded.

        Raises:
            PeerError: if it cannot.
        """

    def decode(self, payload: Any, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Turn the body into [D] of the block's `dtype`; it may be the body itself, which is not changed."""


class DenseReader:
    """The reader of blocks with each element, in the block's own type."""

    def body(self, payload: DensePayload, values: torch.Tensor) -> tuple[int, torch.dtype]:
        return values.numel(), values.dtype

    def check(self, payload: DensePayload, body: torch.Tensor) -> None:
        pass

    def decode(self, payload: DensePayload, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body


class CastReader:
    """The reader of blocks with each element, in another float type, such as the codec's that sends 16 bits."""

    def body(self, payload: CastPayload, values: torch.Tensor) -> tuple[int, torch.dtype]:
        if payload.dtype not in DTYPES:
            raise PeerError(f"Cannot take a gradient of type {payload.dtype!r}: a server adds up {', '.join(DTYPES)}.")
        return values.numel(), DTYPES[payload.dtype]

    def check(self, payload: CastPayload, body: torch.Tensor) -> None:
        pass

    def decode(self, payload: CastPayload, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return body.to(dtype)


class EncodedReader:
    """The reader of blocks that the plan's codec has encoded.

    Args:
        codec: of the plan.
        block: index of the block.
        worker: who pushes it.
    """

    def __init__(self, codec: BlockCodec, block: int, worker: int) -> None:
        self._codec, self._block, self._worker = codec, block, worker

    def body(self, payload: EncodedPayload, values: torch.Tensor) -> tuple[int, torch.dtype]:
        return self._codec.size_bytes(self._turn(payload)), torch.uint8

    def check(self, payload: EncodedPayload, body: torch.Tensor) -> None:
        self._codec.check(body, self._turn(payload))

    def decode(self, payload: EncodedPayload, body: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._codec.decode(body, self._turn(payload))

    def _turn(self, payload: EncodedPayload) -> Turn:
        """Make it anew each time: one that is kept keeps what was drawn, which is to be no larger than what came."""
        return self._codec.turn(self._block, self._worker, payload.step, change=payload.change)


_READERS: dict[type, BlockReader] = {DensePayload: DenseReader(), CastPayload: CastReader()}


@dataclass(frozen=True, eq=False)
class PushedBlock:
    """A block as it came.

    Args:
        payload: its kind, and what belongs to that.
        body: as on the wire.
        reader: of an encoded block; None for the one that each other kind has.
    """

    payload: BlockPayload
    body: torch.Tensor
    reader: BlockReader | None = None

    def check(self) -> None:
        """See that the body, which is here now, can be decoded.

        Raises:
            PeerError: if it cannot.
        """
        self._reader.check(self.payload, self.body)

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Turn it into [D] of the block's `dtype`; not to be changed."""
        return self._reader.decode(self.payload, self.body, dtype)

    @property
    def _reader(self) -> BlockReader:
        return self.reader or _READERS[type(self.payload)]


def payload_of(part: torch.Tensor | EncodedBlock, dtype: str) -> BlockPayload:
    """Declare what a worker sends of a block whose parameters have the type `dtype`."""
    if isinstance(part, EncodedBlock):
        return part.payload
    name = dtype_name(part.dtype)
    return DensePayload() if name == dtype else CastPayload(name)


def body_of(part: torch.Tensor | EncodedBlock) -> torch.Tensor:
    """The body of what a worker sends."""
    return part.body if isinstance(part, EncodedBlock) else part


def receive(
    payload: BlockPayload, values: torch.Tensor, block: int, size_bytes: int, encoded: BlockReader | None = None
) -> PushedBlock:
    """Allocate memory for a block that is on its way.

    Args:
        payload: what the worker says about it.
        values: [D] the block's parameters.
        size_bytes: of the body that comes.
        encoded: reads it if it is encoded; None if no worker encodes blocks.

    Raises:
        PeerError: if such a body has another size; nothing is allocated.
    """
    reader = encoded if isinstance(payload, EncodedPayload) else _READERS[type(payload)]
    if reader is None:
        raise PeerError(f"Cannot take an encoded block {block}: with this plan workers push each element.")
    numel, dtype = reader.body(payload, values)
    if numel * dtype.itemsize != size_bytes:
        raise PeerError(f"Cannot take {size_bytes} bytes as block {block}: it has {numel * dtype.itemsize}.")
    return PushedBlock(payload, torch.empty(numel, dtype=dtype), reader)
