"""The sum of one stripe: the stages at the positions of a tree, and what becomes of them when a source is replaced.

A *stage* runs at each position that has children, and at the root: it adds what the children send, in their order, to
its own source. A position without children sends its source as it is. A stage that has to begin anew gets another
attempt, and what belongs to an earlier attempt is thrown away.

Where a source is put for the first time, its stage runs and its parent is fed. Where the same source is put at another
store, the sums are the same bytes, so nobody above begins anew. Where another source takes its place, each stage from
its parent to the root begins anew, fed by the sums below, which are kept. Once no source comes any more, positions that
are empty are passed over (`close`).

Without I/O. After Hoplite (Zhuang et al., SIGCOMM 2021, section 4.3 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.objects.reduce_plan import CALLER, ReduceTree
from offbeat.objects.stripes import cut
from offbeat.objects.sum_parts import SumParts
from offbeat.protocol.objects import EndStage, FeedStage, FromDirectory, ObjectName, RunStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.objects.running_stages import RunningStage
    from offbeat.objects.sum_parts import Ranges
    from offbeat.protocol.objects import ObjectMeta, ReduceOp, WireDtype

Instructions = list[tuple[str, FromDirectory]]
"""Messages to stores, by their addresses, in their order."""


@dataclass(frozen=True)
class SumTerms:
    """The terms of a stripe's sum, which all of its stages share.

    Args:
        name, meta: of the target.
        op: how.
        stripe: which.
        wire: the dtype in which its parts travel, if it is another one than they have.
        splices: whether a source that takes another's place is added from where that one ended.
    """

    name: ObjectName
    meta: ObjectMeta
    op: ReduceOp
    stripe: int
    wire: WireDtype = ""
    splices: bool = False

    @property
    def element_range(self) -> tuple[int, int]:
        """Return the elements of the stripe: the first one, and the one after the last."""
        meta = self.meta
        begin, end = cut(meta.size_bytes, meta.stripes, meta.item_bytes)[self.stripe]
        return begin // meta.item_bytes, end // meta.item_bytes


@dataclass
class Place:
    """A position that is taken: its source, and the store that has it; None if that is lost."""

    source: ObjectName
    store: str | None


class StripeSum:
    """The stages of one stripe's sum.

    Args:
        terms: what it is.
        tree: of its positions.
        root: the store that keeps the sum.
        own: a source of that store, with which the sum begins there.
        next_attempt: numbers that were never used before.

    Attributes:
        is_whole: whether the root has all of it.
        divisor: sources of which a mean is made.
        ranges: the elements that each source is in, if it splices and is whole.
    """

    def __init__(
        self,
        terms: SumTerms,
        tree: ReduceTree,
        root: str,
        own: ObjectName | None,
        next_attempt: Callable[[], int],
    ) -> None:
        self._terms, self.tree, self.root, self.own, self._next_attempt = terms, tree, root, own, next_attempt
        self._places: list[Place | None] = [None] * tree.n
        self._attempts: dict[int, int] = {}
        self._arrived: set[tuple[int, int]] = set()  # (stage, position of its child) that is in its sum
        self._parts = SumParts() if terms.splices else None
        self._taken: int | None = None  # positions that are taken, once no more will be
        self.is_whole = self._is_root_lost = False
        self.divisor = 1
        self.ranges: Ranges = {}

    @classmethod
    def resumed(
        cls, terms: SumTerms, root: str, stages: list[RunningStage], next_attempt: Callable[[], int]
    ) -> StripeSum | None:
        """Make the sum whose stages run already; None if they do not fit each other, or one of them is lost."""
        first = stages[0].order
        tree = ReduceTree(first.positions, first.degree)
        part = cls(terms, tree, root, None, next_attempt)
        part._taken = min((stage.order.taken for stage in stages if stage.order.taken is not None), default=None)
        for stage in stages:
            order, slot = stage.order, stage.order.slot
            if slot >= tree.n or (order.positions, order.degree) != (tree.n, tree.degree) or slot in part._attempts:
                return None
            if slot != CALLER and order.source is None:  # only the root's stage may have no source of its own
                return None
            part._attempts[slot] = order.attempt
            if slot == CALLER:
                part.own = order.source
            else:
                assert order.source is not None
                part._places[slot] = Place(order.source, stage.store)
        for stage in stages:
            slot = stage.order.slot
            for child, feed in stage.feeds.items():
                at = part._child(slot, stage.order.attempt, child)
                if at is None or at != feed.child_slot:
                    return None
                if feed.source is not None and at not in part._attempts:
                    part._places[at] = Place(feed.source, feed.store)
                if child in stage.arrived:
                    part._arrived.add((slot, at))
        return part

    @property
    def places(self) -> dict[int, Place]:
        """Return the positions that are taken."""
        return {at: place for at, place in enumerate(self._places) if place is not None}

    def knows_feeders(self, stages: list[RunningStage]) -> bool:
        """Whether it is known which sources feed the stages; if not, one of their stores is lost."""
        return all(feed.child_slot in self.places for stage in stages for feed in stage.feeds.values())

    def learn(self, position: int, place: Place) -> None:
        """Note who is at a position, if that is not known."""
        if self._places[position] is None:
            self._places[position] = Place(place.source, place.store)

    @property
    def taken(self) -> int | None:
        """Return the number of positions that are not passed over, once no more sources come; else None."""
        return self._taken

    def has_stage(self, stage: int, attempt: int, store: str) -> bool:
        """Whether a store is to run this attempt at a stage."""
        return self._attempts.get(stage) == attempt and self._store(stage) == store

    def repeat_orders(self, stages: list[RunningStage]) -> Instructions:
        """Run the stages that have not heard of it, and feed those that have not heard of what feeds them now.

        A stage that was fed otherwise than it is to be now may have bytes of other sources, and so may those above it.
        """
        fed = {(stage.order.slot, feed.child_slot): feed for stage in stages for feed in stage.feeds.values()}
        stale: set[int] = set()
        for (_, at), feed in fed.items():
            runs = self._attempts.get(at, 0)
            is_same = self._place(at).source == feed.source if feed.source else runs == feed.child_attempt
            stale |= set() if is_same else set(self._path(at))
        before, told = set(self._attempts) - stale, []
        for stage in sorted(stale & self._attempts.keys(), key=lambda stage: -len(self._path(stage))):
            told += self._run(stage)
        for at in (*self.places, CALLER):
            is_fed = any(child in self.places for child in self._children(at))
            if at not in self._attempts and (is_fed if at == CALLER else self._children(at)):
                told += self._run(at)
        for at in self.places:
            stage = self._parent(at)
            if stage in before and (stage, at) not in fed:
                told += self._feed(stage, at)
        return told

    @property
    def generation(self) -> int:
        """The attempt of the root; 0 if it has not begun."""
        return self._attempts.get(CALLER, 0)

    def needs(self, position: int) -> bool:
        """Whether what a position sends is not in the sum of its parent yet."""
        return not self.is_whole and (self._parent(position), position) not in self._arrived

    def lacks_only_the_last(self, taken: int) -> bool:
        """Whether just the first `taken` positions are taken, by sources that are there."""
        return all(
            (place is not None and place.store is not None) == (at < taken) for at, place in enumerate(self._places)
        )

    def put(self, position: int, source: ObjectName, store: str) -> Instructions:
        """Have a position send this source, or its sum with it, from this store."""
        before = self._places[position]
        is_whole, is_same = not self.needs(position), before is not None and before.source == source
        self._places[position] = Place(source, store)
        if is_same and is_whole:
            return []
        if self._is_elsewhere(source, position):
            return self._begin_anew(position)
        told = self._run(position)
        if before is None or is_same or self._parts is not None:
            return told + self._feed(self._parent(position), position)
        for stage in self._path(position):
            told += self._run(stage)
        return told

    def lose(self, position: int) -> Instructions:
        """The store of a position is gone, or cannot be read from: then it is to end its stage."""
        place, told = self._places[position], self._end(position)
        if place is not None:
            place.store = None
            self._attempts.pop(position, None)
        return told

    def lose_root(self) -> None:
        """The store that keeps the sum is gone, or cannot be read from: nothing begins there any more."""
        self._is_root_lost, self.is_whole = True, False

    def move_root(self, root: str, own: ObjectName | None) -> Instructions:
        """Have another store keep the sum."""
        told = self._end(CALLER) if root != self.root else []  # it would write where that store reads from now on
        self.root, self.own, self._is_root_lost = root, own, False
        if own is not None and self._is_elsewhere(own, CALLER):
            return told + self._begin_anew(CALLER)
        places = [self._places[child] for child in self._children(CALLER)]
        is_fed = any(place is not None and place.store is not None for place in places)
        return told + self._run(CALLER) if is_fed or CALLER in self._attempts else told

    def close(self, taken: int) -> Instructions:
        """Have the sums of the first `taken` positions pass over the others, which stay empty."""
        before = {stage: self._children(stage) for stage in self._attempts}
        self._taken = taken
        told: Instructions = []
        for stage, children in before.items():
            if (now := self._children(stage)) != children:
                told.append(self._order(stage))
                for old, new in zip(children, now, strict=False):
                    if old != new:
                        told += self._feed(stage, new)
        if CALLER not in before:
            for child in self._children(CALLER):
                told += self._feed(CALLER, child)
        return told

    def arrived(self, stage: int, attempt: int, child: int) -> None:
        """Note that a stage's child is in its sum."""
        if (at := self._child(stage, attempt, child)) is not None:
            self._arrived.add((stage, at))

    def failed(self, stage: int, attempt: int, child: int, store: str) -> int | None:
        """A stage cannot read from the store of its child: the child's position; None if that is out of date."""
        at = self._child(stage, attempt, child)
        place = None if at is None else self._places[at]
        return at if place is not None and place.store == store else None

    def spliced(self, feed: FeedStage, start: int, store: str) -> Instructions:
        """A stage has said from which element on it will add what feeds it now: it may begin."""
        if self._parts is None or not self.has_stage(feed.slot, feed.attempt, store):
            return []
        begin = self._parts.spliced(feed, start)
        return [] if begin is None else [(store, begin)]

    def finish(self) -> None:
        """The root has all of it."""
        self.is_whole = True
        if self._parts is not None:
            first, last = self._terms.element_range
            found = self._parts.ranges(CALLER, self.generation, last - first)
            self.ranges = {source: [(first + a, first + b) for a, b in at] for source, at in found.items()}

    def ended(self) -> Instructions:
        """No stage is needed any more."""
        told = [end for stage in self._attempts for end in self._end(stage)]
        self._attempts.clear()
        return told

    def _end(self, stage: int) -> Instructions:
        attempt, store = self._attempts.get(stage), self._store(stage)
        if attempt is None or store is None:
            return []
        return [(store, EndStage(name=self._terms.name, stripe=self._terms.stripe, slot=stage, attempt=attempt))]

    def _place(self, position: int) -> Place:
        place = self._places[position]
        assert place is not None, f"nothing is at position {position} of {self._terms.name}"
        return place

    def _store(self, stage: int) -> str | None:
        if stage == CALLER:
            return self.root
        place = self._places[stage]  # none if an earlier directory's stage is at a position that nobody has reported
        return None if place is None else place.store

    def _is_empty(self, position: int) -> bool:
        return self._taken is not None and position >= self._taken

    def _children(self, stage: int) -> list[int]:
        """The positions whose sums a stage adds. The first `taken` ones hold, for each empty one, no more than the
        first child's subtree of it, since positions are numbered in order."""
        found = []
        for child in self.tree.children[stage]:
            position: int | None = child
            while position is not None and self._is_empty(position):
                position = next(iter(self.tree.children[position]), None)
            if position is not None:
                found.append(position)
        return found

    def _child(self, stage: int, attempt: int, child: int) -> int | None:
        """Return the position of a stage's child; None if this attempt is not under way, or has no such child."""
        if self._attempts.get(stage) != attempt:
            return None
        children = self._children(stage)
        return children[child] if child < len(children) else None

    def _parent(self, position: int) -> int:
        parent = self.tree.parents[position]
        while parent != CALLER and self._is_empty(parent):
            parent = self.tree.parents[parent]
        return parent

    def _path(self, position: int) -> list[int]:
        """The stages that what a position sends goes through."""
        path = []
        while position != CALLER:
            position = self._parent(position)
            path.append(position)
        return path

    def _is_elsewhere(self, source: ObjectName, position: int) -> bool:
        """Whether a part of a source may have been added at another position, before its store was lost."""
        return self._parts is not None and self._parts.has_elsewhere(source, position)

    def _begin_anew(self, position: int) -> Instructions:
        """Have all stages begin anew, those that feed others first: somebody else is at a position now."""
        self._parts, told = SumParts(), []
        is_fed_anew = position != CALLER and self._parent(position) in self._attempts
        for stage in sorted({*self._attempts, position}, key=lambda stage: -len(self._path(stage))):
            told += self._run(stage)
        return told if is_fed_anew or position == CALLER else told + self._feed(self._parent(position), position)

    def _run(self, stage: int) -> Instructions:
        """Have a stage begin, and feed it from those of its children that are there."""
        if stage != CALLER:
            place = self._places[stage]
            if place is None or place.store is None or not self._children(stage):
                return []
        else:
            self.is_whole = False
            if self._is_root_lost:
                return []
        self._attempts[stage] = self._next_attempt()
        self._arrived = {(at, child) for at, child in self._arrived if at != stage}
        told = [self._order(stage)]
        for child in self._children(stage):
            told += self._feed(stage, child)
        return told

    def _order(self, stage: int) -> tuple[str, FromDirectory]:
        store = self._store(stage)
        assert store is not None
        order = RunStage(
            name=self._terms.name,
            meta=self._terms.meta,
            stripe=self._terms.stripe,
            slot=stage,
            attempt=self._attempts[stage],
            op=self._terms.op,
            source=self.own if stage == CALLER else self._place(stage).source,
            children=len(self._children(stage)),
            positions=self.tree.n,
            degree=self.tree.degree,
            taken=self._taken,
            divisor=self.divisor if stage == CALLER and self._terms.op == "mean" else 1,
            wire=self._terms.wire,
        )
        if self._parts is not None:
            self._parts.runs(order)
        return store, order

    def _feed(self, stage: int, child: int) -> Instructions:
        """Have a stage read what a child sends, if both are there."""
        place = self._places[child]
        if place is None or place.store is None:
            return []
        if stage not in self._attempts:
            return self._run(CALLER) if stage == CALLER else []
        if (store := self._store(stage)) is None:
            return []
        told = self._run(child) if self._children(child) and child not in self._attempts else []
        runs = child in self._attempts
        feed = FeedStage(
            name=self._terms.name,
            stripe=self._terms.stripe,
            slot=stage,
            attempt=self._attempts[stage],
            child=self._children(stage).index(child),
            store=place.store,
            source=None if runs else place.source,
            child_slot=child,
            child_attempt=self._attempts[child] if runs else 0,
        )
        return [*told, (store, feed if self._parts is None else self._parts.feed(feed))]
