"""The parts of a plan that every shard carries out, and not the coordinator alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.codec import OneRoundCodec
    from offbeat.privacy import GaussianMechanism
    from offbeat.robust import Rule


@dataclass(frozen=True)
class ShardParts:
    """The parts of a plan that shards carry out.

    Args:
        rule: makes an update of contributions some of which may lie; None for their mean.
        codec: by which workers encode blocks; None if these come with each element.
        privacy: by which workers noise contributions; None if they do not.
    """

    rule: Rule | None = None
    codec: OneRoundCodec | None = None
    privacy: GaussianMechanism | None = None
