"""Bytes to frames and back, without I/O.

    frame  = header metadata body
    header = magic "OFFB" | version u8 | kind u8 | flags u16 | metadata length u32 | body length u32
             | number u64 | received u64
             | crc32 of all before it and the metadata u32 | low half of the body's xxh3_64 u32   (big endian, 40 bytes)
    flags  = 1: wants to be acknowledged at once

Metadata is msgpack, decoded into declared structs only. A body is raw bytes; it is received straight into the memory
that `place` hands out for it, once its header and metadata have been found whole. Both lengths are compared with the
reader's bounds before anything is allocated for them. A reader that failed stays failed: after one bad byte nobody
knows where the next frame begins, so the connection has to be closed.

The body's check is xxh3 because it is no slower than memory is; crc32 would be slower than the network.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import TYPE_CHECKING

import msgspec
import xxhash

from offbeat.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

MAGIC = b"OFFB"
VERSION = 6
_PREFIX = struct.Struct("!4sBBHIIQQ")
_CHECKS = struct.Struct("!II")
_HEADER = struct.Struct("!4sBBHIIQQII")
HEADER_BYTES = _HEADER.size
SCRATCH_BYTES = 16 << 10
_LOW_HALF = 0xFFFFFFFF
_NO_BODY_CHECK = xxhash.xxh3_64_intdigest(b"") & _LOW_HALF


class Kind(enum.IntEnum):
    """The addressee of a frame: `MESSAGE` for the reader's owner, the others are a session's (see
    `offbeat.wire.session`).
    """

    MESSAGE = 0
    DATA = 1
    ACK = 2
    END = 3
    FAIL = 4


_KINDS = frozenset(map(int, Kind))


class Frame(msgspec.Struct, frozen=True):
    """One unit of the wire.

    Args:
        metadata: msgpack.
        body: raw bytes; empty for control messages.
        kind, number, received, urgent: a session's.
    """

    metadata: bytes
    body: bytes | memoryview = b""
    kind: int = Kind.MESSAGE
    number: int = 0
    received: int = 0
    urgent: bool = False


def head(
    metadata: bytes,
    body: bytes | memoryview = b"",
    *,
    kind: int = Kind.MESSAGE,
    number: int = 0,
    received: int = 0,
    urgent: bool = False,
    version: int = VERSION,
) -> bytes:
    """Encode what stands before the body: header and metadata."""
    size = len(body)
    prefix = _PREFIX.pack(MAGIC, version, kind, urgent, len(metadata), size, number, received)
    check = zlib.crc32(metadata, zlib.crc32(prefix))
    body_check = xxhash.xxh3_64_intdigest(body) & _LOW_HALF if size else _NO_BODY_CHECK
    return b"".join((prefix, _CHECKS.pack(check, body_check), metadata))


def encode(frame: Frame) -> bytes:
    """The frame as bytes."""
    metadata, body, kind = frame.metadata, frame.body, frame.kind
    return head(metadata, body, kind=kind, number=frame.number, received=frame.received, urgent=frame.urgent) + body


class Reader:
    """A parser of frames: 1) receive into `get_buffer()`, 2) `buffer_updated`, 3) `next_frame` to None.

    It holds `scratch_bytes`, or one header with its metadata if that is longer. At most `scratch_bytes` of a body pass
    through there, namely those that came in one piece with the header; the rest lands where `place` said.

    Args:
        place: called with a frame without its body as soon as that is known to be whole, and the body's size; returns
            writable memory of exactly that size, or None to have the body thrown away. Not called for empty bodies.
            Left out, each body gets memory of its own.
        max_metadata_bytes, max_body_bytes: longer ones are refused before they are received.
        scratch_bytes: 0 reads nothing beyond the frame that is being received.
        versions: those that are read; a file has that of the day when it was written.
    """

    def __init__(
        self,
        place: Callable[[Frame, int], memoryview | None] | None = None,
        *,
        max_metadata_bytes: int = 1 << 20,
        max_body_bytes: int = 0,
        scratch_bytes: int = SCRATCH_BYTES,
        versions: Collection[int] = (VERSION,),
    ) -> None:
        self._place, self._versions = place or _own_memory, versions
        self._max_metadata_bytes, self._max_body_bytes = max_metadata_bytes, max_body_bytes
        self._scratch = memoryview(bytearray(max(scratch_bytes, HEADER_BYTES)))
        self._room = self._scratch  # where heads are received: the scratch, or more for a long one
        self._begin = self._end = 0
        self._head_bytes = HEADER_BYTES  # how long the next head is, as far as that is known
        self._frame: Frame | None = None  # the one whose body is being received
        self._body: memoryview | None = None
        self._filled = self._size = self._body_check = 0
        self._hash = xxhash.xxh3_64()
        self._failure: PeerError | None = None

    def get_buffer(self) -> memoryview:
        """The buffer for the next bytes; never empty.

        Raises:
            PeerError: if the reader has failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._frame is None:
            return self._room[self._end :]
        if self._body is None:
            return self._scratch[: self._size - self._filled]
        return self._body[self._filled :]

    @property
    def begun(self) -> bool:
        """Whether a frame is there in part."""
        return self._frame is not None or self._end > self._begin

    @property
    def missing_bytes(self) -> int:
        """The bytes that are missing of the body that is being received; 1 between bodies."""
        return 1 if self._frame is None else self._size - self._filled

    def buffer_updated(self, size_bytes: int) -> bool:
        """Take in what was received into `get_buffer()`.

        Returns:
            Whether `next_frame` is to be called now, until it returns None.
        """
        if self._frame is None:
            self._end += size_bytes
            return True
        # Checked piece by piece, while the processor still has each in its cache.
        if self._body is not None:
            self._hash.update(self._body[self._filled : self._filled + size_bytes])
        self._filled += size_bytes
        return self._filled == self._size

    def move_body(self, body: memoryview) -> None:
        """Have the rest of the body that is being received land in other memory; it is checked all the same."""
        if self._body is not None:
            self._body = body

    def next_frame(self) -> Frame | None:
        """The next frame that is complete; None if more has to be received first.

        Raises:
            PeerError: if the bytes are no frames, or exceed the bounds, or `place` says so; from then on always.
        """
        if self._failure is not None:
            raise self._failure
        try:
            if self._frame is None and (begun := self._next_head()) is not None:
                self._frame = begun
                self._begin_body(begun)
            frame = None if self._frame is None else self._whole(self._frame)
        except Exception as error:
            ours = PeerError("Cannot read on from this peer: the receiver of its frame has failed.")
            self._failure = error if isinstance(error, PeerError) else ours
            self._body = self._frame = None
            raise
        if frame is None:
            self._make_room()
        return frame

    def feed(self, data: bytes) -> list[Frame]:
        """The same for bytes that were received elsewhere; returns the frames that are now complete.

        Raises:
            PeerError: as above; then frames that were complete before are gone as well.
        """
        frames, rest = [], memoryview(data)
        while rest:
            buffer = self.get_buffer()
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            if self.buffer_updated(size):
                while (frame := self.next_frame()) is not None:
                    frames.append(frame)
            rest = rest[size:]
        return frames

    # -- heads ---------------------------------------------------------------------------------------------------

    def _next_head(self) -> Frame | None:
        """A frame without its body, if its header and metadata are there and whole."""
        room, begin, have = self._room, self._begin, self._end - self._begin
        if have < HEADER_BYTES:
            # As early as possible: a peer that speaks another protocol is refused at its first byte.
            _check_start(bytes(room[begin : begin + min(have, len(MAGIC))]))
            return None
        start, version, kind, flags, metadata_bytes, size, number, received, check, body_check = _HEADER.unpack_from(
            room, begin
        )
        _check_start(start)
        if version not in self._versions:
            raise PeerError(
                f"Cannot read from this peer: it speaks version {version} of the protocol, this is version "
                f"{max(self._versions)}. Run the same offbeat everywhere."
            )
        if flags > 1 or kind not in _KINDS:
            raise PeerError(f"Cannot read from this peer: it sent a frame of kind {kind} with flags {flags}.")
        if metadata_bytes > self._max_metadata_bytes:
            raise _too_long("metadata", metadata_bytes, self._max_metadata_bytes)
        if size > self._max_body_bytes:
            raise _too_long("a body", size, self._max_body_bytes)
        self._head_bytes = HEADER_BYTES + metadata_bytes
        if have < self._head_bytes:
            return None
        at = begin + HEADER_BYTES
        metadata = bytes(room[at : at + metadata_bytes])
        if zlib.crc32(metadata, zlib.crc32(room[begin : begin + _PREFIX.size])) != check:
            raise PeerError("Cannot read this frame: its metadata was damaged on the way (checksum).")
        self._begin, self._head_bytes = begin + self._head_bytes, HEADER_BYTES
        self._size, self._filled, self._body_check = size, 0, body_check
        return Frame(metadata, b"", kind, number, received, flags == 1)

    def _make_room(self) -> None:
        """Have the next bytes of a head fit behind those that are there."""
        have = self._end - self._begin
        room = self._room
        if self._head_bytes > len(room):
            room = memoryview(bytearray(self._head_bytes))
        elif have == 0:
            room = self._scratch
        if room is not self._room or self._begin:
            room[:have] = self._room[self._begin : self._end]
            self._room, self._begin, self._end = room, 0, have

    # -- bodies --------------------------------------------------------------------------------------------------

    def _begin_body(self, frame: Frame) -> None:
        """Find the body's place, and move there what came along with the head."""
        if not self._size:
            return
        self._hash.reset()
        self._body = self._place(frame, self._size)
        if self._body is not None and (self._body.nbytes != self._size or self._body.readonly):
            raise ValueError(f"A body of {self._size} bytes was given memory of {self._body.nbytes}, or read-only.")
        come = self._room[self._begin : min(self._end, self._begin + self._size)]
        if self._body is not None:
            self._body[: len(come)] = come
            self._hash.update(come)
        self._begin += len(come)
        self._filled = len(come)

    def _whole(self, frame: Frame) -> Frame | None:
        """The frame, if the last byte of its body has come."""
        if self._filled < self._size:
            return None
        if self._body is not None:
            found = self._hash.intdigest() & _LOW_HALF
            frame = msgspec.structs.replace(frame, body=self._body)
        else:  # what was thrown away need not be right
            found = self._body_check if self._size else _NO_BODY_CHECK
        if found != self._body_check:
            raise PeerError("Cannot read this frame: its body was damaged on the way (checksum).")
        self._frame = self._body = None
        self._filled = self._size = 0
        return frame


def _check_start(start: bytes) -> None:
    if not MAGIC.startswith(start):
        raise PeerError(f"Cannot read from this peer: it does not speak offbeat's protocol (it began with {start!r}).")


def _too_long(what: str, size: int, most: int) -> PeerError:
    return PeerError(f"Cannot receive {what} of {size} bytes: the most that is accepted here is {most}.")


def _own_memory(frame: Frame, size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))
