"""The measurement of an update that is to be judged: this shard's part of the Gram matrix, block after block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.protocol.shards import MeasuredContribution, UpdateMeasured
from offbeat.server.aggregator import BlockContribution
from offbeat.server.judge import pack_gram
from offbeat.server.shard.parameter_store import reference_row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.protocol.training import ContributionInfo
    from offbeat.server.pushed_block import PushedBlock
    from offbeat.server.robust_aggregator import RobustAggregator
    from offbeat.server.shard.parameter_store import ParameterStore
    from offbeat.server.shard.update_scheduler import MeasureUpdate
    from offbeat.sync import Push

    ToldContribution = tuple[Push, ContributionInfo, bool]  # its number, what it is, and whether it is a reference


def contribution_of(
    told: ToldContribution, part: PushedBlock, scales: Mapping[Push, float] | None = None
) -> BlockContribution:
    """One block of a contribution, with the scale that it was given, if its update was judged."""
    push, about, is_reference = told
    scale = None if scales is None else scales.get(push, 0.0)
    return BlockContribution(push[0], about.weight, part, scale, is_reference)


def measure(model: int, update: MeasureUpdate, store: ParameterStore, aggregator: RobustAggregator) -> UpdateMeasured:
    """Measure an update, for the coordinator.

    Args:
        model: which of several.
        store: has the blocks, and their references.
        aggregator: will make the update.
    """
    gram, rows, version = None, list[MeasuredContribution](), 0
    for block, brought in update.blocks.items():
        parts = [contribution_of(*one) for one in brought]
        rows = [
            MeasuredContribution(push[0], push[1], about.weight)
            for (push, about, is_reference), _ in brought
            if about.weight > 0 and not is_reference
        ]
        reference = store.reference(block, parts)
        row, version = (None, 0) if reference is None else (reference_row(reference), reference.version)
        own = [one for one in parts if not one.is_reference]
        of_block = aggregator.measure(own, store.values[block].dtype, row)
        gram = of_block if gram is None else gram.add_(of_block)
    assert gram is not None, "a shard without blocks measures nothing"
    change = any(about.change for brought in update.blocks.values() for (_, about, _), _ in brought[:1])
    return UpdateMeasured(model, update.version, tuple(rows), pack_gram(gram), version, change, update.rate)
