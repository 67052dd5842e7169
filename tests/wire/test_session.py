"""Sessions without I/O: whatever happens to the connection, each frame comes once and in order."""

from __future__ import annotations

import contextlib
import tracemalloc
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import NetworkError, PeerError
from offbeat.wire.frame import HEADER_BYTES, Frame, Kind, encode, head
from offbeat.wire.session import FRAME_COST_BYTES, Limits, Session, SessionOver
from tests.wire.peers import Taker

LIMITS = Limits(window_bytes=20_000, max_metadata_bytes=300, max_body_bytes=5000, timeout=timedelta(seconds=5))


class Side:
    """A session, who takes in what comes, and a kernel that takes and gives as much as it is told."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.taker = Taker()
        self.session = Session(limits)
        self.session.receiver = self.taker
        self.acknowledged: list[bytes] = []
        self._unwritten = b""
        self.wire = b""  # on its way to the other side

    def send(self, metadata: bytes, body: bytes) -> None:
        self.session.send(metadata, body, lambda: self.acknowledged.append(metadata))

    def write(self, size: int) -> None:
        """Let the kernel take up to `size` bytes."""
        while size > 0:
            self._unwritten = self._unwritten or b"".join(self.session.take())
            if not self._unwritten:
                return
            self.wire, self._unwritten = self.wire + self._unwritten[:size], self._unwritten[size:]
            size -= len(self._unwritten[:size]) or size

    def read(self, other: Side, size: int) -> None:
        """Receive up to `size` bytes of what the other side has written."""
        give(self.session, other.wire[:size])
        other.wire = other.wire[size:]

    def broke(self) -> None:
        self.wire = self._unwritten = b""
        self.session.broke()


def give(session: Session, data: bytes) -> None:
    while data:
        buffer = session.get_buffer()
        size = min(len(buffer), len(data))
        assert size, "no progress"
        buffer[:size] = data[:size]
        session.buffer_updated(size)
        data = data[size:]


def reconnect(one: Side, two: Side) -> None:
    one.broke()
    two.broke()
    one.session.resumed(two.session.received)
    two.session.resumed(one.session.received)


STEP = st.one_of(
    st.tuples(st.just("send"), st.booleans(), st.integers(0, 4000)),
    st.tuples(st.just("write"), st.booleans(), st.integers(1, 9000)),
    st.tuples(st.just("read"), st.booleans(), st.integers(1, 9000)),
    st.tuples(st.just("break"), st.booleans(), st.just(0)),
)


@given(st.lists(STEP, max_size=60))
@settings(max_examples=400)
def test_any_order_of_events_delivers_once_and_in_order(steps: list[tuple[str, bool, int]]) -> None:
    sides = Side(), Side()
    sent: tuple[list[tuple[bytes, bytes]], ...] = [], []

    def check() -> None:
        for here, there in ((0, 1), (1, 0)):
            assert sides[there].taker.frames == sent[here][: len(sides[there].taker.frames)]
            assert len(sides[here].acknowledged) <= len(sides[there].taker.frames), "never before it has come"
            assert sides[here].session._flight_bytes <= LIMITS.window_bytes

    for kind, which, size in steps:
        one, other = sides[which], sides[not which]
        if kind == "send":
            frame = (b"%d" % len(sent[which]), bytes([len(sent[which]) % 251]) * size)
            sent[which].append(frame)
            one.send(*frame)
        elif kind == "write":
            one.write(size)
        elif kind == "read":
            one.read(other, size)
        else:
            reconnect(*sides)
        check()
    for _ in range(100):
        for one, other in (sides, sides[::-1]):
            one.write(1 << 20)
            other.read(one, 1 << 20)
    check()
    for here, there in ((0, 1), (1, 0)):
        assert sides[there].taker.frames == sent[here]
        assert sides[here].acknowledged == [metadata for metadata, _ in sent[here]]
        assert sides[there].taker.asked == [metadata for metadata, body in sent[here] if body]
        assert sides[here].session.idle


@given(st.lists(st.binary(max_size=300), max_size=5), st.binary(max_size=40))
@settings(max_examples=300)
def test_any_bytes_are_frames_or_a_clear_refusal(parts: list[bytes], noise: bytes) -> None:
    """Also well-formed frames of any kind and number, which a peer gone mad might send."""
    side = Side()
    side.send(b"one", b"")
    side.write(1 << 20)
    stream = b"".join(
        encode(Frame(part[3:], b"", kind=part[0] % 5, number=part[1] % 4, received=part[2] % 3))
        if len(part) > 3
        else part
        for part in parts
    )
    with contextlib.suppress(PeerError, SessionOver):
        give(side.session, stream + noise)
    assert len(side.taker.frames) <= 3
    assert side.acknowledged in ([], [b"one"])


def frames(*numbers: int, body: bytes = b"body") -> bytes:
    return b"".join(encode(Frame(b"%d" % number, body, kind=Kind.DATA, number=number)) for number in numbers)


def test_a_half_received_body_is_received_again_into_the_same_memory() -> None:
    side = Side()
    give(side.session, frames(1)[:-2])
    (place,) = side.taker.asked
    side.session.broke()
    side.session.resumed(0)
    give(side.session, frames(1, 2))
    assert side.taker.asked == [place, b"2"]
    assert side.taker.frames == [(b"1", b"body"), (b"2", b"body")]


@pytest.mark.parametrize("breaks", [False, True])
def test_the_memory_of_a_half_received_body_is_released(breaks: bool) -> None:
    memory, bodies = memoryview(bytearray(4)), []

    class Owner(Taker):
        def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
            return memory

        def received(self, metadata: bytes, body: memoryview) -> None:
            bodies.append(bytes(body[-2:]))

    session, whole = Session(LIMITS), frames(1)
    session.receiver = Owner()
    give(session, whole[:-2])
    session.release_body()
    if breaks:
        session.broke()
        session.resumed(0)
    give(session, whole if breaks else whole[-2:])
    assert bodies == [b"dy"], "it is received and checked all the same"
    assert bytes(memory[-2:]) == bytes(2), "nothing is written there any more"


@pytest.mark.parametrize("other", [frames(1, body=b"longer"), frames(1).replace(b"1body", b"9body")])
def test_what_comes_again_has_to_be_the_same(other: bytes) -> None:
    side = Side()
    give(side.session, frames(1)[:-2])
    side.session.broke()
    with pytest.raises(PeerError):
        give(side.session, other)
    assert side.taker.frames == []


def test_a_repeated_frame_needs_no_memory() -> None:
    side = Side()
    give(side.session, frames(1, 2, 1, 2, 3))
    assert [metadata for metadata, _ in side.taker.frames] == side.taker.asked == [b"1", b"2", b"3"]
    assert side.session.counters.repeated == 2


def test_a_frame_that_comes_too_early_breaks_the_connection() -> None:
    side = Side()
    with pytest.raises(PeerError, match="frame 3 came after frame 1"):
        give(side.session, frames(1, 3))
    assert side.taker.frames == [(b"1", b"body")], "what came before it is kept"


def test_nothing_comes_after_the_last_frame() -> None:
    side = Side()
    give(side.session, frames(1) + head(b"", kind=Kind.END, number=2))
    assert side.session.ended
    with pytest.raises(PeerError):
        give(side.session, frames(3))


def test_what_was_never_sent_cannot_be_acknowledged() -> None:
    side = Side()
    side.send(b"one", b"")
    for number in (1, 2):
        with pytest.raises(PeerError, match="it acknowledges frame"):
            give(side.session, head(b"", kind=Kind.ACK, received=number))
        side.session.broke()
    assert side.acknowledged == []


def test_nobody_forgets_what_it_has_received() -> None:
    side = Side()
    side.send(b"one", b"")
    side.write(1000)
    give(side.session, head(b"", kind=Kind.ACK, received=1))
    with pytest.raises(PeerError, match="it has received frame 1, and now says 0"):
        side.session.resumed(0)


def test_the_window() -> None:
    side = Side()
    for _ in range(20):
        side.send(b"", bytes(4000))
    cost = 4000 + HEADER_BYTES + FRAME_COST_BYTES
    for _ in range(5):
        side.write(1 << 20)
    assert len(side.wire) == LIMITS.window_bytes // cost * (4000 + HEADER_BYTES)
    assert not side.session.free
    give(side.session, head(b"", kind=Kind.ACK, received=2))
    side.write(1 << 20)
    assert len(side.wire) == (LIMITS.window_bytes // cost + 2) * (4000 + HEADER_BYTES)


def test_a_frame_larger_than_the_window_goes_alone() -> None:
    side = Side(Limits(window_bytes=100))
    for _ in range(3):
        side.send(b"", bytes(1000))
    side.write(1 << 20)
    assert len(side.wire) == 1000 + HEADER_BYTES
    give(side.session, head(b"", kind=Kind.ACK, received=1))
    side.write(1 << 20)
    assert len(side.wire) == 2 * (1000 + HEADER_BYTES)


def test_a_window_full_of_empty_frames_takes_no_more_memory_than_is_stated() -> None:
    """The worst there is: of each, all is bookkeeping."""
    limits = Limits(window_bytes=1 << 20)
    session = Session(limits)
    tracemalloc.start()
    try:
        while session.free:
            session.send(b"%d" % session._number, b"", lambda: None)
        while session.take():
            pass
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert session._number > 1800
    assert held_bytes < limits.window_bytes < limits.bookkeeping_bytes


def test_three_strikes() -> None:
    side = Side()
    error = PeerError("damaged")
    for _ in range(2):
        side.session.strike(error)
    give(side.session, frames(1))
    for _ in range(2):
        side.session.strike(error)
    with pytest.raises(SessionOver, match="damaged"):
        side.session.strike(error)


def test_it_speaks_up_when_idle_and_notices_silence() -> None:
    side, heard = Side(), []
    for tick in range(19):
        side.session.passed(0.25)
        if side.session.take():
            heard.append(tick)
    assert heard == [3, 7, 11, 15], "once a second"
    with pytest.raises(SessionOver, match="silent for 5 s") as over:
        side.session.passed(0.25)
    assert isinstance(over.value.reason, NetworkError)


def test_who_hung_up_is_not_waited_for_as_long() -> None:
    side = Side()
    side.session.hung_up()
    for _ in range(3):
        side.session.passed(0.25)
    with pytest.raises(SessionOver, match="it hung up, and was not back within 1 s") as over:
        side.session.passed(0.25)
    assert isinstance(over.value.reason, NetworkError)


def test_who_comes_back_after_hanging_up_is_forgiven() -> None:
    side = Side()
    side.session.hung_up()
    for _ in range(3):
        side.session.passed(0.25)
    side.session.resumed(0)
    for _ in range(15):
        side.session.passed(0.25)


def test_who_does_not_listen_hears_no_silence() -> None:
    side = Side()
    for _ in range(100):
        side.session.passed(1.0, listening=False)
    assert side.session.take(), "but it still speaks"


def test_a_word_ends_the_silence() -> None:
    side = Side()
    for _ in range(100):
        side.session.passed(1.0)
        give(side.session, head(b"", kind=Kind.ACK, received=0))


def test_a_frame_that_does_not_go_on_breaks_the_connection() -> None:
    """Bytes are missing, and the other side's signs of life are taken for them."""
    side = Side()
    give(side.session, frames(1, body=bytes(4000))[:2000])
    for _ in range(10):
        side.session.passed(0.25)
        give(side.session, head(b"", kind=Kind.ACK, received=0))
    with pytest.raises(PeerError, match="does not continue"):
        side.session.passed(0.25)
    side.session.broke()
    give(side.session, frames(1, body=bytes(4000)))
    assert [metadata for metadata, _ in side.taker.frames] == [b"1"]


def test_a_slow_frame_goes_on() -> None:
    side = Side()
    stream = frames(1, body=bytes(5000)) + frames(2, body=bytes(5000))
    for at in range(0, len(stream), 60):
        side.session.passed(0.1)
        give(side.session, stream[at : at + 60])
    assert len(side.taker.frames) == 2
