"""Aggregation: what a server makes of the contributions of one update.

When a block is due, each contribution of the update is there, as it came from its worker. The policy has decided which
ones those are (all workers', the first k, one): an aggregator combines what it is given, and never waits for more.

What it may hold: nothing from one call to the next, since an update may be undone and made again without a worker that
was lost; and, while it combines, a few tensors of the block's size beside what has come. A rule that compares
contributions decodes them all, and holds one such tensor for each; a decoder of a code takes those that it needs and
looks at `worker` to know them; a mean goes through them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from offbeat.float_sum import add_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.server.pushed_block import PushedBlock


@dataclass(frozen=True, eq=False)
class BlockContribution:
    """One block of what a worker contributes to an update.

    Args:
        worker: its rank.
        weight: samples that it was computed from; with 0 it may hold NaN, and nothing of it may count.
        part: as it came; to be decoded, not to be changed.
        scale: by which it is multiplied, if the whole update has been judged; 0 if it was rejected.
        is_reference: it is a reference on trusted data, which is never applied.
    """

    worker: int
    weight: float
    part: PushedBlock
    scale: float | None = None
    is_reference: bool = False


class Aggregator(Protocol):
    """Combines the contributions of one update, block by block; redone, an update has the same bits.

    Attributes:
        keeps_update: whether the update is the reference for the next one.
        needs_reference: whether contributions are compared with one.
    """

    keeps_update: bool
    needs_reference: bool

    def combine(
        self,
        contributions: Sequence[BlockContribution],
        dtype: torch.dtype,
        reference: BlockContribution | None = None,
    ) -> torch.Tensor | None:
        """Make one block of the update.

        Args:
            contributions: in the order of the update, which is the same for all blocks; none is a reference.
            dtype: the block's.
            reference: the latest there is, or the mean of those that came with the update.

        Returns:
            [D] gradient or change of `dtype`, which may be a part that has come; None if nothing weighs anything.
        """


class WeightedMean:
    """The mean, by samples, summed in the order of the update: the sum's bits do not depend on who came first."""

    keeps_update = needs_reference = False

    def combine(
        self,
        contributions: Sequence[BlockContribution],
        dtype: torch.dtype,
        reference: BlockContribution | None = None,
    ) -> torch.Tensor | None:
        """Add up in one tensor of the block's size, with a second one for the share at hand; of one it is that part."""
        weighty = [one for one in contributions if one.weight > 0]
        if not weighty:
            return None
        total = add_up(one.weight for one in weighty)
        first, *others = weighty
        mean = first.part.decode(dtype)
        if not others:
            return mean
        equal = all(one.weight == first.weight for one in others)
        # As DistributedDataParallel does: multiplied by 1/N before it is added.
        mean = mean * (1 / len(weighty) if equal else first.weight / total)
        share = torch.empty_like(mean)
        for one in others:
            factor = 1 / len(weighty) if equal else one.weight / total
            mean.add_(torch.mul(one.part.decode(dtype), factor, out=share))
        return mean
