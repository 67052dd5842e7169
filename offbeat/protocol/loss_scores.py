"""Losses on trusted samples, which a validator finds out for an update that waits to be judged.

validator                                       shard (the coordinator is the first)
  | <----- ScoreContributions(version, ...) ---- |   from the coordinator: all shards have measured the update
  | -- FetchContribution(version, worker) -----> |   to each shard: the parameters before it, then each contribution
  | <----- FetchedBlock(block) + elements ------ |   one per block, then TransferDone
  | -- ContributionsScored(losses) ------------> |   to the coordinator, which judges

What the validator fetches is decoded: the rows that the rule judges. A shard that does not hold the update any more
sends no blocks.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Factor, Model
from offbeat.protocol.shards import MOST_COMPARED


class ScoreContributions(msgspec.Struct, tag=True, frozen=True):
    """Coordinator to validator: find out what these contributions do to the loss.

    Args:
        version: of the update that they are in.
        number: of the question, to be answered with.
        contributions: worker and number of each.
        change: they are changes of the parameters, and no gradients.
        rate: of the update.
    """

    model: Model
    version: Count
    number: Count
    contributions: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MOST_COMPARED)]
    change: bool = False
    rate: Factor = 1.0


class FetchContribution(msgspec.Struct, tag=True, frozen=True):
    """Validator to shard: send your blocks of a contribution to an update that waits to be judged.

    Args:
        number: of the transfer.
        version: of the update.
        push: worker and number of the contribution; None for the parameters before the update.
    """

    model: Model
    number: Count
    version: Count
    push: tuple[Count, Count] | None = None


class FetchedBlock(msgspec.Struct, tag=True, frozen=True):
    """Shard to validator: one block, decoded, in the block's own type.

    Args:
        number: of the `FetchContribution`.
    """

    model: Model
    number: Count
    block: Count


class ContributionsScored(msgspec.Struct, tag=True, frozen=True):
    """Validator to coordinator: the losses, which need not be finite.

    Args:
        version, number: of the `ScoreContributions`.
        losses: without any contribution, and with each.
    """

    model: Model
    version: Count
    number: Count
    losses: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 + MOST_COMPARED)]
