"""One exchange over lanes: a rank's part of an algorithm, on the memory of one vector. A `Pending`, but for its result.

Everything happens on the event loop of the mesh; whoever waits is told through an event. The memory is in use until the
last byte that leaves it has arrived.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from offbeat.wire.lane import AddingSink, CopyingSink, GrowingBuffer, LaneKey, OutgoingLane
from offbeat.wire.mesh import MeshExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.collective.rank_part import Incoming, RankPart
    from offbeat.errors import OffbeatError
    from offbeat.wire.lane import Sink, StagingPool
    from offbeat.wire.mesh import MeshChannel


class Owed(NamedTuple):
    """What an exchange waits for most: of which chunk how much of it came from whom, and when the last of it did."""

    chunk: int
    rank: int
    have_bytes: int
    size_bytes: int
    silent_s: float


class LaneExchange:
    """A rank's part of one exchange.

    Args:
        channel: that carries it.
        number: of the exchange on that channel.
        part: what this rank does.
        terms: what it is, for the others to compare.
        places: the memory of each chunk.
        add: adds what came: (out, own, received).
        pool: of memory for what came.
    """

    def __init__(
        self,
        channel: MeshChannel,
        number: int,
        part: RankPart,
        terms: str,
        places: Sequence[memoryview],
        add: Callable[[memoryview, memoryview, bytearray], None],
        pool: StagingPool,
    ) -> None:
        self._channel, self.number, self._part, self._terms = channel, number, part, terms
        self._places, self._add, self._pool = places, add, pool
        self._over = threading.Event()
        self._error: OffbeatError | None = None
        self._left = 0
        self._sinks: dict[tuple[int, int], CopyingSink | AddingSink] = {}
        self._last: dict[int, GrowingBuffer] = {}
        self._began_s = 0.0
        self.sent_bytes = sum(len(places[one.op.chunk]) for one in part.outgoing)

    def begin(self) -> None:
        """Begin it, on the event loop."""
        self._began_s = time.monotonic()
        versions = self._versions()
        sinks: dict[tuple[int, int], Sink] = dict(self._sinks)
        lanes = [
            (
                one.op.destination,
                OutgoingLane(
                    LaneKey(self._channel.number, self.number, one.number),
                    versions[one.op.chunk][one.version],
                    (self.number, one.op.step, one.number),
                    sent=self._one_less,
                ),
            )
            for one in self._part.outgoing
            if len(self._places[one.op.chunk])
        ]
        self._left = len(lanes) + len(sinks) + 1
        self._channel.begin(self.number, MeshExchange(self._terms, sinks, lanes, self._fail))
        self._one_less()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it is over.

        Raises:
            OffbeatError: that it failed with.
        """
        if not self._over.wait(timeout.total_seconds()):
            return False
        if self._error is not None:
            raise self._error
        return True

    def done(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()

    def owed(self) -> list[Owed]:
        """What has not come yet, on any thread; what is missing most comes first."""
        incoming = {(one.op.source, one.number): one for one in self._part.incoming}
        found = []
        for key, sink in list(self._sinks.items()):
            op = incoming[key].op
            size = len(self._places[op.chunk])
            if sink.have_bytes < size:
                silent_s = time.monotonic() - (sink.came_s or self._began_s)
                found.append(Owed(op.chunk, op.source, sink.have_bytes, size, silent_s))
        return sorted(found, key=lambda one: one.have_bytes - one.size_bytes)

    def _versions(self) -> dict[int, list[GrowingBuffer]]:
        """What this rank has of each chunk, one after the other, with the sinks that make each of the one before."""
        found = {}
        incoming: dict[int, list[Incoming]] = {}
        for one in self._part.incoming:
            incoming.setdefault(one.op.chunk, []).append(one)
        holds = {one.op.chunk for one in self._part.outgoing} | incoming.keys()
        for chunk in holds:
            place = self._places[chunk]
            buffers = [GrowingBuffer(place)]
            for one in incoming.get(chunk, ()) if place else ():
                buffers.append(self._receive(one, buffers[-1]))
            found[chunk] = buffers if place else [buffers[0]] * (1 + self._part.versions.get(chunk, 0))
            self._last[chunk] = buffers[-1]
        return found

    def _receive(self, one: Incoming, before: GrowingBuffer) -> GrowingBuffer:
        memory = memoryview(bytearray(len(before.memory))) if one.needs_memory else before.memory
        after = GrowingBuffer(memory, 0)
        sink: CopyingSink | AddingSink
        if one.op.kind == "copy":
            sink = CopyingSink(after, self._one_less)
        else:
            sink = AddingSink(before, after, self._add, self._pool, self._one_less)
        self._sinks[one.op.source, one.number] = sink
        return after

    def _one_less(self) -> None:
        self._left -= 1
        if self._left == 0:
            for chunk, buffer in self._last.items():
                if buffer.memory is not self._places[chunk]:
                    self._places[chunk][:] = buffer.memory
            self._channel.end(self.number)
            self._over.set()

    def _fail(self, error: OffbeatError) -> None:
        if not self._over.is_set():
            self._error = error
            self._over.set()
