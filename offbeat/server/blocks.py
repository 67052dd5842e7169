"""A model's parameters, cut into blocks: the unit that is sent, updated and versioned, and dealt out to shards.

bucket  [ fc.bias | fc.weight ........................... | conv.bias | conv.weight ... ]
block   [      0      ][       1      ][       2      ][           3           ]
piece   fc.bias, fc.weight | fc.weight |   fc.weight    | fc.weight, conv.bias, ...
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.layout import Bucket, Layout


@dataclass(frozen=True)
class ParameterSlice:
    """The part of one parameter that lies in a block.

    Args:
        name: the parameter's.
        start: where the piece begins in the parameter, in elements.
        numel: its elements.
    """

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Block:
    """A stretch of one bucket.

    Args:
        index: among all blocks of the model.
        bucket: index of the bucket it lies in.
        offset: where it begins in the bucket, in elements.
        dtype: name of its elements' type, such as "float32".
        itemsize: bytes of one.
        pieces: what lies in it, without gaps.
    """

    index: int
    bucket: int
    offset: int
    dtype: str
    itemsize: int
    pieces: tuple[ParameterSlice, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize


def cut(layout: Layout, block_bytes: int) -> tuple[Block, ...]:
    """Cut every bucket into blocks of at most `block_bytes`, of equal size as far as that goes.

    >>> import torch
    >>> from offbeat.layout import arrange
    >>> layout = arrange({"a": torch.zeros(6), "b": torch.zeros(2)}, bucket_bytes=1 << 20)
    >>> [[(p.name, p.start, p.numel) for p in block.pieces] for block in cut(layout, 16)]
    [[('b', 0, 2), ('a', 0, 2)], [('a', 2, 4)]]
    """
    blocks: list[Block] = []
    for bucket in layout.buckets:
        itemsize = bucket.dtype.itemsize
        count = -(-bucket.size_bytes // max(block_bytes, itemsize))
        edges = [bucket.numel * i // count for i in range(count + 1)]
        dtype = dtype_name(bucket.dtype)
        for start, end in itertools.pairwise(edges):
            pieces = tuple(_pieces(bucket, start, end))
            blocks.append(Block(len(blocks), bucket.index, start, dtype, itemsize, pieces))
    return tuple(blocks)


def deal(blocks: Sequence[Block], shards: int) -> tuple[int, ...]:
    """Assign blocks to shards: the largest first, each to the shard that holds least.

    >>> import torch
    >>> from offbeat.layout import arrange
    >>> deal(cut(arrange({"a": torch.zeros(8)}, bucket_bytes=1 << 20), 8), 2)
    (0, 1, 0, 1)
    """
    load = [0] * shards
    holder = [0] * len(blocks)
    for block in sorted(blocks, key=lambda block: (-block.size_bytes, block.index)):
        shard = load.index(min(load))
        holder[block.index] = shard
        load[shard] += block.size_bytes
    return tuple(holder)


def _pieces(bucket: Bucket, start: int, end: int) -> Iterator[ParameterSlice]:
    for slot in bucket.slots:
        first, last = max(start, slot.offset), min(end, slot.offset + slot.numel)
        if first < last:
            yield ParameterSlice(slot.name, first - slot.offset, last - first)
