"""One reduce: which sources are in it, and who takes whose place.

The first `count` sources that are there are its *members*; those that come later are spares. Without stripes the store
that asks makes the sum, and begins with a member of its own if it has one then. With stripes, member j's store makes
stripe j of it, of the others' in the order of a ring.

A member whose store is lost is read from another store that has the same source, if there is one; then nothing is
computed twice above it. Else the oldest spare takes its place, in all stripes, or the next source that comes. Where all
of what it had to send is in the sum already, nothing happens.

Without I/O and without time: `expire` is called when the patience of the request is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.objects.edge_dtypes import EdgeDtypes
from offbeat.objects.reduce_plan import choose, in_order, ring
from offbeat.objects.stripe_sum import Place, StripeSum, SumTerms
from offbeat.objects.stripes import turned
from offbeat.objects.sum_parts import joined
from offbeat.protocol.objects import ITEM_BYTES, UsedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from offbeat.objects.reduce_plan import LinkEstimate, ReduceTree
    from offbeat.objects.running_stages import RunningStage
    from offbeat.objects.stripe_sum import Instructions
    from offbeat.protocol.objects import FeedStage, ObjectMeta, ObjectName, ReduceObjects


class Reduction:
    """One reduce.

    Args:
        request: what is asked.
        caller: the store that asks.
        meta: of the target.
        link: what is known of the links.
        next_attempt: numbers that were never used before.
        holders: the stores that have all of a source.
        slow: the stores whose links are slow.

    Attributes:
        is_late: whether the patience is over.
    """

    def __init__(
        self,
        request: ReduceObjects,
        caller: str,
        meta: ObjectMeta,
        link: LinkEstimate,
        next_attempt: Callable[[], int],
        holders: Callable[[ObjectName], set[str]],
        slow: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.request, self.caller, self.meta = request, caller, meta
        self._link, self._next_attempt, self._holders, self._slow = link, next_attempt, holders, slow
        self._dtypes = EdgeDtypes.of(meta.dtype, request.op, request.wire)
        self._own: Place | None = None  # of the caller, with which the sum begins there
        self._members: list[Place | None] = []
        self._spares: dict[ObjectName, str] = {}
        self.sums: list[StripeSum | None] = [None] * meta.stripes
        self._unreadable: set[tuple[ObjectName, str]] = set()  # sources, and the stores they could not be read from
        self._is_closed = self.is_late = False

    @classmethod
    def resumed(
        cls,
        request: ReduceObjects,
        caller: str,
        stages: list[RunningStage],
        link: LinkEstimate,
        next_attempt: Callable[[], int],
        holders: Callable[[ObjectName], set[str]],
        slow: Callable[[], Collection[str]] = tuple,
    ) -> Reduction | None:
        """Make the reduce whose stages run already, as an earlier directory planned them.

        Returns:
            None if it cannot be told from the stages which sources are in it: one of them is lost, say.
        """
        meta = stages[0].order.meta
        striped = request.striped and meta.stripes > 1
        made = cls(msgspec.structs.replace(request, striped=striped), caller, meta, link, next_attempt, holders, slow)
        if meta.stripes > 1 and not striped:
            return None
        how = meta, request.op, request.wire
        if any((stage.order.meta, stage.order.op, stage.order.wire) != how for stage in stages):
            return None
        for stripe in range(meta.stripes):
            terms = made._terms(stripe)
            running = [stage for stage in stages if stage.order.stripe == stripe]
            part = StripeSum.resumed(terms, caller, running, next_attempt) if running else None
            if running and part is None:
                return None
            made.sums[stripe] = part
        return made if made._learn_members(stages) else None

    def _learn_members(self, stages: list[RunningStage]) -> bool:
        """Find the members in the places of the sums; False if they do not fit each other."""
        found: dict[int, Place] = {}
        for stripe, part in enumerate(self.sums):
            if part is None:
                continue
            places = {  # copies: a member that is lost still runs the stages of its places, which are ended then
                self._member_at(stripe, position): Place(place.source, place.store)
                for position, place in part.places.items()
            }
            for stage in stages:
                if stage.order.slot < 0 and stage.order.stripe == stripe:
                    part.root, own = stage.store, stage.order.source
                    if own is not None and self.request.striped:
                        places[stripe] = Place(own, stage.store)
                    elif own is not None:
                        self._own = Place(own, stage.store)
            if any(found.setdefault(index, place).source != place.source for index, place in places.items()):
                return False
        sources = [place.source for place in found.values()]
        if self._own is None and not self.request.striped and any(part.tree.n < self.count for part in self._parts):
            # The tree has no position for a source of the caller, whose stage has not begun.
            own = next((one for one in self.request.sources if one not in sources and self._is_own(one)), None)
            if own is None:
                return False
            self._own = Place(own, self.caller)
            self._parts[0].own = own
        if self._own is not None:
            sources.append(self._own.source)
        elif any(part.taken is not None and not part.generation for part in self._parts):
            return False  # a position is passed over: because no more sources come, or for one of the caller
        if len(set(sources)) < len(sources) or not set(sources) <= set(self.request.sources):
            return False
        if len(sources) > self.count or max(found, default=0) >= self.count:
            return False
        # Members of which nobody has heard yet leave their positions to the next sources.
        positions = self.count if self.request.in_order else max(found, default=-1) + 1
        self._members = [found.get(at) for at in range(positions)]
        more = 0 if self._own is None else 1
        self._is_closed = any(part.taken is not None and part.taken + more < self.count for part in self._parts)
        for stripe, part in enumerate(self.sums):
            if self.request.striped:
                if (root := found.get(stripe)) is None:
                    if part is not None:
                        return False  # nobody knows where its sum is made
                    continue
                if part is None:
                    part = self._begin(stripe, self._ring(), root)
                elif not part.generation:
                    part.root, part.own = root.store or "", root.source
            if part is None:
                return False  # stages of this sum run, but none of this stripe
            part.divisor = len(self.used) if self._is_closed else self.count
            for index, place in found.items():
                if not self._is_root(stripe, index):
                    part.learn(self._position(stripe, index), place)
            if not part.knows_feeders([stage for stage in stages if stage.order.stripe == stripe]):
                return False
        return True

    def _is_own(self, source: ObjectName) -> bool:
        return self.caller in self._holders(source)

    @property
    def _parts(self) -> list[StripeSum]:
        return [part for part in self.sums if part is not None]

    def forget_absent(self, present: Collection[str]) -> None:
        """Lose the members whose stores are not there."""
        for index, member in enumerate(self._members):
            if member is not None and member.store not in present:
                self._lose(index)

    def has_stage(self, stripe: int, stage: int, attempt: int, store: str) -> bool:
        """Whether a store is to run this attempt at a stage."""
        part = self._sum(stripe)
        return part is not None and part.has_stage(stage, attempt, store)

    def repeat_orders(self, stages: list[RunningStage]) -> Instructions:
        """Run the stages that have not heard of it, and feed those that have not heard of what feeds them now."""
        told: Instructions = []
        for stripe, part in enumerate(self.sums):
            if part is not None:
                told += part.repeat_orders([stage for stage in stages if stage.order.stripe == stripe])
        return told

    @property
    def count(self) -> int:
        """The sources that are to be in the sum."""
        return self.request.count

    @property
    def used(self) -> tuple[ObjectName, ...]:
        """The sources that are in the sum, or are to be; in the order in which the first stripe adds them."""
        own = [self._own] if self._own is not None else []
        return tuple(member.source for member in [*own, *self._members] if member is not None)

    @property
    def used_sources(self) -> tuple[UsedSource, ...]:
        """Return these, with the elements that they are in: all, unless one was spliced in the middle. A spare that
        took a place when all of the lost source had been added is in none."""
        ranges: dict[ObjectName, list[tuple[int, int]]] = {source: [] for source in self.used}
        for part in self._parts:
            for source, found in part.ranges.items():
                ranges.setdefault(source, []).extend(found)
        if not any(ranges.values()):
            return tuple(UsedSource(source) for source in self.used)
        together = {source: joined(found) for source, found in ranges.items() if found}
        is_all = [(0, self.meta.numel)]
        return tuple(UsedSource(source, () if found == is_all else tuple(found)) for source, found in together.items())

    def later(self, stripe: int, store: str) -> list[str]:
        """The members' stores that read a stripe after this one, so that with stripes every link has as much to do.

        The root's neighbour reads first, as in a ring; without stripes any order is as good.
        """
        if not self.request.striped or stripe >= len(self._members):
            return []
        ring = [member.store for member in turned(self._members, stripe) if member is not None and member.store]
        return ring[ring.index(store) + 1 : -1] if store in ring else []

    @property
    def is_settled(self) -> bool:
        """Whether it is known of which sources the sum is made, and all are there."""
        return self._is_closed or len(self.used) == self.count

    @property
    def is_whole(self) -> bool:
        """Whether the sum is there, in all of its stripes."""
        return all(part is not None and part.is_whole for part in self.sums)

    @property
    def there(self) -> set[ObjectName]:
        """Return the sources of the sum that are there, or in it with all of their bytes."""
        members = enumerate(self._members)
        there = {one.source for at, one in members if one is not None and (one.store or not self._is_missed(at))}
        return there if self._own is None else there | {self._own.source}

    @property
    def lacking(self) -> int:
        """Return how many more are needed."""
        return (len(self.used) if self._is_closed else self.count) - len(self.there)

    def ready(self, source: ObjectName, store: str) -> Instructions:
        """A source is there, at a store."""
        if source in self.used:
            return self._settle()
        if not self.is_settled:
            told = self._admit(source, store) + self._settle()
            return told + self.expire() if self.is_late else told
        self._spares.setdefault(source, store)
        return self._settle()

    def lost(self, store: str) -> Instructions:
        """A store is gone."""
        self._spares = {source: where for source, where in self._spares.items() if where != store}
        for index, member in enumerate(self._members):
            if member is not None and member.store == store:
                self._lose(index)
        return self._settle()

    def child_arrived(self, stripe: int, stage: int, attempt: int, child: int) -> None:
        """Note that a stage's child is in its sum."""
        if (part := self._sum(stripe)) is not None:
            part.arrived(stage, attempt, child)

    def child_failed(self, stripe: int, stage: int, attempt: int, child: int, store: str) -> Instructions:
        """A stage cannot read what its child sends from this store: not again before `retry`."""
        part = self._sum(stripe)
        position = None if part is None else part.failed(stage, attempt, child, store)
        if position is None:
            return []
        index = self._member_at(stripe, position)
        member = self._members[index]
        assert member is not None
        self._unreadable.add((member.source, store))
        return self._lose(index) + self._settle()

    def spliced(self, feed: FeedStage, start: int, store: str) -> Instructions:
        """A stage has said where it changes to a source that takes another's place."""
        part = self._sum(feed.stripe)
        return [] if part is None else part.spliced(feed, start, store)

    def retry(self) -> Instructions:
        """Perhaps what could not be read can be now."""
        self._unreadable.clear()
        return self._settle()

    def whole(self, stripe: int, generation: int) -> Instructions:
        """The root has all of a stripe's sum: its stages may end."""
        part = self._sum(stripe)
        if part is None or part.generation != generation or part.is_whole:
            return []
        part.finish()
        return self.end() if self.is_whole else []

    def expire(self) -> Instructions:
        """The patience is over: make the sum of the sources that are there, as soon as these are enough."""
        self.is_late = True
        present = [member for member in self._members if member is not None and member.store is not None]
        taken = len(present) + (self._own is not None)
        if (
            self._is_closed
            or self.request.in_order
            or self.request.striped
            or not self.request.least <= taken < self.count
        ):
            return []
        self._is_closed = True
        part = self.sums[0]
        if part is not None and part.lacks_only_the_last(len(present)):
            return self._close(part)
        # Positions are empty in the middle, since stores were lost, or all are: it begins anew without them.
        told = [] if part is None else part.ended()
        if not present and self._own is not None:
            present, self._own = [self._own], None
        self._members = list(present)
        self._begin(0, self._tree(len(present)))
        return told + self._fill_all(0)

    def end(self) -> Instructions:
        """The sum is not wanted any more."""
        return [told for part in self.sums if part is not None for told in part.ended()]

    # -- who is in it --------------------------------------------------------------------------------------------

    def _admit(self, source: ObjectName, store: str) -> Instructions:
        member, part = Place(source, store), self.sums[0]
        if (
            not (self.request.in_order or self.request.striped)
            and store == self.caller
            and self._own is None
            and self.count > 1
            and None not in self._members
            and (part is None or not part.generation)
        ):
            self._own = member
            if part is not None:
                part.own = source
                return self._close(part) if self.is_settled else []
            return []
        if part is None and not self.request.striped:
            self._begin(0, self._tree(self.count - (self._own is not None)))
        index = self.request.sources.index(source) if self.request.in_order else self._free_position(store)
        length = self.count if self.request.in_order else index + 1
        self._members += [None] * (length - len(self._members))
        self._members[index] = member
        told: Instructions = []
        if self.request.striped and index < len(self.sums):
            self._begin(index, self._ring(), member)
            told += self._fill_all(index)
        for stripe, known in enumerate(self.sums):
            if known is not None and not self._is_root(stripe, index):
                told += known.put(self._position(stripe, index), source, store)
        part = self.sums[0]
        # A caller's own source takes no position: one stays empty if the tree was planned before it came.
        if part is not None and not self.request.striped and self.is_settled and len(self._members) < part.tree.n:
            told += self._close(part)
        return told

    def _free_position(self, store: str) -> int:
        """The first position that nobody has taken; of a slow store the first one without children, as far as there is
        one, so that nobody's sum goes through it."""
        members, part = self._members, self.sums[0]
        first = members.index(None) if None in members else len(members)
        if self.request.striped or part is None or store not in self._slow():
            return first
        most = min(self.count - (self._own is not None), part.tree.n)
        free = (at for at in range(first, most) if at >= len(members) or members[at] is None)
        return next((at for at in free if not part.tree.children[at]), first)

    def _close(self, part: StripeSum) -> Instructions:
        part.divisor = len(self.used)
        return part.close(len(self._members))

    def _tree(self, positions: int) -> ReduceTree:
        if self.request.in_order:
            return in_order(positions, self.meta.size_bytes)
        leaf_bytes = self.meta.numel * ITEM_BYTES[self._dtypes.leaf]
        return choose(positions, leaf_bytes, self._link, self._dtypes.inner_factor)

    def _ring(self) -> ReduceTree:
        return ring(self.count - 1, self._dtypes.inner_factor)

    def _terms(self, stripe: int) -> SumTerms:
        asked = self.request
        return SumTerms(asked.name, self.meta, asked.op, stripe, asked.wire, asked.splices)

    def _begin(self, stripe: int, tree: ReduceTree, root: Place | None = None) -> StripeSum:
        terms = self._terms(stripe)
        if root is None:
            own, store = self._own, self.caller
        else:
            own, store = root, root.store or ""
        part = StripeSum(terms, tree, store, None if own is None else own.source, self._next_attempt)
        part.divisor = len(self.used) if self._is_closed else self.count
        self.sums[stripe] = part
        return part

    def _fill_all(self, stripe: int) -> Instructions:
        part, told = self.sums[stripe], []
        for index, member in enumerate(self._members):
            if part is None or member is None or member.store is None or self._is_root(stripe, index):
                continue
            told += part.put(self._position(stripe, index), member.source, member.store)
        return told

    # -- where a member is in a stripe's tree --------------------------------------------------------------------

    def _is_root(self, stripe: int, index: int) -> bool:
        return self.request.striped and stripe == index

    def _position(self, stripe: int, index: int) -> int:
        """Return a member's position in a stripe's tree; with stripes the one after the root is first (`turned`)."""
        return (index - stripe - 1) % self.count if self.request.striped else index

    def _member_at(self, stripe: int, position: int) -> int:
        return (position + stripe + 1) % self.count if self.request.striped else position

    def _sum(self, stripe: int) -> StripeSum | None:
        return self.sums[stripe] if stripe < len(self.sums) else None

    # -- who takes whose place -----------------------------------------------------------------------------------

    def _lose(self, index: int) -> Instructions:
        member, told = self._members[index], []
        assert member is not None
        member.store = None
        for stripe, part in enumerate(self.sums):
            if part is None:
                continue
            if self._is_root(stripe, index):
                part.lose_root()
            else:
                told += part.lose(self._position(stripe, index))
        return told

    def _is_missed(self, index: int) -> bool:
        """Whether something that a lost member has to send, or to make, is in no sum yet."""
        for stripe, part in enumerate(self.sums):
            if part is not None and (self._is_root(stripe, index) or part.needs(self._position(stripe, index))):
                return True
        return False

    def _settle(self) -> Instructions:
        """Have somebody in the place of each member that is missed, as far as there is somebody.

        Whoever takes a place may have a stage begin anew whose other children are lost: so until nothing changes.
        """
        told: Instructions = []
        while more := list(self._replacements()):
            for index, source, store in more:
                told += self._put(index, source, store)
        return told

    def _replacements(self) -> Iterator[tuple[int, ObjectName, str]]:
        for index, member in enumerate(self._members):
            if member is None or member.store is not None or not self._is_missed(index):
                continue
            stores = {store for store in self._holders(member.source) if (member.source, store) not in self._unreadable}
            if stores:
                yield index, member.source, min(stores)
            elif self._spares and not self.request.in_order:
                source = next(iter(self._spares))
                yield index, source, self._spares.pop(source)

    def _put(self, index: int, source: ObjectName, store: str) -> Instructions:
        self._members[index] = Place(source, store)
        told: Instructions = []
        for stripe, part in enumerate(self.sums):
            if part is None:
                continue
            if self._is_root(stripe, index):
                told += part.move_root(store, source)
            else:
                told += part.put(self._position(stripe, index), source, store)
        return told
