"""Frames: whatever comes in, frames or a refusal come out, and nothing is kept beyond the bounds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import PeerError
from offbeat.wire.frame import HEADER_BYTES, SCRATCH_BYTES, VERSION, Frame, Reader, encode
from offbeat.wire.messages import AskRoster, ClusterReport, Hello, ReportWords, WorkerReport, pack, unpack
from tests.wire.golden_frames import CORPUS, GOLDEN

FRAMES = st.lists(st.builds(Frame, st.binary(max_size=200), st.binary(max_size=200)), max_size=5)


def reader() -> Reader:
    return Reader(max_metadata_bytes=300, max_body_bytes=300)


@given(FRAMES, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_any_cut_of_the_stream_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encode, frames))
    got: list[Frame] = []
    ours, at = reader(), 0
    while at < len(stream):
        size = cuts[len(got) % len(cuts)]
        got += ours.feed(stream[at : at + size])
        at += size
    assert got == frames


@given(st.binary(max_size=400))
def test_noise_is_refused_or_waited_for(noise: bytes) -> None:
    try:
        frames = reader().feed(noise)
    except PeerError:
        return
    assert frames == []
    assert b"OFFB".startswith(noise[:4])


@given(st.binary(max_size=100), st.binary(max_size=100), st.data())
@settings(max_examples=300)
def test_a_flipped_bit_never_passes(metadata: bytes, body: bytes, data: st.DataObject) -> None:
    stream = bytearray(encode(Frame(metadata, body)))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    try:
        frames = reader().feed(bytes(stream))
    except PeerError:
        return
    assert frames == [], "a longer length only makes it wait for more"


@given(st.integers(301, 2**32 - 1), st.booleans())
def test_long_frames_are_refused_before_they_come(size: int, in_body: bool) -> None:
    stream = bytearray(encode(Frame(b"")))
    at = 12 if in_body else 8
    stream[at : at + 4] = size.to_bytes(4, "big")
    with pytest.raises(PeerError, match="the most that is accepted here is 300"):
        reader().feed(bytes(stream[:HEADER_BYTES]))


def test_a_failed_decoder_stays_failed() -> None:
    ours = reader()
    with pytest.raises(PeerError):
        ours.feed(b"GET / HTTP/1.1")
    with pytest.raises(PeerError):
        ours.feed(encode(Frame(b"x")))


def test_another_version_is_named() -> None:
    stream = bytearray(encode(Frame(b"x")))
    stream[4] = 9
    with pytest.raises(PeerError, match="speaks version 9"):
        reader().feed(bytes(stream))


@given(st.binary(max_size=300))
def test_metadata_is_a_declared_message_or_refused(data: bytes) -> None:
    try:
        message = unpack(Frame(data))
    except PeerError:
        return
    assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize(
    "data", [b"\x81\xa4type\xa2\xff\xfe", b"\x81\xa2\xff\xfe\xc0", b"\xa2\xff\xfe", b"\x91" * 5000]
)
def test_metadata_that_is_no_text_or_too_deep(data: bytes) -> None:
    """Found by fuzzing: msgspec does not raise an error of its own for text that is not UTF-8."""
    with pytest.raises(PeerError, match="Cannot understand this peer"):
        unpack(Frame(data))


def test_messages_come_back() -> None:
    words = WorkerReport(rank=3, host="h", phase="exchanging", step=7, traceback="x" * 8192)
    for message in (ReportWords(words), AskRoster(1, (2, 3)), ClusterReport(4, (words,), 1.5), Hello(b"n" * 32)):
        (frame,) = Reader().feed(pack(message))
        assert unpack(frame) == message


@pytest.mark.parametrize(
    "words",
    [
        WorkerReport(rank=0, traceback="x" * 8193),
        WorkerReport(rank=-1),
        WorkerReport(rank=5000),
        WorkerReport(rank=0, host="h" * 257),
    ],
)
def test_bounds_of_fields_are_checked(words: WorkerReport) -> None:
    (frame,) = Reader().feed(pack(ReportWords(words)))
    with pytest.raises(PeerError):
        unpack(frame)


# -- bodies in place -------------------------------------------------------------------------------------------------


class Places:
    """Hands out memory for bodies, and counts it."""

    def __init__(self, *, throws_away: bool = False) -> None:
        self.handed_bytes = 0
        self.throws_away = throws_away
        self.memory: list[memoryview] = []

    def __call__(self, frame: Frame, size_bytes: int) -> memoryview | None:
        self.handed_bytes += size_bytes
        if self.throws_away:
            return None
        self.memory.append(memoryview(bytearray(size_bytes)))
        return self.memory[-1]


def receive(ours: Reader, stream: bytes, sizes: list[int]) -> list[Frame]:
    """Receive in pieces of up to `sizes` bytes, as a socket would."""
    got, at, turn = [], 0, 0
    while at < len(stream):
        buffer = ours.get_buffer()
        assert len(buffer), "always some progress"
        size = min(sizes[turn % len(sizes)], len(buffer), len(stream) - at)
        buffer[:size] = stream[at : at + size]
        ours.buffer_updated(size)
        while (frame := ours.next_frame()) is not None:
            got.append(frame)
        at, turn = at + size, turn + 1
    return got


@given(FRAMES, st.lists(st.integers(1, 300), min_size=1, max_size=9), st.sampled_from([0, 100, 4096]), st.booleans())
def test_bodies_land_where_they_are_to(frames: list[Frame], sizes: list[int], scratch: int, throws_away: bool) -> None:
    places = Places(throws_away=throws_away)
    ours = Reader(places, max_metadata_bytes=300, max_body_bytes=300, scratch_bytes=scratch)
    got = receive(ours, b"".join(map(encode, frames)), sizes)
    assert places.handed_bytes == sum(len(frame.body) for frame in frames), "each is asked for once"
    assert [frame.metadata for frame in got] == [frame.metadata for frame in frames]
    if not throws_away:
        assert got == frames
        assert [frame.body for frame in got if frame.body] == places.memory


def test_without_scratch_nothing_is_read_ahead() -> None:
    """Who hands the connection on after one frame has taken nothing of the next."""
    stream = encode(Frame(b"x" * 100)) * 2
    ours = Reader(scratch_bytes=0)
    taken = 0
    while (frame := ours.next_frame()) is None:
        buffer = ours.get_buffer()
        buffer[:] = stream[taken : taken + len(buffer)]
        ours.buffer_updated(len(buffer))
        taken += len(buffer)
    assert frame == Frame(b"x" * 100)
    assert taken == len(stream) // 2


@given(st.lists(st.one_of(st.binary(max_size=60), st.builds(encode, st.builds(Frame, st.binary(max_size=20))))))
@settings(max_examples=300)
def test_whatever_comes_memory_is_bounded(parts: list[bytes]) -> None:
    places = Places()
    ours = Reader(places, max_metadata_bytes=300, max_body_bytes=50)
    try:
        receive(ours, b"".join(parts), [7, 400])
    except PeerError:
        for attempt in (ours.get_buffer, ours.next_frame):
            with pytest.raises(PeerError):
                attempt()
    assert len(ours._room) <= SCRATCH_BYTES
    assert places.handed_bytes <= 50 * len(places.memory)


def test_what_is_announced_is_not_allocated() -> None:
    """A gigabyte is announced, within what is taken here; until its header is checked nothing is set aside for it."""
    stream = bytearray(encode(Frame(b"", bytes(10))))
    stream[12:16] = (1 << 30).to_bytes(4, "big")
    places = Places()
    ours = Reader(places, max_body_bytes=1 << 31)
    with pytest.raises(PeerError, match="metadata was damaged"):
        ours.feed(bytes(stream))
    assert places.handed_bytes == 0


@pytest.mark.parametrize("memory", [memoryview(bytearray(9)), memoryview(bytes(10))])
def test_a_wrong_place_is_our_own_mistake(memory: memoryview) -> None:
    ours = Reader(lambda frame, size_bytes: memory, max_body_bytes=100)
    with pytest.raises(ValueError, match="A body of 10 bytes"):
        ours.feed(encode(Frame(b"", bytes(10))))
    with pytest.raises(PeerError):
        ours.next_frame()


# -- golden frames ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN)
def test_frames_of_this_version_stay_as_they_are(name: str) -> None:
    """What is written today can be read by everybody who speaks this version; change them, and it is another one."""
    stream = (CORPUS / name).read_bytes()
    assert stream[4] == VERSION
    assert b"".join(map(encode, GOLDEN[name])) == stream
    assert Reader(max_body_bytes=1 << 20).feed(stream) == GOLDEN[name]


def test_the_corpus_is_complete() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(GOLDEN)
