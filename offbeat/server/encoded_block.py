"""A block that a codec of one round has encoded: as bytes on its way, and decoded at the shard.

    body    | tensor | pad | tensor | pad | ...      each at a multiple of 8 bytes

Both ends know by the turn which tensors these are, so that no size is sent, and what comes is compared with what has to
come before memory is allocated. The turn is that of the worker and of its contribution: a contribution is decoded by
itself, whoever else is in the update.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.codec import Turn
from offbeat.layout import Bucket, Slot
from offbeat.protocol.training import EncodedPayload
from offbeat.tensors import flat_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.codec import OneRoundCodec
    from offbeat.codec.one_round import EncodedShapes
    from offbeat.server.blocks import Block

_ALIGNED = 8  # bytes


@dataclass(frozen=True, eq=False)
class EncodedBlock:
    """A block as a worker sends it.

    Args:
        payload: in which turn it was encoded.
        tensors: that it was encoded as.
    """

    payload: EncodedPayload
    tensors: tuple[torch.Tensor, ...]

    @functools.cached_property
    def body(self) -> torch.Tensor:
        """The tensors as bytes [B] uint8."""
        size_bytes = sum(_padded(one.numel() * one.element_size()) for one in self.tensors)
        body, at = torch.zeros(size_bytes, dtype=torch.uint8), 0
        for one in self.tensors:
            raw = flat_bytes(one)
            body[at : at + len(raw)] = raw
            at += _padded(len(raw))
        return body


class BlockCodec:
    """A codec, applied to the blocks of one model.

    Args:
        codec: that encodes each of them by itself.
        blocks: of the model, or those of it that a shard holds.
        seed: of the run.
    """

    def __init__(self, codec: OneRoundCodec, blocks: Sequence[Block], seed: int) -> None:
        self.codec, self._seed = codec, seed
        self._buckets = {block.index: _bucket(block) for block in blocks}

    def turn(self, block: int, worker: int, step: int, *, change: bool) -> Turn:
        """The turn of a worker's block.

        Args:
            step: by which turns count.
            change: whether it is of a change of the parameters, and not of a gradient.
        """
        return Turn(self._buckets[block], step, worker, 1, self._seed, "change" if change else "gradient")

    def encode(self, part: torch.Tensor, turn: Turn) -> EncodedBlock:
        """Encode [D] of a block."""
        return EncodedBlock(EncodedPayload(turn.step, turn.purpose == "change"), self.codec.encode(part, turn))

    def size_bytes(self, turn: Turn) -> int:
        """The bytes that the body of a turn has."""
        return sum(_padded(math.prod(shape) * dtype.itemsize) for dtype, shape in self._shapes(turn))

    def check(self, body: torch.Tensor, turn: Turn) -> None:
        """See that a body of the right size can be what a worker has encoded.

        Raises:
            PeerError: if it cannot.
        """
        self.codec.check_encoded(self._tensors(body, turn), turn.bucket.numel)

    def decode(self, body: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Decode a body into [D] of the block's dtype; it may share the body's memory."""
        return self.codec.decode(
            self._tensors(body, turn), turn, torch.empty(turn.bucket.numel, dtype=turn.bucket.dtype)
        )

    def _shapes(self, turn: Turn) -> EncodedShapes:
        return self.codec.encoded_shapes(turn.bucket.numel, turn.bucket.dtype, turn)

    def _tensors(self, body: torch.Tensor, turn: Turn) -> list[torch.Tensor]:
        tensors, at = [], 0
        for dtype, shape in self._shapes(turn):
            size_bytes = math.prod(shape) * dtype.itemsize
            tensors.append(body[at : at + size_bytes].view(dtype).view(shape))
            at += _padded(size_bytes)
        return tensors


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED) * _ALIGNED


def _bucket(block: Block) -> Bucket:
    """The block as what a turn is of: named by what lies in it, wherever that is."""
    slots, offset = [], 0
    for piece in block.pieces:
        slots.append(Slot(piece.name, (piece.numel,), offset, piece.numel, piece.start, is_part=True))
        offset += piece.numel
    return Bucket(block.index, getattr(torch, block.dtype), torch.device("cpu"), tuple(slots))
