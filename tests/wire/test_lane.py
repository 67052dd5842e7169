"""Lanes over a link that exists in memory alone: what goes when, and what takes it in."""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING

import msgspec
import pytest

from offbeat.errors import PeerError
from offbeat.wire.lane import (
    BLOCK_BYTES,
    AddingSink,
    CopyingSink,
    GrowingBuffer,
    LaneBlock,
    LaneKey,
    LaneScheduler,
    OutgoingLane,
    StagingPool,
)
from offbeat.wire.lane_inbox import LaneInbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.wire.lane import Sink

KEY = LaneKey(0, 0, 0)
SIZE = 5 * BLOCK_BYTES + 100
BYTES = bytes(number * 7 % 251 for number in range(SIZE))


class FakeLink:
    """What was sent, and who is to be told when it arrives."""

    is_open = True

    def __init__(self) -> None:
        self.sent: list[tuple[LaneBlock, bytes]] = []
        self._arrive: list[Callable[[], None]] = []

    def send(self, metadata: bytes, body: bytes, arrived: Callable[[], None], *, urgent: bool) -> None:
        self.sent.append((msgspec.msgpack.decode(metadata, type=LaneBlock), bytes(body)))
        self._arrive.append(arrived)

    def limit_unsent(self, size: int) -> None:
        """No kernel is here."""

    def deliver(self, inbox: LaneInbox | None = None) -> None:
        """All that was sent arrives, and what is sent for it."""
        while self._arrive:
            for block, body in self.sent[-len(self._arrive) :]:
                if inbox is None:
                    break
                place = inbox.destination(block, len(body))
                place[:] = body
                inbox.received(place)
            arrive, self._arrive = self._arrive, []
            for arrived in arrive:
                arrived()

    @property
    def offsets(self) -> list[int]:
        return [block.offset for block, _ in self.sent]


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def lanes(link: FakeLink) -> LaneScheduler:
    return LaneScheduler(link)  # type: ignore[arg-type]


def whole() -> GrowingBuffer:
    return GrowingBuffer(memoryview(bytearray(BYTES)))


def to(sink: Sink) -> LaneInbox:
    return LaneInbox(lambda _: sink)


class TestBeginInTheMiddle:
    """A reader that has a part already goes on where it is."""

    def test_of_a_copy(self, link: FakeLink, lanes: LaneScheduler) -> None:
        start = 2 * BLOCK_BYTES
        target = GrowingBuffer(memoryview(bytearray(BYTES[:start] + bytes(SIZE - start))), start)
        done: list[bool] = []
        lanes.add(OutgoingLane(KEY, whole(), (0,), start=start))
        link.deliver(to(CopyingSink(target, lambda: done.append(True), start=start)))
        assert bytes(target.memory) == BYTES
        assert target.is_whole
        assert done == [True]
        assert link.offsets[0] == start

    def test_of_a_sum(self, link: FakeLink, lanes: LaneScheduler) -> None:
        start = BLOCK_BYTES
        out = GrowingBuffer(memoryview(bytearray(SIZE)), start)

        def add(out: memoryview, own: memoryview, received: bytearray) -> None:
            out[:] = bytes((a + b) % 256 for a, b in zip(own, received, strict=True))

        lanes.add(OutgoingLane(KEY, whole(), (0,), start=start))
        link.deliver(to(AddingSink(whole(), out, add, StagingPool(), start=start)))
        assert out.is_whole
        assert bytes(out.memory[:start]) == bytes(start), "what was there stays"
        assert bytes(out.memory[start:]) == bytes(2 * value % 256 for value in BYTES[start:])

    def test_of_a_sum_of_elements_of_other_widths(self, link: FakeLink, lanes: LaneScheduler) -> None:
        """Own elements of 1 byte, and received ones of 2, make sums of 4; the first 1,000 are there."""
        numel, there = SIZE // 2, 1000
        own = GrowingBuffer(memoryview(bytes(number % 251 for number in range(numel))))
        out = GrowingBuffer(memoryview(bytearray(numel * 4)), there * 4)

        def add(out: memoryview, own: memoryview, received: bytearray) -> None:
            theirs = memoryview(received).cast("H")
            out.cast("I")[:] = memoryview(struct.pack(f"={len(own)}I", *map(operator.add, own, theirs))).cast("I")

        lanes.add(OutgoingLane(KEY, whole(), (0,), start=there * 2))
        sink = AddingSink(own, out, add, StagingPool(), start=there * 2, item_bytes=(1, 2, 4))
        link.deliver(to(sink))
        theirs = memoryview(BYTES).cast("H")
        expected = [a + b for a, b in zip(own.memory, theirs, strict=True)][there:]
        assert list(out.memory.cast("I")[there:]) == expected
        assert sink.is_whole
        with pytest.raises(PeerError, match="one of them is cut"):
            AddingSink(own, GrowingBuffer(out.memory, 0), add, StagingPool(), item_bytes=(1, 2, 4)).destination(0, 3)

    def test_elsewhere_is_refused(self, link: FakeLink, lanes: LaneScheduler) -> None:
        lanes.add(OutgoingLane(KEY, whole(), (0,)))
        with pytest.raises(PeerError, match=f"{BLOCK_BYTES} is where it goes on"):
            link.deliver(to(CopyingSink(GrowingBuffer(memoryview(bytearray(SIZE)), 0), start=BLOCK_BYTES)))


class TestCredit:
    """No more goes than the other end has allowed."""

    def test_a_lane_waits_for_more_of_it(self, link: FakeLink, lanes: LaneScheduler) -> None:
        lane = OutgoingLane(KEY, whole(), (0,), until=2 * BLOCK_BYTES + 50)
        lanes.add(lane)
        link.deliver()
        assert sum(len(body) for _, body in link.sent) == 2 * BLOCK_BYTES, "a block is not cut"
        lanes.allow(lane, BLOCK_BYTES)
        link.deliver()
        assert len(link.sent) == 2, "what was allowed stays so"
        lanes.allow(lane, 3 * BLOCK_BYTES)
        link.deliver()
        assert link.offsets[-1] == 2 * BLOCK_BYTES
        lanes.allow(lane, SIZE)
        link.deliver()
        assert b"".join(body for _, body in link.sent) == BYTES

    def test_another_lane_goes_meanwhile(self, link: FakeLink, lanes: LaneScheduler) -> None:
        lanes.add(OutgoingLane(KEY, whole(), (0,), until=0))
        lanes.add(OutgoingLane(LaneKey(0, 0, 1), whole(), (1,)))
        link.deliver()
        assert {block.op for block, _ in link.sent} == {1}


class TestCancel:
    """A lane that is not wanted any more."""

    def test_its_memory_is_free_once_what_is_on_its_way_has_arrived(self, link: FakeLink, lanes: LaneScheduler) -> None:
        sent: list[bool] = []
        source = GrowingBuffer(memoryview(bytearray(SIZE)), 2 * BLOCK_BYTES)
        lane = OutgoingLane(KEY, source, (0,), sent=lambda: sent.append(True))
        lanes.add(lane)
        assert len(link.sent) == 2
        lanes.cancel(lane)
        assert not sent
        source.grow(SIZE)
        link.deliver()
        assert len(link.sent) == 2
        assert sent == [True]
        lanes.cancel(lane)
        assert sent == [True], "again does nothing"

    def test_one_of_which_nothing_went_is_free_at_once(self, link: FakeLink, lanes: LaneScheduler) -> None:
        sent: list[bool] = []
        source = GrowingBuffer(memoryview(bytearray(SIZE)), 0)
        lane = OutgoingLane(KEY, source, (0,), sent=lambda: sent.append(True))
        lanes.add(lane)
        lanes.cancel(lane)
        assert sent == [True]
        assert not source._followers

    def test_one_that_is_over_stays_so(self, link: FakeLink, lanes: LaneScheduler) -> None:
        sent: list[bool] = []
        lane = OutgoingLane(KEY, whole(), (0,), sent=lambda: sent.append(True))
        lanes.add(lane)
        link.deliver()
        lanes.cancel(lane)
        assert sent == [True]


class TestGenerations:
    """What is made anew goes on a lane of its own."""

    def inbox(self, generation: int) -> tuple[LaneInbox, GrowingBuffer]:
        target = GrowingBuffer(memoryview(bytearray(SIZE)), 0, generation)
        return to(CopyingSink(target)), target

    def block(self, generation: int) -> LaneBlock:
        return LaneBlock(0, 0, 0, generation, 0)

    def test_an_earlier_one_is_thrown_away(self) -> None:
        inbox, target = self.inbox(3)
        inbox.destination(self.block(2), 10)[:] = b"x" * 10
        inbox.received(memoryview(b"x" * 10))
        assert target.progress == 0
        assert not any(target.memory)

    def test_a_later_one_is_refused_aloud(self) -> None:
        inbox, _ = self.inbox(3)
        with pytest.raises(PeerError, match="generation 3 is what comes here"):
            inbox.destination(self.block(4), 10)

    def test_a_lane_carries_one(self, lanes: LaneScheduler) -> None:
        with pytest.raises(AssertionError, match="one generation"):
            lanes.add(OutgoingLane(KEY._replace(generation=1), whole(), (0,)))


def test_a_lane_that_is_not_taken_in_is_thrown_away() -> None:
    inbox = LaneInbox(lambda _: None)
    place = inbox.destination(LaneBlock(0, 0, 0, 0, 12345), 10)
    assert len(place) == 10
    inbox.received(place)


class TestFollowers:
    def test_they_are_let_go_of_when_all_is_there(self, link: FakeLink, lanes: LaneScheduler) -> None:
        source = GrowingBuffer(memoryview(bytearray(SIZE)), 0)
        for number in range(100):
            lanes.add(OutgoingLane(LaneKey(0, 0, number), source, (0,)))
        source.grow(SIZE)
        link.deliver()
        assert len(b"".join(body for _, body in link.sent)) == 100 * SIZE
        assert not source._followers
        lanes.add(OutgoingLane(KEY, source, (0,)))
        assert not source._followers, "what is whole does not grow"

    def test_one_may_end_another_while_both_are_woken(self) -> None:
        source = GrowingBuffer(memoryview(bytearray(10)), 0)
        woken: list[str] = []
        source.follow(lambda: (woken.append("first"), end()))  # type: ignore[func-returns-value,arg-type]
        end = source.follow(lambda: woken.append("second"))
        source.grow(1)
        source.grow(2)
        assert woken == ["first", "second", "first"]
