"""A lane: memory that grows at one end of a link, and at the other is copied or added as it comes.

    sending                                             receiving
    GrowingBuffer -> OutgoingLane -> LaneScheduler ...  -> CopyingSink -> GrowingBuffer -> the next lane
                                                           AddingSink  -> GrowingBuffer

A `GrowingBuffer` is valid from its start up to its `progress`. A lane sends it in blocks, each as soon as it is there,
so that a chunk that goes over several machines is on all links of its way at once, and what is summed up is spread
while the rest is still being summed up. All lanes to a peer share a window, and those whose turn comes first go first.

A lane may begin in the middle, where another one has ended (`start`). It may wait for the receiver to allow more
(`LaneScheduler.allow`), and may be withdrawn (`cancel`). What is made anew is another buffer of a later generation,
over the same memory or not, and goes on lanes of its own.

What is added is added element by element in a declared order: own + first child + second child, whoever came first.

Nothing is copied on its way. A block that was received twice, after a connection broke, is thrown away by the session,
so memory may be overwritten by what can only come because the block had arrived (`LaneScheduler` says when else).

All of it happens on one event loop; nothing here loads torch.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec

from offbeat.errors import PeerError
from offbeat.topology import MAX_RATE_MBPS, Topology
from offbeat.wire.messages import Number

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.wire.link import PeerLink

BLOCK_BYTES = 128 << 10
"""Before anything is known of the link."""
WINDOW_BYTES = 8 * BLOCK_BYTES
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 32 << 10, 512 << 10
_BLOCK_S, _WINDOW_S = 0.004, 0.06
_UNSENT_S = 0.008  # what is sent later, such as word of what has arrived, waits no longer in the kernel
_MEASURED_S, _WEIGHT = 0.02, 0.25
MAX_CHANNELS = 64
"""More users of one mesh are a mistake, or a peer that would have this process remember what it makes up."""
ChannelNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHANNELS)]
# Less than this is copied, so that its memory is free at once and nobody waits for word that it has arrived.
_COPIED_BYTES = 32 << 10


def block_bytes_for(rate_bytes_per_s: float) -> int:
    """The size of blocks for a link that carries so much.

    >>> block_bytes_for(6e6), block_bytes_for(1e9)
    (32768, 524288)
    """
    block = int(rate_bytes_per_s * _BLOCK_S)
    return min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, 1 << block.bit_length()))


def blocks_on(network: Topology) -> int:
    """The size of blocks in which sums along any paths travel on a network: what suits its slowest link.

    >>> blocks_on(Topology.star(["a", "b", "c"], rate_mbps=100))
    32768
    """
    slowest_mbps = min((arc.rate_mbps for arc in network.arcs if arc.rate_mbps is not None), default=MAX_RATE_MBPS)
    # Through one switch a host's link is shared by what goes to and comes from all others.
    shares = max(1, len(network.hosts) - 1) if network.is_fan else 1
    return block_bytes_for(slowest_mbps * 1e6 / 8 / shares)


class LaneKey(NamedTuple):
    """The name of a lane between two peers.

    Args:
        channel: who uses it; channels know nothing of each other.
        exchange: the number of the exchange on that channel.
        op: which lane of the exchange.
        generation: of the memory at its source; what was sent of an earlier one is thrown away.
    """

    channel: int
    exchange: int
    op: int
    generation: int = 0


class GrowingBuffer:
    """Memory that is valid from its start up to `progress` bytes.

    Args:
        memory: contiguous bytes.
        progress: how many of them are valid; all if None.
        generation: of what is in it.
    """

    __slots__ = ("_followers", "generation", "memory", "progress")

    def __init__(self, memory: memoryview, progress: int | None = None, generation: int = 0) -> None:
        self.memory, self.generation = memory, generation
        self.progress = len(memory) if progress is None else progress
        self._followers: list[Callable[[], None]] = []

    @property
    def is_whole(self) -> bool:
        """Whether all of it is valid."""
        return self.progress == len(self.memory)

    def follow(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called whenever more is valid, until all is; returns what ends that before."""
        if not self.is_whole:
            self._followers.append(wake)

        def end() -> None:
            if wake in self._followers:
                self._followers.remove(wake)

        return end

    def grow(self, progress: int) -> None:
        """Say that so many bytes are valid now; fewer than before change nothing."""
        if progress > self.progress:
            self.progress = progress
            followers = list(self._followers)
            if self.is_whole:
                self._followers.clear()
            for wake in followers:
                wake()


class OutgoingLane:
    """The sending end.

    Args:
        key: its name.
        source: what is sent.
        priority: who goes first of those that may: the least, and of equal ones that of which least has been sent.
        start: bytes that the other end has already.
        until: bytes up to which the other end takes it in; None for all. A block is not cut there, but waits.
        most_bytes: of a block; None for as many as suit the link.
        sent: called once, when all of it has arrived, or its memory is free for other reasons.
    """

    __slots__ = (
        "at",
        "end_following",
        "is_cancelled",
        "is_queued",
        "key",
        "most_bytes",
        "priority",
        "sent",
        "source",
        "unacknowledged",
        "until",
    )

    def __init__(
        self,
        key: LaneKey,
        source: GrowingBuffer,
        priority: tuple[int, ...],
        *,
        start: int = 0,
        until: int | None = None,
        most_bytes: int | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        self.key, self.source, self.priority, self.at, self.sent = key, source, priority, start, sent
        self.until = len(source.memory) if until is None else until
        self.most_bytes = most_bytes
        self.unacknowledged = 0
        self.is_queued = self.is_cancelled = False
        self.end_following: Callable[[], None] = lambda: None

    def next_size(self, block_bytes: int) -> int:
        """The bytes of the next block; 0 if it is not there yet, or the other end does not take it in yet."""
        block_bytes = block_bytes if self.most_bytes is None else min(block_bytes, self.most_bytes)
        end = min(len(self.source.memory), (self.at // block_bytes + 1) * block_bytes)
        return end - self.at if min(self.source.progress, self.until) >= end and not self.is_cancelled else 0

    @property
    def most_blocks(self) -> int:
        """The blocks in which it goes, if the link is slow from its first to its last."""
        least_bytes = _LEAST_BLOCK_BYTES if self.most_bytes is None else min(_LEAST_BLOCK_BYTES, self.most_bytes)
        return -(-len(self.source.memory) // least_bytes)

    @property
    def is_over(self) -> bool:
        """Whether the last block is on its way, or no other one will be."""
        return self.is_cancelled or self.at == len(self.source.memory)


class RateEstimate:
    """An estimate of how fast a link carries what it is given, from when bytes arrive.

    Only times count in which it had enough to do.

    Attributes:
        bytes_per_s: 0 before anything is known.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._began_s, self._bytes = 0.0, 0

    def began(self, now_s: float) -> None:
        """The link has something to do, and had not before."""
        self._began_s, self._bytes = now_s, 0

    def arrived(self, size: int, now_s: float) -> None:
        """Note that so many bytes have arrived."""
        self._bytes += size
        passed_s = now_s - self._began_s
        if passed_s >= _MEASURED_S:
            rate = self._bytes / passed_s
            self.bytes_per_s += (rate - self.bytes_per_s) * (_WEIGHT if self.bytes_per_s else 1.0)
            self.began(now_s)


class BusyTime:
    """The bytes that a process sends over all its links, and the time in which any of them had something to do."""

    def __init__(self) -> None:
        self._busy, self._since_s, self._total_s = 0, 0.0, 0.0
        self.sent_bytes = 0

    def began(self, now_s: float) -> None:
        """One more link has something to do."""
        if not self._busy:
            self._since_s = now_s
        self._busy += 1

    def ended(self, now_s: float) -> None:
        """One link less has."""
        self._busy -= 1
        if not self._busy:
            self._total_s += now_s - self._since_s

    def busy_s(self, now_s: float) -> float:
        """Seconds in which any had, so far; on any thread, where it may be off by a moment."""
        return self._total_s + (now_s - self._since_s if self._busy else 0.0)


class LaneScheduler:
    """All lanes to one peer: which block goes next. It keeps at most a window on its way, so that a lane whose turn is
    first has to wait for no more than that.

    On a slow link blocks are small, so that who passes them on need not wait long for the first, and so is the window.

    `OutgoingLane.sent` is called when the other side has received the last byte. Where causality says so earlier (a
    result comes back that what was sent is in) nobody has to wait for it.

    Args:
        link: to the peer.
        clock_s: the time, in seconds.
        busy: notes what all links do.
    """

    def __init__(
        self, link: PeerLink, clock_s: Callable[[], float] = time.monotonic, busy: BusyTime | None = None
    ) -> None:
        self._link, self._clock_s, self._busy = link, clock_s, busy or BusyTime()
        self._ready: list[tuple[tuple[int, ...], int, int, OutgoingLane]] = []
        self._added = self._on_way_bytes = 0
        self._block_bytes, self._window_bytes = BLOCK_BYTES, WINDOW_BYTES
        self.rate = RateEstimate()
        self.sent_bytes = 0

    @property
    def arrived_bytes(self) -> int:
        """Return the bytes that have arrived at the other side."""
        return self.sent_bytes - self._on_way_bytes

    @property
    def is_full(self) -> bool:
        """Whether there is more to send than the link takes."""
        return bool(self._ready)

    def add(self, lane: OutgoingLane) -> None:
        """Send a lane, from now on."""
        if lane.is_over:
            lane.sent()
            return
        lane.end_following = lane.source.follow(lambda: self._wake(lane))
        self._wake(lane)

    def allow(self, lane: OutgoingLane, until: int) -> None:
        """The other end takes a lane in up to so many bytes from its start; fewer than before change nothing."""
        if until > lane.until:
            lane.until = until
            self._wake(lane)

    def cancel(self, lane: OutgoingLane) -> None:
        """Send no more blocks of a lane. It is `sent` once those on their way have arrived: then its memory is free."""
        if not lane.is_over:
            lane.is_cancelled = True
            lane.end_following()
            if not lane.unacknowledged:
                lane.sent()

    def _wake(self, lane: OutgoingLane) -> None:
        if self._queue(lane):
            self._pump()

    def _queue(self, lane: OutgoingLane) -> bool:
        """Have a lane sent from, if it has a block that is not queued yet."""
        if lane.is_queued or lane.is_over or not lane.next_size(self._block_bytes):
            return False
        lane.is_queued = True
        self._added += 1
        heapq.heappush(self._ready, (lane.priority, lane.at, self._added, lane))
        return True

    def _pump(self) -> None:
        while self._ready and self._on_way_bytes < self._window_bytes and self._link.is_open:
            *_, lane = heapq.heappop(self._ready)
            lane.is_queued = False
            if size := lane.next_size(self._block_bytes):  # of blocks that have grown, the last may not be there yet
                self._send(lane, size)
                self._queue(lane)

    def _send(self, lane: OutgoingLane, size: int) -> None:
        assert lane.key.generation == lane.source.generation, "a lane carries one generation"
        begin, lane.at = lane.at, lane.at + size
        body = lane.source.memory[begin : lane.at]
        is_copied = len(lane.source.memory) <= _COPIED_BYTES
        if not self._on_way_bytes:
            now_s = self._clock_s()
            self.rate.began(now_s)
            self._busy.began(now_s)
        self._on_way_bytes += size
        self.sent_bytes += size
        lane.unacknowledged += not is_copied

        def arrived() -> None:
            self._on_way_bytes -= size
            now_s = self._clock_s()
            self.rate.arrived(size, now_s)
            self._busy.sent_bytes += size
            if not self._on_way_bytes:
                self._busy.ended(now_s)
            self._suit_rate()
            if not is_copied:
                lane.unacknowledged -= 1
                if lane.is_over and not lane.unacknowledged:
                    lane.sent()
            self._pump()

        self._link.send(block_metadata(lane.key, begin), bytes(body) if is_copied else body, arrived, urgent=True)
        if is_copied and lane.is_over:
            lane.sent()

    def _suit_rate(self) -> None:
        """Choose block and window by what the link carries."""
        if self.rate.bytes_per_s:
            self._block_bytes = block_bytes_for(self.rate.bytes_per_s)
            self._window_bytes = max(4 * self._block_bytes, int(self.rate.bytes_per_s * _WINDOW_S))
            self._link.limit_unsent(max(_LEAST_BLOCK_BYTES, int(self.rate.bytes_per_s * _UNSENT_S)))


class Sink(Protocol):
    """The receiving end of a lane. 1) `destination`, 2) `received` for each block, in their order."""

    generation: int

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""

    def destination(self, offset: int, size: int) -> memoryview:
        """Memory for a block.

        Raises:
            PeerError: if it is not the next one.
        """

    def received(self, offset: int, body: memoryview) -> None:
        """The block is there."""


class CopyingSink:
    """Received bytes are what grows.

    Args:
        target: where they belong.
        done: called when it is whole.
        start: the bytes that are there already.
    """

    def __init__(self, target: GrowingBuffer, done: Callable[[], None] = lambda: None, *, start: int = 0) -> None:
        self._target, self._done, self._end = target, done, start
        self.generation = target.generation
        self.have_bytes, self.came_s = start, 0.0

    @property
    def is_whole(self) -> bool:
        return self.have_bytes == len(self._target.memory)

    def destination(self, offset: int, size: int) -> memoryview:
        self._end = _check_next(offset, size, self._end, len(self._target.memory))
        return self._target.memory[offset : offset + size]

    def received(self, offset: int, body: memoryview) -> None:
        self.have_bytes, self.came_s = offset + len(body), time.monotonic()
        self._target.grow(self.have_bytes)
        if self._target.is_whole:
            self._done()


class StagingPool:
    """Memory for blocks that wait to be added; given back, it is used again.

    Args:
        most_bytes: that are kept for later.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._spare: dict[int, list[bytearray]] = {}
        self._most_bytes, self._spare_bytes = most_bytes, 0

    def take(self, size: int) -> bytearray:
        spare = self._spare.get(size)
        if spare:
            self._spare_bytes -= size
            return spare.pop()
        return bytearray(size)

    def give(self, block: bytearray) -> None:
        if self._spare_bytes + len(block) <= self._most_bytes:
            self._spare_bytes += len(block)
            self._spare.setdefault(len(block), []).append(block)


class AddingSink:
    """Received elements are added to what is there: out = own + received, as far as both have come.

    Args:
        own: what is there.
        out: where the sum belongs; it may be the memory of `own`.
        add: adds: (out, own, received), all of the same elements.
        pool: of memory for blocks.
        done: called when all is added.
        start: the received bytes that are added already, as far as `out` goes.
        item_bytes: of an element in `own`, received, and in `out`; 0 of `own` if there is none.

    Attributes:
        end: to be called where the sum is given up before it is whole.
    """

    def __init__(
        self,
        own: GrowingBuffer,
        out: GrowingBuffer,
        add: Callable[[memoryview, memoryview, bytearray], None],
        pool: StagingPool,
        done: Callable[[], None] = lambda: None,
        *,
        start: int = 0,
        item_bytes: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        self._own, self._out, self._add, self._pool, self._done = own, out, add, pool, done
        self._item_bytes = item_bytes
        self._size = len(out.memory) // item_bytes[2] * item_bytes[1]
        self._staged: deque[tuple[int, bytearray]] = deque()
        self._coming: bytearray = bytearray()
        self._end = start
        self.generation = out.generation
        self.have_bytes, self.came_s = start, 0.0
        self.end = own.follow(self._go_on)

    @property
    def is_whole(self) -> bool:
        return self.have_bytes == self._size

    def destination(self, offset: int, size: int) -> memoryview:
        self._end = _check_next(offset, size, self._end, self._size)
        if size % self._item_bytes[1]:
            raise PeerError(f"Cannot add {size} bytes of elements of {self._item_bytes[1]}: one of them is cut.")
        self._coming = self._pool.take(size)
        return memoryview(self._coming)

    def received(self, offset: int, body: memoryview) -> None:
        self.have_bytes, self.came_s = offset + len(body), time.monotonic()
        self._staged.append((offset, self._coming))
        self._go_on()

    def _go_on(self) -> None:
        of_own, of_received, of_out = self._item_bytes
        while self._staged:
            offset, block = self._staged[0]
            begin, end = offset // of_received, (offset + len(block)) // of_received
            if self._own.progress < end * of_own:
                return
            self._staged.popleft()
            own = self._own.memory[begin * of_own : end * of_own]
            self._add(self._out.memory[begin * of_out : end * of_out], own, block)
            self._pool.give(block)
            self._out.grow(end * of_out)
            if self._out.is_whole:
                self._done()


def _check_next(offset: int, size: int, end: int, whole: int) -> int:
    if offset != end or not 0 < size <= whole - offset:
        raise PeerError(
            f"Cannot take in bytes {offset} to {offset + size} of a lane of {whole} bytes: {end} is where it goes on."
        )
    return offset + size


class LaneBlock(msgspec.Struct, array_like=True, frozen=True, tag="block", forbid_unknown_fields=True):
    """The metadata of a block's frame: its lane, and where it belongs."""

    channel: ChannelNumber
    exchange: Number
    op: Number
    generation: Number
    offset: Number


_encoder = msgspec.msgpack.Encoder()


def block_metadata(key: LaneKey, offset: int) -> bytes:
    """The metadata of a block's frame."""
    return _encoder.encode(LaneBlock(*key, offset))
