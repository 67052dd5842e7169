"""The stages of reduces that a store runs, as the directory says: which there are, and what feeds them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import PeerError
from offbeat.objects.edge_dtypes import EdgeDtypes, why_no_wire
from offbeat.objects.rounded_part import rounded_part
from offbeat.objects.stage import Stage, range_of
from offbeat.protocol import objects as say
from offbeat.protocol.object_lanes import ReadObject, ReadStage
from offbeat.protocol.objects import ITEM_BYTES
from offbeat.wire.lane import GrowingBuffer, StagingPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from offbeat.objects.stage import Arithmetic
    from offbeat.objects.stored_object import LaneReading, StoredObject
    from offbeat.protocol.objects import FromStore, ObjectName, ReduceOp
    from offbeat.wire.lane import Sink

_MOST_SPARE_BYTES = 256 << 20
_RETRY_S = 1.0  # after which a child that could not be read is asked for again
_log = logging.getLogger("offbeat.objects")


class StageOwner(Protocol):
    """The Protocol of the store around a `StageRunner`."""

    @property
    def objects(self) -> Mapping[ObjectName, StoredObject]:
        """Return the objects that are here."""

    def tell_directory(self, message: FromStore) -> None:
        """Tell the directory."""

    def read(
        self, feeder: str, ask: Callable[[int], ReadObject | ReadStage], sink: Sink, failed: Callable[[str], None]
    ) -> LaneReading:
        """Read from another store."""

    def memory_for(self, order: say.RunStage) -> memoryview:
        """Return the memory in which the root of a sum puts its stripe."""

    def publish(self, order: say.RunStage, buffer: GrowingBuffer) -> None:
        """Let other stores read a stripe as it grows."""

    def retry_readers(self) -> None:
        """Look again for what other stores have asked for."""

    def end_lanes_of(self, buffer: GrowingBuffer, reason: str) -> bool:
        """End the lanes that send from a buffer, for this reason; whether there was one."""


class StageRunner:
    """The stages of one store.

    Args:
        store: that they are of.
        arithmetic: (op, dtype in which it adds) -> what adds.
    """

    def __init__(self, store: StageOwner, arithmetic: Callable[[ReduceOp, str], Arithmetic]) -> None:
        self._store, self._arithmetic, self._pool = store, arithmetic, StagingPool()
        # The first use of fresh memory costs more than adding does.
        self._sums = StagingPool(_MOST_SPARE_BYTES)
        self._stages: dict[tuple[ObjectName, int, int], Stage] = {}
        self._readings: dict[tuple[ObjectName, int, int, int], LaneReading] = {}

    def source_of(self, message: ReadStage) -> GrowingBuffer | str | None:
        """Return the sum of a stage; why there is none; or None if the stage may still begin."""
        stage = self._stages.get((message.name, message.stripe, message.slot))
        if stage is None or stage.order.attempt < message.attempt:
            return None
        return stage.out if stage.order.attempt == message.attempt else f"{message.name} is summed anew"

    def part_of(self, stored: StoredObject, message: ReadObject) -> GrowingBuffer:
        """Return a part of an object that is whole, in the dtype in which it is to be sent.

        Raises:
            PeerError: if its elements cannot be sent so.
        """
        part, dtype = stored.memory[message.begin : message.end], stored.meta.dtype
        if message.wire in ("", dtype):
            return GrowingBuffer(part, None, message.generation)
        if (why := why_no_wire(dtype, message.wire)) or (message.begin | message.end) % stored.meta.item_bytes:
            raise PeerError(f"Cannot send a part of {message.name}, {stored.meta}: {why or 'an element is cut'}.")
        return rounded_part(part, dtype, message.wire, self._arithmetic("sum", dtype), message.generation)

    def add_small(self, message: say.ReduceSmall) -> bytes:
        """Return the bytes of a sum of parts that have come in a message."""
        dtype, size = message.meta.dtype, message.meta.size_bytes
        if not size:
            return b""
        total_dtype = EdgeDtypes.of(dtype, message.op).total
        arithmetic = self._arithmetic(message.op, total_dtype)
        own, total = memoryview(b""), memoryview(bytearray(message.meta.numel * ITEM_BYTES[total_dtype]))
        for part in message.parts:
            arithmetic.add(total, own, bytearray(part), total_dtype, dtype)
            own = total
        if message.op == "mean":
            arithmetic.divide(total, len(message.parts))
        made = memoryview(bytearray(size))
        arithmetic.convert(made, total, total_dtype, dtype)
        return bytes(made)

    def reports(self, belongs: Callable[[ObjectName], bool]) -> Iterator[FromStore]:
        """Say to a directory that begins anew which stages run, and what feeds them."""
        for stage in self._stages.values():
            order = stage.order
            if belongs(order.name):
                yield say.StageRuns(name=order.name, order=order)
                for child, feed in stage.feeds.items():
                    if child < order.children:
                        yield say.StageFed(name=order.name, feed=feed, arrived=child in stage.arrived)
                yield from (_failure(stage.feeds[child]) for child in stage.failed)

    def end(self, message: say.EndStage) -> None:
        """A stage is not needed any more."""
        stage = self._stages.get((message.name, message.stripe, message.slot))
        if stage is not None and stage.order.attempt <= message.attempt:
            self._end_stage(stage)

    def run(self, order: say.RunStage) -> None:
        key = order.name, order.stripe, order.slot
        known = self._stages.get(key)
        if known is not None and known.order.attempt == order.attempt:
            for child in range(order.children, known.order.children):
                self._stop_child(known, child)
            known.close(order)
            return
        if known is not None:
            self._end_stage(known)
        own = None
        if order.source is not None:
            source = self._store.objects.get(order.source)
            if source is None or not source.is_whole:
                _log.warning("Cannot add %s to %s: it is not here any more.", order.source, order.name)
                return
            begin, end = range_of(order)
            own = GrowingBuffer(source.memory[begin:end])
        dtypes = EdgeDtypes.of(order.meta.dtype, order.op, order.wire)
        target = self._store.memory_for(order) if order.slot < 0 else None
        arithmetic = self._arithmetic(order.op, dtypes.total)
        stage = Stage(order, own, target, arithmetic, blocks=self._pool, sums=self._sums)
        if target is not None:
            self._store.publish(order, stage.out)
            self._when_whole(stage.out, lambda: self._root_whole(order))
        self._stages[key] = stage
        self._store.retry_readers()

    def _root_whole(self, order: say.RunStage) -> None:
        self._store.tell_directory(say.StripeArrived(name=order.name, stripe=order.stripe, generation=order.attempt))

    def _when_whole(self, buffer: GrowingBuffer, told: Callable[[], None]) -> None:
        def look() -> None:
            if buffer.is_whole:
                told()

        if buffer.is_whole:
            told()
        else:
            buffer.follow(look)

    def feed(self, feed: say.FeedStage) -> None:
        stage = self._stages.get((feed.name, feed.stripe, feed.slot))
        if stage is None or stage.order.attempt != feed.attempt:
            return
        self._stop_child(stage, feed.child)
        stage.feeds[feed.child] = feed
        stage.failed.discard(feed.child)
        if feed.splices:
            start = stage.stop_adding(feed.child)
            self._store.tell_directory(say.StageFed(name=feed.name, feed=feed, start=start))
            return

        def arrived() -> None:
            self._readings.pop(key, None)
            stage.arrived.add(feed.child)
            self._store.tell_directory(
                say.ChildArrived(
                    name=feed.name, stripe=feed.stripe, slot=feed.slot, attempt=feed.attempt, child=feed.child
                )
            )

        def failed(why: str) -> None:
            _log.info("Cannot add what the store at %s sends for %s: %s", feed.store, feed.name, why)
            self._readings.pop(key, None)
            stage.failed.add(feed.child)
            self._store.tell_directory(_failure(feed))
            asyncio.get_running_loop().call_later(_RETRY_S, self._try_again, stage, feed)

        key = feed.name, feed.stripe, feed.slot, feed.child
        sink, start = stage.sink(feed.child, arrived)
        begin, end = range_of(stage.order)
        before, until = stage.before(feed.child), stage.allowed(feed.child)

        def ask(lane: int) -> ReadObject | ReadStage:
            if feed.source is None:
                return ReadStage(
                    lane=lane,
                    name=feed.name,
                    stripe=feed.stripe,
                    slot=feed.child_slot,
                    attempt=feed.child_attempt,
                    start=start,
                    until=until,
                )
            return ReadObject(
                lane=lane,
                name=feed.source,
                stripe=0,
                generation=0,
                begin=begin,
                end=end,
                start=start,
                until=until,
                wire=stage.order.wire,
            )

        reading = self._readings[key] = self._store.read(feed.store, ask, Regenerated(sink, feed), failed)
        if before is not None and not before.is_whole:
            before.follow(lambda: reading.link.allow(reading.lane, stage.allowed(feed.child)))

    def _try_again(self, stage: Stage, feed: say.FeedStage) -> None:
        """Remind the directory of a child that nobody sends: perhaps a link that could not be made can be now."""
        runs = self._stages.get((feed.name, feed.stripe, feed.slot)) is stage
        if (
            runs
            and feed.child in stage.failed
            and stage.feeds[feed.child] is feed
            and feed.child < stage.order.children
        ):
            self._store.tell_directory(_failure(feed, again=True))
            asyncio.get_running_loop().call_later(_RETRY_S, self._try_again, stage, feed)

    def _stop_child(self, stage: Stage, child: int) -> None:
        order = stage.order
        reading = self._readings.pop((order.name, order.stripe, order.slot, child), None)
        if reading is not None:
            reading.stop()

    def _end_stage(self, stage: Stage) -> None:
        order = stage.order
        for child in range(order.children):
            self._stop_child(stage, child)
        stage.end()
        self._stages.pop((order.name, order.stripe, order.slot), None)
        is_sent = order.slot >= 0 and self._store.end_lanes_of(stage.out, f"{order.name} is done")
        stage.free(is_sent=is_sent)


def _failure(feed: say.FeedStage, *, again: bool = False) -> say.ChildFailed:
    return say.ChildFailed(
        name=feed.name,
        stripe=feed.stripe,
        slot=feed.slot,
        attempt=feed.attempt,
        child=feed.child,
        store=feed.store,
        again=again,
    )


class Regenerated:
    """A stage's sink for what comes under another generation: that of the child's attempt, or 0 of a whole source."""

    def __init__(self, sink: Sink, feed: say.FeedStage) -> None:
        self._sink = sink
        self.generation = feed.child_attempt if feed.source is None else 0

    @property
    def is_whole(self) -> bool:
        return self._sink.is_whole

    def destination(self, offset: int, size: int) -> memoryview:
        return self._sink.destination(offset, size)

    def received(self, offset: int, body: memoryview) -> None:
        self._sink.received(offset, body)
