"""The stages that stores report to a directory that begins anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.protocol.objects import EndStage, FeedStage, FromStore, ObjectName, RunStage, StageFed, StageRuns

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class RunningStage:
    """A stage that runs at a store.

    Args:
        order: by which it began.
        feeds: by child, what feeds it.
        arrived: the children whose bytes are all in its sum.
    """

    store: str
    order: RunStage
    feeds: dict[int, FeedStage] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)

    def end(self) -> EndStage:
        """Return the order to end it."""
        order = self.order
        return EndStage(name=order.name, stripe=order.stripe, slot=order.slot, attempt=order.attempt)


def collect(reports: Iterable[tuple[str, FromStore]]) -> dict[ObjectName, list[RunningStage]]:
    """The stages that stores report, by the target of their reduce."""
    found: dict[tuple[str, ObjectName, int, int], RunningStage] = {}
    for store, message in reports:
        if isinstance(message, StageRuns):
            order = message.order
            found[store, order.name, order.stripe, order.slot] = RunningStage(store, order)
        elif isinstance(message, StageFed):
            feed = message.feed
            stage = found.get((store, feed.name, feed.stripe, feed.slot))
            if stage is not None and stage.order.attempt == feed.attempt and feed.child < stage.order.children:
                stage.feeds[feed.child] = feed
                if message.arrived:
                    stage.arrived.add(feed.child)
    by_target: dict[ObjectName, list[RunningStage]] = {}
    for (_, name, _, _), stage in found.items():
        by_target.setdefault(name, []).append(stage)
    return by_target
