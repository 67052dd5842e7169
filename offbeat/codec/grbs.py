"""Blocks of the gradient that are drawn at random, the same on all workers: what is sent of them can be added.

GRBS: Xie et al., "CSER: communication-efficient SGD with error reset" (NeurIPS 2020), definition 1. There the slices
are of each tensor, and drawn from the process's own generator; here they are of the bucket's memory, and a function of
the turn alone, so that no other draw on a worker can have it send something else.

    B blocks, of which B / ratio are sent: a contraction of 1 / ratio
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.promises import Promises
from offbeat.errors import PeerError, PlanError
from offbeat.number_range import RealNumbers, WholeNumbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from offbeat.codec.one_round import EncodedShapes
    from offbeat.codec.turn import Turn
    from offbeat.layout import Bucket

_FEWEST = 8  # blocks that are sent of a bucket that has as many elements to send


@dataclass(frozen=True)
class GRBS(OneRoundCodec):
    """A codec that sends a few blocks of the bucket, drawn anew in each step, as they are.

    Args:
        ratio: of what there is to what is sent: 32 for a part in 32. Of a bucket with fewer elements one is sent.
        block: elements of a block; fewer where the bucket is small.

    Raises:
        PlanError: if the ratio is below 1, or a block empty.

    >>> GRBS(32)
    GRBS(ratio=32, block=256)
    """

    ratio: float = 32
    block: int = 256

    def __post_init__(self) -> None:
        if self.ratio not in RealNumbers(1):
            raise PlanError(
                f"Cannot send a part in {self.ratio!r}: the ratio is of what there is to what is sent, 1 or more "
                "- at `plan.codec.ratio`."
            )
        if self.block not in WholeNumbers(1):
            raise PlanError(
                f"Cannot send blocks of {self.block!r} elements: a whole number, one at least - at `plan.codec.block`."
            )

    @property
    def promises(self) -> Promises:
        if self.ratio == 1:
            return Promises()
        return Promises(support="shared", contraction=1 / self.ratio, variance=None, passes=1 + 2 / self.ratio)

    def payload_bytes(self, bucket: Bucket) -> float:
        """A part in `ratio` on average."""
        return max(1.0, bucket.numel / self.ratio) * bucket.dtype.itemsize

    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor]:
        """Encode as the elements of the blocks that are drawn, one block behind the other."""
        if self.ratio == 1:
            return (grad,)
        size, rows, tail = self._drawn(len(grad), turn)
        whole = len(grad) // size * size
        chosen = grad[:whole].view(-1, size)[torch.from_numpy(rows).to(grad.device)].view(-1)
        return (torch.cat((chosen, grad[whole:])) if tail else chosen,)

    def encoded_shapes(self, numel: int, dtype: torch.dtype, turn: Turn) -> EncodedShapes:
        """The shapes of the elements of the blocks that are drawn."""
        if self.ratio == 1:
            return ((dtype, (numel,)),)
        size, rows, tail = self._drawn(numel, turn)
        return ((dtype, (len(rows) * size + (numel % size if tail else 0),)),)

    def decode(self, tensors: Sequence[torch.Tensor], turn: Turn, out: torch.Tensor) -> torch.Tensor:
        """Put the blocks where they belong, between zeros."""
        (values,) = tensors
        if self.ratio == 1:
            return values
        size, rows, tail = self._drawn(len(out), turn)
        whole = len(out) // size * size
        filled = len(rows) * size
        if len(values) != filled + (len(out) - whole if tail else 0):
            raise PeerError(
                f"Cannot decode {len(values)} elements: in step {turn.step} {len(rows)} blocks of {size} are sent. "
                "Give every worker the same seed."
            )
        out.zero_()
        out[:whole].view(-1, size)[torch.from_numpy(rows).to(out.device)] = values[:filled].view(-1, size)
        if tail:
            out[whole:] = values[filled:]
        return out

    def _drawn(self, numel: int, turn: Turn) -> tuple[int, NDArray[np.int64], bool]:
        """The size of a block, which whole ones are sent, in order, and whether the shorter one at the end is."""
        size = max(1, min(self.block, int(numel / self.ratio / _FEWEST)))
        blocks = math.ceil(numel / size)
        # One more or less at random, so that the mean is a part in `ratio` whatever the number of blocks.
        count, odds = divmod(blocks / self.ratio, 1)
        count = max(1, int(count) + int(turn.random(1, what="count")[0] / 2**64 < odds))
        chosen = turn.chosen(count, blocks, what="blocks")
        tail = bool(chosen[-1] == blocks - 1 and numel % size)
        return size, chosen[: len(chosen) - tail], tail
