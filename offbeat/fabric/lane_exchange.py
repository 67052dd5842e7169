"""One exchange over lanes: a rank's part of an algorithm, on the memory of one vector. A `Pending`, but for its result.

Everything happens on the event loop of the mesh; whoever waits is told through an event. The memory is in use until the
last byte that leaves it has arrived.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from offbeat.pending import Completion
from offbeat.wire.lane import AddingSink, CopyingSink, GrowingBuffer, LaneKey, OutgoingLane
from offbeat.wire.mesh import MeshExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.collective.rank_part import Incoming, Outgoing, RankPart
    from offbeat.errors import OffbeatError
    from offbeat.wire.lane import Sink, StagingPool
    from offbeat.wire.mesh import MeshChannel


class Owed(NamedTuple):
    """A transfer that an exchange waits for: of which chunk how much came from whom, and when the last of it did."""

    chunk: int
    rank: int
    have_bytes: int
    size_bytes: int
    silent_s: float


class _HeldLanes:
    """Lanes that wait until what is many steps earlier has arrived.

    Args:
        most_ahead: how many steps; None for no limit.
        steps: of all lanes.
    """

    def __init__(self, most_ahead: int | None, steps: list[int]) -> None:
        self._most_ahead = most_ahead
        self._under_way = Counter(steps)
        self._steps = deque(sorted(self._under_way))  # from the first that has something under way on
        self._held: list[tuple[int, int, int, OutgoingLane]] = []  # a heap: step, number of the lane, rank

    def hold(self, step: int, rank: int, lane: OutgoingLane) -> bool:
        """Keep a lane, if it has to wait."""
        if self._most_ahead is None or step < self._steps[0] + self._most_ahead:
            return False
        heapq.heappush(self._held, (step, len(self._held), rank, lane))
        return True

    def sent(self, step: int) -> list[tuple[int, OutgoingLane]]:
        """Note that a lane of this step has arrived; returns those that need not wait any longer."""
        self._under_way[step] -= 1
        if self._under_way[step] or step != self._steps[0]:
            return []
        while self._steps and not self._under_way[self._steps[0]]:
            self._steps.popleft()
        if not self._held:
            return []
        end, released = self._steps[0] + (self._most_ahead or 0), []
        while self._held and self._held[0][0] < end:
            _, _, rank, lane = heapq.heappop(self._held)
            released.append((rank, lane))
        return released


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
        self._completion = Completion()
        self._left = 0
        self._held = _HeldLanes(None, [])
        self._sinks: dict[tuple[int, int], CopyingSink | AddingSink] = {}
        self._last: dict[int, GrowingBuffer] = {}
        self._began_s = 0.0
        self.sent_bytes = sum(len(places[one.op.chunk]) for one in part.outgoing)

    def begin(self) -> None:
        """Begin it, on the event loop."""
        self._began_s = time.monotonic()
        versions = self._versions()
        sinks: dict[tuple[int, int], Sink] = dict(self._sinks)
        outgoing = [one for one in self._part.outgoing if len(self._places[one.op.chunk])]
        self._left = len(outgoing) + len(sinks) + 1
        self._held = _HeldLanes(self._part.most_ahead, [one.op.step for one in outgoing])
        lanes = [(one.op.step, one.op.destination, self._lane(one, versions)) for one in outgoing]
        first = [(rank, lane) for step, rank, lane in lanes if not self._held.hold(step, rank, lane)]
        later = frozenset(rank for _, rank, _ in lanes)
        self._channel.begin(self.number, MeshExchange(self._terms, sinks, first, self._fail, later))
        self._one_less()

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it is over.

        Raises:
            OffbeatError: that it failed with.
        """
        is_over = self._completion.wait(timeout)
        if self._completion.error is not None:
            raise self._completion.error
        return is_over

    def done(self) -> bool:
        """Whether it is over."""
        return self._completion.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have something called when it is over, well or not: on the event loop, or at once."""
        self._completion.add_done_callback(callback)

    def owed(self) -> list[Owed]:
        """List the transfers that have not come, on any thread; those that miss most come first."""
        incoming = {(one.op.source, one.number): one for one in self._part.incoming}
        found = []
        for key, sink in list(self._sinks.items()):
            op = incoming[key].op
            size = len(self._places[op.chunk])
            if sink.have_bytes < size:
                silent_s = time.monotonic() - (sink.came_s or self._began_s)
                found.append(Owed(op.chunk, op.source, sink.have_bytes, size, silent_s))
        return sorted(found, key=lambda one: one.have_bytes - one.size_bytes)

    def _lane(self, one: Outgoing, versions: dict[int, list[GrowingBuffer]]) -> OutgoingLane:
        key = LaneKey(self._channel.number, self.number, one.number)
        source, priority = versions[one.op.chunk][one.version], (self.number, one.op.step)
        return OutgoingLane(key, source, priority, sent=lambda: self._sent(one.op.step))

    def _sent(self, step: int) -> None:
        for rank, lane in self._held.sent(step):
            self._channel.send(self.number, rank, lane)
        self._one_less()

    def _versions(self) -> dict[int, list[GrowingBuffer]]:
        """Make the versions of each chunk, one after the other, with the sinks that make each of the one before."""
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
            self._completion.end()

    def _fail(self, error: OffbeatError) -> None:
        self._completion.end(error)
