"""Stores of objects that exist in memory alone, around a directory that is tested: everything in a random order.

What stores and directory say to each other arrives in order on each link and in any order between links; each store
moves any block that it may at any moment. Objects are small numbers per block, the sources of a sum powers of two, so
that a sum shows what it was made of.

    world = ObjectWorld(seed=7, stores=5)
    world.put("a", name, value=1)
    world.want("b", name)
    world.kill("a")
    world.run()                             # until nothing moves any more
    assert world.stores["b"].values(name) == [1] * BLOCKS
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from offbeat.objects.directory import Directory
from offbeat.objects.reduce_plan import LinkEstimate
from offbeat.objects.stripes import LEAST_STRIPE_BYTES, cut
from offbeat.protocol import objects as say
from offbeat.protocol.objects import ObjectMeta, ObjectName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from offbeat.protocol.objects import FromDirectory, FromStore, ReduceOp

BLOCKS = 6
"""Of a stripe."""
SIZE_BYTES = 5 * LEAST_STRIPE_BYTES
META = ObjectMeta("float32", (SIZE_BYTES // 4,), SIZE_BYTES)
SMALL = ObjectMeta("float32", (4,), 16)
LINKS = {
    "chain": LinkEstimate(0.0, 1e9, 1 << 10),
    "tree": LinkEstimate(0.002, 1e9, 32 << 10),
    "star": LinkEstimate(10.0, 1e9, 1 << 20),
}


def first_element(meta: ObjectMeta, stripe: int, block: int) -> int:
    """The first element of a block; of the one after the last, the first after the stripe."""
    begin, end = (at // meta.item_bytes for at in cut(meta.size_bytes, meta.stripes, meta.item_bytes)[stripe])
    return begin + (end - begin) * block // BLOCKS


@dataclass
class Copy:
    """One store's copy of an object: per stripe the blocks that have come, and where more come from."""

    meta: ObjectMeta
    blocks: list[list[int]]
    generations: list[int]
    feeders: list[str]
    is_own: bool = False
    is_taken: bool = False
    making: int = 0
    is_settled: bool = True
    reported: set[tuple[int, int, str]] = field(default_factory=set)


@dataclass
class ModelStage:
    """One stage: rows[k] are the blocks of its own source plus those of its first k children."""

    order: say.RunStage
    rows: list[list[int]]
    feeds: dict[int, say.FeedStage] = field(default_factory=dict)
    reported: set[tuple[int, str, int]] = field(default_factory=set)


class ModelStore:
    """One store."""

    def __init__(self, address: str, makings: Iterator[int]) -> None:
        self.address, self.makings = address, makings
        self.copies: dict[ObjectName, Copy] = {}
        self.stages: dict[tuple[ObjectName, int, int], ModelStage] = {}
        self.used: dict[ObjectName, tuple[say.UsedSource, ...]] = {}
        self.refused: dict[ObjectName, str] = {}
        self.forgotten: set[ObjectName] = set()
        self.wants: set[ObjectName] = set()
        self.deleting: set[ObjectName] = set()
        self.requests: dict[ObjectName, say.ReduceObjects] = {}
        self.taken_in = 0
        self.outbox: deque[FromStore] = deque()
        self.inbox: deque[FromDirectory] = deque()

    def values(self, name: ObjectName) -> list[int]:
        """The blocks of an object, stripe after stripe; [] if it is not whole here."""
        copy = self.copies.get(name)
        if copy is None or any(len(blocks) < BLOCKS for blocks in copy.blocks):
            return []
        return [value for blocks in copy.blocks for value in blocks]

    def hear(self, message: FromDirectory) -> None:
        """The directory has said something."""
        name = message.name
        match message:
            case say.PutTaken():
                if name in self.copies:
                    self.copies[name].is_taken = True
                else:
                    self.outbox.append(say.WithdrawPut(name=name))
            case say.ObjectFound() if name not in self.wants and name not in self.copies:
                self.outbox.append(say.StopWanting(name=name))
            case say.ObjectFound():
                copy = self._copy(name, message.meta)
                copy.is_settled = message.settled
                for stripe, feeder in enumerate(message.stripes):
                    self._feed(copy, stripe, feeder.generation, feeder.store)
            case say.ObjectInline():
                copy = self._copy(name, message.meta)
                if not copy.is_own:
                    copy.blocks, copy.generations = [[message.data[0]] * BLOCKS], list(message.generations)
            case say.ChangeFeeder():
                if name in self.copies:
                    self._feed(self.copies[name], message.stripe, message.generation, message.feeder)
            case say.RestartObject():
                if name in self.copies:
                    self.copies[name].is_settled = message.settled
                    self._feed(self.copies[name], message.stripe, message.generation, "")
            case say.ForgetObject():
                known = self.copies.get(name)
                if known is None or not known.is_own or tuple(known.generations) == message.generations:
                    self.copies.pop(name, None)
                    self.requests.pop(name, None)
                    self._end_want(name)
                    self.forgotten.add(name)
            case say.ObjectDeleted():
                self.deleting.discard(name)
            case say.RunStage():
                self._run_stage(message)
            case say.FeedStage():
                stage = self.stages.get((name, message.stripe, message.slot))
                if stage is not None and stage.order.attempt == message.attempt:
                    self._feed_stage(stage, message)
            case say.EndStage():
                key = name, message.stripe, message.slot
                if key in self.stages and self.stages[key].order.attempt <= message.attempt:
                    del self.stages[key]
            case say.ReduceSmall():
                total = sum(part[0] for part in message.parts)
                self.used[name] = tuple(say.UsedSource(source) for source in message.used)
                self.requests.pop(name, None)
                made = message.generation
                self.copies[name] = Copy(message.meta, [[total] * BLOCKS], [made], [""], is_own=True, making=total)
                self.outbox.append(
                    say.PutObject(
                        name=name,
                        meta=message.meta,
                        generations=(made,),
                        whole=True,
                        digest=f"{total}",
                        inline=bytes([total]) * SMALL.size_bytes,
                    )
                )
            case say.ReduceSettled():
                self.used[name] = message.used
                self.requests.pop(name, None)
                if name in self.copies:
                    self.copies[name].is_settled = True
            case say.ObjectRefused():
                known = self.copies.get(name)
                if known is None or not message.generations or tuple(known.generations) == message.generations:
                    self.refused[name] = message.reason
                    self.requests.pop(name, None)
                    if message.generations:
                        self._end_want(name)
                        self.copies.pop(name, None)
            case say.ObjectDropped():
                if message.granted:
                    self.copies.pop(name, None)

    def stage_values(self, name: ObjectName, stripe: int, slot: int, attempt: int) -> list[int] | None:
        """Return the sum of a stage; None if there is no such attempt of it here."""
        stage = self.stages.get((name, stripe, slot))
        return None if stage is None or stage.order.attempt != attempt else stage.rows[stage.order.children]

    def report(self) -> Iterator[FromStore]:
        """Say to a new directory what is here, and what is waited for."""
        parts = []
        for name, copy in self.copies.items():
            whole = bool(self.values(name))
            if copy.is_own or (whole and copy.is_settled):
                yield say.PutObject(
                    name=name,
                    meta=copy.meta,
                    generations=tuple(copy.generations),
                    whole=whole,
                    digest=f"{copy.blocks[0][0]}" if whole else "",
                    inline=bytes([copy.blocks[0][0]]) * SMALL.size_bytes if copy.meta == SMALL else None,
                    used=self.used.get(name, ()),
                )
            else:
                parts.append(name)
        for stage in self.stages.values():
            yield say.StageRuns(name=stage.order.name, order=stage.order)
            for child, feed in stage.feeds.items():
                yield say.StageFed(name=feed.name, feed=feed, arrived=len(stage.rows[child + 1]) == BLOCKS)
            stage.reported.clear()
        yield from self.requests.values()
        for name in self.wants:
            if name not in self.copies or name in parts:
                copies = [self.copies[name]] if name in self.copies else []
                yield say.WantObject(name=name, have_bytes=sum(len(part) for copy in copies for part in copy.blocks))
        for name in parts:
            copy = self.copies[name]
            copy.reported.clear()
            for stripe, blocks in enumerate(copy.blocks):
                if len(blocks) == BLOCKS:
                    yield say.StripeArrived(name=name, stripe=stripe, generation=copy.generations[stripe])

    def _end_want(self, name: ObjectName) -> None:
        if name in self.wants:
            self.wants.discard(name)
            self.outbox.append(say.StopWanting(name=name))

    def _copy(self, name: ObjectName, meta: ObjectMeta) -> Copy:
        if name not in self.copies:
            self.copies[name] = Copy(meta, [[] for _ in range(meta.stripes)], [0] * meta.stripes, [""] * meta.stripes)
        return self.copies[name]

    def _feed(self, copy: Copy, stripe: int, generation: int, feeder: str) -> None:
        if generation != copy.generations[stripe] and not copy.is_own:
            copy.blocks[stripe], copy.generations[stripe] = [], generation
        copy.feeders[stripe] = feeder
        copy.reported = {one for one in copy.reported if one[0] != stripe}

    def _feed_stage(self, stage: ModelStage, feed: say.FeedStage) -> None:
        if not feed.splices:
            stage.feeds[feed.child] = feed
            return
        stage.feeds.pop(feed.child, None)
        stripe = stage.order.stripe
        first, at = (first_element(stage.order.meta, stripe, block) for block in (0, len(stage.rows[feed.child + 1])))
        self.outbox.append(say.StageFed(name=feed.name, feed=feed, start=at - first))

    def _run_stage(self, order: say.RunStage) -> None:
        key = order.name, order.stripe, order.slot
        known = self.stages.get(key)
        if known is not None and known.order.attempt == order.attempt:
            known.order = order
            known.feeds = {child: feed for child, feed in known.feeds.items() if child < order.children}
            return
        rows: list[list[int]] = [[] for _ in range(order.children + 1)]
        if order.source is not None:
            rows[0] = [self.copies[order.source].blocks[0][0]] * BLOCKS
        self.stages[key] = ModelStage(order, rows)
        if order.slot < 0:
            copy = self._copy(order.name, order.meta)
            copy.generations[order.stripe], copy.blocks[order.stripe] = order.attempt, []
            copy.feeders[order.stripe], copy.is_settled = "", False


class ObjectWorld:
    """Stores and their directory.

    Args:
        seed: of the order of everything.
        stores: how many.
        links: "chain", "tree" or "star": what reduces are planned as.
    """

    def __init__(self, seed: int, stores: int = 5, links: str = "chain") -> None:
        self.random = random.Random(seed)
        self._links, self._makings = LINKS[links], itertools.count(1 << 40, 1 << 20)  # directories count on from one
        self.directory = Directory(self._links)
        self.stores = {name: ModelStore(name, self._makings) for name in "abcdefghijklmnop"[:stores]}
        self._gone: list[str] = []
        self._cut: set[frozenset[str]] = set()
        self.moves = 0

    # -- what users do -------------------------------------------------------------------------------------------

    def put(self, store: str, name: ObjectName, value: int, *, small: bool = False, whole: bool = True) -> None:
        """A store has an object, or makes it block by block."""
        meta = SMALL if small else META
        whole |= small
        blocks = [value] * BLOCKS if whole else []
        made = next(self._makings)
        self.stores[store].copies[name] = Copy(meta, [blocks], [made], [""], is_own=True, making=value)
        inline = bytes([value]) * SMALL.size_bytes if small else None
        digest = f"{value}" if whole else ""
        self.stores[store].outbox.append(
            say.PutObject(name=name, meta=meta, generations=(made,), whole=whole, digest=digest, inline=inline)
        )

    def want(self, store: str, name: ObjectName) -> None:
        """A store wants an object."""
        self.stores[store].wants.add(name)
        self.stores[store].outbox.append(say.WantObject(name=name))

    def stop_wanting(self, store: str, name: ObjectName) -> None:
        """A store does not want an object any more, and lets go of it if it has not all of it."""
        home = self.stores[store]
        home.wants.discard(name)
        if name not in home.copies or not (home.copies[name].is_own or home.values(name)):
            home.copies.pop(name, None)
            home.outbox.append(say.StopWanting(name=name))

    def abandon(self, store: str, name: ObjectName) -> None:
        """A store lets go of what it has put and not finished."""
        home = self.stores[store]
        del home.copies[name]
        home.wants.discard(name)
        home.outbox.append(say.WithdrawPut(name=name))

    def delete(self, store: str, name: ObjectName) -> None:
        """A store has all let go of an object; until it has heard that they do, it does not put the name again."""
        self.stores[store].deleting.add(name)
        self.stores[store].outbox.append(say.DeleteObject(name=name))

    def reduce(
        self, store: str, name: ObjectName, sources: list[ObjectName], count: int | None = None, **more: object
    ) -> None:
        """A store asks for a sum, which it keeps."""
        op: ReduceOp = "sum"
        wanted = count or len(sources)
        request = say.ReduceObjects(
            name=name,
            sources=tuple(sources),
            op=op,
            count=wanted,
            **({"least": wanted} | more),  # type: ignore[arg-type]
        )
        self.stores[store].wants.add(name)
        self.stores[store].requests[name] = request
        self.stores[store].outbox.append(request)
        self.stores[store].outbox.append(say.WantObject(name=name))

    def kill(self, store: str) -> None:
        """A store is gone; the directory learns it some time later."""
        del self.stores[store]
        self._gone.append(store)

    def cut(self, one: str, other: str) -> None:
        """The link between two stores carries nothing any more."""
        self._cut.add(frozenset((one, other)))

    def restart_directory(self) -> None:
        """The directory is gone with all that it knew, and a part of what it said; another one asks the stores."""
        self.directory = Directory(self._links, first_attempt=next(self._makings))
        self._gone.clear()
        reports: list[tuple[str, FromStore]] = []
        for store in self.stores.values():
            for _ in range(self.random.randint(0, len(store.inbox))):
                store.hear(store.inbox.popleft())
            store.inbox.clear()
            unsent = [message for message in store.outbox if isinstance(message, say.DeleteObject)]
            store.outbox.clear()
            reports += [(store.address, message) for message in [*store.report(), *unsent]]
        self._tell(self.directory.rebuild(reports))

    def mend(self) -> None:
        """All links are well again."""
        self._cut.clear()

    # -- what happens --------------------------------------------------------------------------------------------

    def run(self, most: int = 200_000) -> None:
        """Let things happen in a random order, until nothing can."""
        while self.step():
            self.moves += 1
            assert self.moves < most, "it never comes to rest"

    def step(self) -> bool:
        """Let one thing happen; False if nothing can."""
        can: list[Callable[[], None]] = []
        for store in self.stores.values():
            if store.outbox:
                can.append(partial(self._tell_directory, store))
            if store.inbox:
                can.append(partial(self._tell_store, store))
            can += self._transfers(store)
        if self._gone:
            can.append(self._notice)
        if can:
            self.random.choice(can)()
            self._check()
        return bool(can)

    def _tell(self, told: list[tuple[str, FromDirectory]]) -> None:
        for store, message in told:
            if store in self.stores:
                self.stores[store].inbox.append(message)

    def _tell_directory(self, store: ModelStore) -> None:
        self._tell(self.directory.handle(store.address, store.outbox.popleft()))

    def _tell_store(self, store: ModelStore) -> None:
        store.hear(store.inbox.popleft())

    def _notice(self) -> None:
        self._tell(self.directory.lost(self._gone.pop(0)))

    def _check(self) -> None:
        for entry in self.directory.entries():
            for chains in entry.chains:
                feeders = chains.feeders
                assert not any(store in descendants(store, feeders) for store in feeders), "a circle"

    def _transfers(self, store: ModelStore) -> Iterator[Callable[[], None]]:
        for name, copy in store.copies.items():
            for stripe in range(copy.meta.stripes):
                if copy.is_own and len(copy.blocks[stripe]) < BLOCKS:
                    yield partial(self._make, store, name, copy)
                elif (move := self._read(store, name, copy, stripe)) is not None:
                    yield move
        for stage in store.stages.values():
            yield from self._adds(store, stage)

    def _make(self, store: ModelStore, name: ObjectName, copy: Copy) -> None:
        copy.blocks[0].append(copy.making)
        if len(copy.blocks[0]) == BLOCKS:
            store.outbox.append(say.ObjectWhole(name=name, digest=f"{copy.making}"))

    def _reached(self, store: ModelStore, other: str) -> ModelStore | None:
        return None if frozenset((store.address, other)) in self._cut else self.stores.get(other)

    def _read(self, store: ModelStore, name: ObjectName, copy: Copy, stripe: int) -> Callable[[], None] | None:
        feeder, generation = copy.feeders[stripe], copy.generations[stripe]
        other = self._reached(store, feeder)
        mine = copy.blocks[stripe]
        if not feeder or len(mine) == BLOCKS:
            return None
        if other is None:
            report = stripe, generation, feeder
            if report in copy.reported:
                return None

            def fail() -> None:
                copy.reported.add(report)
                store.outbox.append(say.FeederFailed(name=name, stripe=stripe, generation=generation, feeder=feeder))

            return fail
        theirs = other.copies.get(name)
        if theirs is None or (
            theirs.generations[stripe] != generation and not (theirs.is_taken and other.values(name))
        ):
            return None
        if len(theirs.blocks[stripe]) <= len(mine):
            return None

        def take() -> None:
            mine.append(theirs.blocks[stripe][len(mine)])
            store.taken_in += 1
            if len(mine) == BLOCKS:
                store.outbox.append(say.StripeArrived(name=name, stripe=stripe, generation=generation))

        return take

    def _adds(self, store: ModelStore, stage: ModelStage) -> Iterator[Callable[[], None]]:
        order = stage.order
        if order.slot < 0:
            copy, done = store.copies[order.name], stage.rows[order.children]
            if copy.generations[order.stripe] == order.attempt and len(copy.blocks[order.stripe]) < len(done):
                yield lambda: self._publish(store, stage, copy)
        for child, feed in stage.feeds.items():
            before, row = stage.rows[child], stage.rows[child + 1]
            is_first = child == 0 and order.source is None
            if len(row) == BLOCKS or (len(before) <= len(row) and not is_first):
                continue
            other = store if feed.store == store.address else self._reached(store, feed.store)
            if other is None:
                report = child, feed.store, feed.child_attempt
                if report not in stage.reported:
                    yield partial(self._fail_child, store, stage, feed, report)
                continue
            if feed.source is None:
                theirs = other.stage_values(order.name, order.stripe, feed.child_slot, feed.child_attempt)
            else:
                source = other.copies.get(feed.source)
                theirs = None if source is None else [source.blocks[0][0]] * BLOCKS
            if theirs is not None and len(theirs) > len(row):
                base = 0 if is_first else before[len(row)]
                yield partial(self._add, store, stage, row, theirs, base, child)

    def _add(
        self, store: ModelStore, stage: ModelStage, row: list[int], theirs: list[int], base: int, child: int
    ) -> None:
        row.append(base + theirs[len(row)])
        store.taken_in += 1
        if len(row) == BLOCKS:
            order = stage.order
            store.outbox.append(
                say.ChildArrived(
                    name=order.name, stripe=order.stripe, slot=order.slot, attempt=order.attempt, child=child
                )
            )

    def _fail_child(
        self, store: ModelStore, stage: ModelStage, feed: say.FeedStage, report: tuple[int, str, int]
    ) -> None:
        stage.reported.add(report)
        store.outbox.append(
            say.ChildFailed(
                name=feed.name,
                stripe=feed.stripe,
                slot=feed.slot,
                attempt=feed.attempt,
                child=feed.child,
                store=feed.store,
            )
        )

    def _publish(self, store: ModelStore, stage: ModelStage, copy: Copy) -> None:
        order = stage.order
        mine = copy.blocks[order.stripe]
        mine.append(stage.rows[order.children][len(mine)])
        if len(mine) == BLOCKS:
            store.outbox.append(say.StripeArrived(name=order.name, stripe=order.stripe, generation=order.attempt))


def descendants(store: str, feeders: dict[str, str | None]) -> Iterable[str]:
    """The stores that get what they read from `store`, directly or through others."""
    found = {store}
    while more := {reader for reader, feeder in feeders.items() if feeder in found} - found:
        found |= more
    return found - {store}
