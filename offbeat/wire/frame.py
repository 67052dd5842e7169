"""Bytes to frames and back, without I/O.

    frame  = header metadata body
    header = magic "OFFB" | version u8 | flags u8 | reserved u16 | metadata length u32 | body length u32
             | crc32 of all before it and the metadata u32 | crc32 of the body u32          (big endian, 24 bytes)

Metadata is msgpack, decoded into declared structs only. A body is raw bytes. Both lengths are compared with the
decoder's bounds before anything is allocated for them. A decoder that failed stays failed: after one bad byte nobody
knows where the next frame begins, so the connection has to be closed.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from offbeat.errors import PeerError

MAGIC = b"OFFB"
VERSION = 1
_PREFIX = struct.Struct("!4sBBHII")
_CHECKS = struct.Struct("!II")
HEADER_BYTES = _PREFIX.size + _CHECKS.size


@dataclass(frozen=True)
class Frame:
    """One unit of the wire.

    Args:
        metadata: msgpack.
        body: raw bytes; empty for control messages.
    """

    metadata: bytes
    body: bytes = b""


def encode(frame: Frame) -> bytes:
    """The frame as bytes."""
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, 0, len(frame.metadata), len(frame.body))
    check = zlib.crc32(frame.metadata, zlib.crc32(prefix))
    return b"".join((prefix, _CHECKS.pack(check, zlib.crc32(frame.body)), frame.metadata, frame.body))


class Decoder:
    """Cuts a stream of bytes into frames.

    Args:
        max_metadata_bytes, max_body_bytes: longer ones are refused before they are received.
    """

    def __init__(self, *, max_metadata_bytes: int = 1 << 20, max_body_bytes: int = 0) -> None:
        self._max_metadata_bytes, self._max_body_bytes = max_metadata_bytes, max_body_bytes
        self._buffer = bytearray()
        self._failure: PeerError | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """Take in received bytes; returns the frames that are now complete.

        Raises:
            PeerError: if the bytes are no frames, or exceed the bounds; from then on always.
        """
        if self._failure is not None:
            raise self._failure
        self._buffer += data
        frames = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except PeerError as error:
            self._failure = error
            self._buffer.clear()
            raise
        return frames

    def _next(self) -> Frame | None:
        buffer = self._buffer
        # As early as possible: a peer that speaks another protocol is refused at its first byte.
        start = bytes(buffer[: len(MAGIC)])
        if not MAGIC.startswith(start):
            raise PeerError(
                f"Cannot read from this peer: it does not speak offbeat's protocol (it began with {start!r})."
            )
        if len(buffer) < HEADER_BYTES:
            return None
        _, version, flags, reserved, metadata_bytes, body_bytes = _PREFIX.unpack_from(buffer)
        if version != VERSION or flags or reserved:
            raise PeerError(
                f"Cannot read from this peer: it speaks version {version} of the protocol, this is version {VERSION}. "
                "Run the same offbeat everywhere."
            )
        for what, size, most in (
            ("metadata", metadata_bytes, self._max_metadata_bytes),
            ("a body", body_bytes, self._max_body_bytes),
        ):
            if size > most:
                raise PeerError(f"Cannot receive {what} of {size} bytes: the most that is taken here is {most}.")
        end = HEADER_BYTES + metadata_bytes + body_bytes
        check, body_check = _CHECKS.unpack_from(buffer, _PREFIX.size)
        if len(buffer) < HEADER_BYTES + metadata_bytes:
            return None
        metadata = bytes(buffer[HEADER_BYTES : HEADER_BYTES + metadata_bytes])
        if zlib.crc32(metadata, zlib.crc32(buffer[: _PREFIX.size])) != check:
            raise PeerError("Cannot read this frame: its metadata was damaged on the way (checksum).")
        if len(buffer) < end:
            return None
        body = bytes(buffer[HEADER_BYTES + metadata_bytes : end])
        if zlib.crc32(body) != body_check:
            raise PeerError("Cannot read this frame: its body was damaged on the way (checksum).")
        del buffer[:end]
        return Frame(metadata, body)
