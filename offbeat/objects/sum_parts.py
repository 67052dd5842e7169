"""The sources in each part of a stripe's sum, where one takes the place of another in the middle.

With `splices` a stage keeps what it has added of a source that is lost, and adds the one that takes its place from
there on. So each element of the sum has as many sources as were asked for, and not all elements have the same ones. A
stage says where it changes from one to the other before it adds the first element of the new one, so what is known here
is complete whoever dies when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.protocol.objects import FeedStage, ObjectName, RunStage

Ranges = dict["ObjectName", list[tuple[int, int]]]
"""By source, the ranges of elements that it is in, ascending; next to each other they are one."""


class SumParts:
    """A record of what the stages of one stripe's sum add, attempt by attempt."""

    def __init__(self) -> None:
        self._own: dict[tuple[int, int], ObjectName | None] = {}  # by stage and attempt, the source it begins with
        self._feeds: dict[tuple[int, int, int], list[tuple[int, FeedStage]]] = {}  # by child, too: from which element
        self._asked: dict[tuple[int, int, int], FeedStage] = {}

    def runs(self, order: RunStage) -> None:
        """Note that a stage begins."""
        self._own[order.slot, order.attempt] = order.source

    def feed(self, feed: FeedStage) -> FeedStage:
        """Note what feeds a stage, and return what to tell it: if it is other bytes than before, to say where first."""
        key = feed.slot, feed.attempt, feed.child
        known = self._feeds.setdefault(key, [])
        self._asked.pop(key, None)
        if not known or _is_same(known[-1][1], feed):
            known[-1:] = [(known[-1][0] if known else 0, feed)]
            return feed
        self._asked[key] = msgspec.structs.replace(feed, splices=True)
        return self._asked[key]

    def spliced(self, feed: FeedStage, start: int) -> FeedStage | None:
        """A stage has said from which element on it will add a child; returns the word to begin.

        Returns:
            None if it was not asked, or something else since then.
        """
        key = feed.slot, feed.attempt, feed.child
        if self._asked.get(key) != feed:
            return None
        del self._asked[key]
        known = self._feeds[key]
        while known and known[-1][0] >= start:
            known.pop()
        feed = msgspec.structs.replace(feed, splices=False)
        known.append((start, feed))
        return feed

    def has_elsewhere(self, source: ObjectName, position: int) -> bool:
        """Whether another position may have added some of a source, so that it would be added twice at this one."""
        begun = any(own == source and stage != position for (stage, _), own in self._own.items())
        fed = (feed for feeds in self._feeds.values() for _, feed in feeds)
        asked = self._asked.values()
        return begun or any(feed.source == source and feed.child_slot != position for feed in (*fed, *asked))

    def ranges(self, stage: int, attempt: int, numel: int) -> Ranges:
        """The sources of a sum of `numel` elements, by the attempt of its root."""
        found: dict[ObjectName, list[tuple[int, int]]] = {}
        todo = [(stage, attempt, 0, numel)]
        while todo:
            stage, attempt, begin, end = todo.pop()
            if (own := self._own.get((stage, attempt))) is not None:
                found.setdefault(own, []).append((begin, end))
            for (at, of, _), feeds in self._feeds.items():
                if (at, of) != (stage, attempt):
                    continue
                ends = [start for start, _ in feeds[1:]] + [numel]
                for (start, feed), until in zip(feeds, ends, strict=True):
                    first, last = max(begin, start), min(end, until)
                    if first < last and feed.source is not None:
                        found.setdefault(feed.source, []).append((first, last))
                    elif first < last:
                        todo.append((feed.child_slot, feed.child_attempt, first, last))
        return {source: joined(ranges) for source, ranges in found.items()}


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make ranges that follow each other one.

    >>> joined([(4, 6), (0, 2), (2, 4), (8, 9)])
    [(0, 6), (8, 9)]
    """
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def _is_same(one: FeedStage, other: FeedStage) -> bool:
    if one.source is None and other.source is None:
        return (one.child_slot, one.child_attempt) == (other.child_slot, other.child_attempt)
    return one.source == other.source
