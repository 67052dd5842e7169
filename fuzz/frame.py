"""Fuzzes what reads from the network: `python fuzz/frame.py -runs=200000 fuzz/corpus` (pip install 'offbeat[fuzz]').

The first byte of an input says what the rest is: bytes off the wire, the same with checksums put right, for a `Reader`
or for a `Session`, or well-formed frames with anything in them for a `Session`. Whatever it is, either frames come out,
or a `PeerError`, or the session ends; never another exception, memory beyond what was announced, or a step without
progress.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import atheris
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with atheris.instrument_imports(include=["offbeat.wire"]):
    import msgspec

    from offbeat.errors import OffbeatError, PeerError
    from offbeat.wire.frame import HEADER_BYTES, SCRATCH_BYTES, Frame, Reader, encode
    from offbeat.wire.messages import Join, unpack
    from offbeat.wire.session import Limits, Session, SessionOver

_MAX_METADATA_BYTES, _MAX_BODY_BYTES = 600, 30_000
_LIMITS = Limits(window_bytes=20_000, max_metadata_bytes=_MAX_METADATA_BYTES, max_body_bytes=_MAX_BODY_BYTES)


class Taker:
    """Takes in what comes, and counts the memory it hands out."""

    def __init__(self) -> None:
        self.asked = self.frames = 0

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        assert size_bytes <= _MAX_BODY_BYTES
        self.asked += 1
        assert self.asked <= self.frames + 1, "one body at a time"
        return memoryview(bytearray(size_bytes))

    def received(self, metadata: bytes, body: memoryview) -> None:
        assert len(metadata) <= _MAX_METADATA_BYTES
        self.frames += 1
        self.asked = self.frames

    def lost(self, error: OffbeatError | None) -> None:
        raise AssertionError("that is for the link to say")


def read_frames(data: bytes, piece: int) -> None:
    """A reader gives back exactly what was written, or refuses."""
    reader = Reader(max_metadata_bytes=_MAX_METADATA_BYTES, max_body_bytes=_MAX_BODY_BYTES)
    whole = b""
    try:
        for at in range(0, len(data), piece):
            for frame in reader.feed(data[at : at + piece]):
                whole += encode(frame)
                try_message(frame)
    except PeerError:
        pass
    assert data.startswith(whole)
    assert len(reader._room) <= max(SCRATCH_BYTES, HEADER_BYTES + _MAX_METADATA_BYTES)


def try_message(frame: Frame) -> None:
    try:
        message = unpack(frame)
    except PeerError:
        return
    assert isinstance(message, msgspec.Struct)
    if isinstance(message, Join):
        assert 0 <= message.claim.rank < 4096


def run_session(data: bytes, piece: int) -> None:
    """A session gives frames in order, and takes no acknowledgement of what it has not sent."""
    session, taker = Session(_LIMITS), Taker()
    session.receiver = taker
    acknowledged = []
    for number in range(3):
        session.send(b"m", b"body", lambda number=number: acknowledged.append(number))  # type: ignore[misc]
    session.take()
    try:
        while data:
            buffer = session.get_buffer()
            size = min(len(buffer), piece, len(data))
            assert size, "no progress"
            buffer[:size] = data[:size]
            session.buffer_updated(size)
            data = data[size:]
            session.take()
    except (PeerError, SessionOver):
        pass
    assert session.received - session.ended == taker.frames
    assert acknowledged == list(range(len(acknowledged)))


def make_frames(data: bytes) -> bytes:
    """Well-formed frames of any kind, number and content."""
    provider = atheris.FuzzedDataProvider(data)
    parts: list[bytes] = []
    while provider.remaining_bytes() and len(parts) < 50:
        kind, number, received = (provider.ConsumeIntInRange(0, most) for most in (4, 6, 4))
        metadata = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 20))
        body = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 100)) if provider.ConsumeBool() else b""
        parts.append(encode(Frame(metadata, body, kind, number, received, provider.ConsumeBool())))
    return b"".join(parts)


def put_right(data: bytes) -> bytes:
    """The same with right checksums, as far as the lengths that stand in it make sense."""
    at, repaired = 0, bytearray(data)
    while at + HEADER_BYTES <= len(data):
        metadata_bytes, body_bytes = struct.unpack_from("!II", data, at + 8)
        metadata_at = at + HEADER_BYTES
        body_at, end = metadata_at + metadata_bytes, metadata_at + metadata_bytes + body_bytes
        if end > len(data):
            break
        check = zlib.crc32(data[metadata_at:body_at], zlib.crc32(data[at : at + 32]))
        body_check = xxhash.xxh3_64_intdigest(data[body_at:end]) & 0xFFFFFFFF
        struct.pack_into("!II", repaired, at + 32, check, body_check)
        at = end
    return bytes(repaired)


def test_one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    if not data:
        return
    if data[:1] == b"O":  # a file of the corpus: as it is
        read_frames(data, 7)
        run_session(data, 7)
        return
    mode, piece = data[0] % 5, 1 + data[0] // 5 * 7
    if mode == 4:
        run_session(make_frames(data[1:]), piece)
        return
    stream = put_right(data[1:]) if mode % 2 else data[1:]
    (read_frames if mode < 2 else run_session)(stream, piece)


if __name__ == "__main__":
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
