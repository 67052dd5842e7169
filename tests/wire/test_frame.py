"""Frames: whatever comes in, frames or a refusal come out, and nothing is kept beyond the bounds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import PeerError
from offbeat.wire.frame import HEADER_BYTES, Decoder, Frame, encode
from offbeat.wire.messages import Ask, Hello, Report, Roster, Words, pack, unpack

FRAMES = st.lists(st.builds(Frame, st.binary(max_size=200), st.binary(max_size=200)), max_size=5)


def decoder() -> Decoder:
    return Decoder(max_metadata_bytes=300, max_body_bytes=300)


@given(FRAMES, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_any_cut_of_the_stream_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encode, frames))
    got: list[Frame] = []
    ours, at = decoder(), 0
    while at < len(stream):
        size = cuts[len(got) % len(cuts)]
        got += ours.feed(stream[at : at + size])
        at += size
    assert got == frames


@given(st.binary(max_size=400))
def test_noise_is_refused_or_waited_for(noise: bytes) -> None:
    try:
        frames = decoder().feed(noise)
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
        frames = decoder().feed(bytes(stream))
    except PeerError:
        return
    assert frames == [], "a longer length only makes it wait for more"


@given(st.integers(301, 2**32 - 1), st.booleans())
def test_long_frames_are_refused_before_they_come(size: int, in_body: bool) -> None:
    stream = bytearray(encode(Frame(b"")))
    at = 12 if in_body else 8
    stream[at : at + 4] = size.to_bytes(4, "big")
    with pytest.raises(PeerError, match="the most that is taken here is 300"):
        decoder().feed(bytes(stream[:HEADER_BYTES]))


def test_a_failed_decoder_stays_failed() -> None:
    ours = decoder()
    with pytest.raises(PeerError):
        ours.feed(b"GET / HTTP/1.1")
    with pytest.raises(PeerError):
        ours.feed(encode(Frame(b"x")))


def test_another_version_is_named() -> None:
    stream = bytearray(encode(Frame(b"x")))
    stream[4] = 9
    with pytest.raises(PeerError, match="speaks version 9"):
        decoder().feed(bytes(stream))


@given(st.binary(max_size=300))
def test_metadata_is_a_declared_message_or_refused(data: bytes) -> None:
    try:
        message = unpack(Frame(data))
    except PeerError:
        return
    assert isinstance(message, msgspec.Struct)


def test_messages_come_back() -> None:
    words = Words(rank=3, host="h", phase="exchanging", step=7, traceback="x" * 8192)
    for message in (Report(words), Ask(1, (2, 3)), Roster(4, (words,), 1.5), Hello(b"n" * 32)):
        (frame,) = Decoder().feed(pack(message))
        assert unpack(frame) == message


@pytest.mark.parametrize(
    "words", [Words(rank=0, traceback="x" * 8193), Words(rank=-1), Words(rank=5000), Words(rank=0, host="h" * 257)]
)
def test_bounds_of_fields_are_checked(words: Words) -> None:
    (frame,) = Decoder().feed(pack(Report(words)))
    with pytest.raises(PeerError):
        unpack(frame)
