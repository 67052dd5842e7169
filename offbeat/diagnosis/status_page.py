"""The page of last words: shared memory that a worker writes and its sentinel reads.

One process writes, one reads, nobody locks: the writer makes the sequence number odd, writes, and makes it even; the
reader takes what it copied only if the number was even and the same before and after. The heartbeat lies outside,
because another thread ticks it; so does the worker's status, which a third one writes, and which has a checksum.

It is memory without a file: nothing is left behind whoever dies, and a full disk cannot end the worker (a write into a
mapped file that the disk has no room for is a SIGBUS).
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass

from offbeat.protocol.worker_status import MOST_BYTES
from offbeat.wire.messages import MAX_TEXT

PHASES = ("starting", "computing", "exchanging", "waiting", "raised", "lost", "finished", "busy")
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_SEQUENCE = struct.Struct("<Q")
_HEARTBEAT = struct.Struct("<d")
_LABEL_BYTES = 240
# phase, since (monotonic seconds), step, model, bucket, buckets, stamp, length of the label
_STATE = struct.Struct(f"<Bxxxxxxxdqiiiqi{_LABEL_BYTES}s")
_TEXT = struct.Struct(f"<I{MAX_TEXT}s")
# length and checksum of the status, and the status
_STATUS = struct.Struct(f"<II{MOST_BYTES}s")
_AT_HEARTBEAT = _SEQUENCE.size
_AT_STATE = _AT_HEARTBEAT + _HEARTBEAT.size
_AT_TEXT = _AT_STATE + _STATE.size
_AT_STATUS = _AT_TEXT + _TEXT.size
PAGE_BYTES = _AT_STATUS + _STATUS.size
_TRIES = 1000


@dataclass(frozen=True)
class PageState:
    """The state on the page; times in seconds of the monotonic clock."""

    phase: str = "starting"
    since_s: float = 0.0
    step: int = -1
    model: int = 0
    bucket: int = -1
    buckets: int = 0
    stamp: int = 0
    operation: str = ""


class StatusPage:
    """Both ends' view of the memory.

    Args:
        fd: of memory of `PAGE_BYTES`; None makes some.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("offbeat-words")
            os.ftruncate(fd, PAGE_BYTES)
        self.fd = fd
        self._memory = mmap.mmap(fd, PAGE_BYTES)
        self._sequence = 0

    def say(
        self,
        phase: str,
        *,
        step: int,
        model: int = 0,
        bucket: int = -1,
        buckets: int = 0,
        stamp: int = 0,
        operation: bytes = b"",
    ) -> None:
        """Write down where the worker is; takes about a microsecond.

        Args:
            operation: UTF-8; cut after 240 bytes.
        """
        memory, sequence = self._memory, self._sequence
        _SEQUENCE.pack_into(memory, 0, sequence + 1)
        size = min(len(operation), _LABEL_BYTES)
        now_s = time.monotonic()
        _STATE.pack_into(
            memory, _AT_STATE, _NUMBERS[phase], now_s, step, model, bucket, buckets, stamp, size, operation
        )
        self._sequence = sequence + 2
        _SEQUENCE.pack_into(memory, 0, self._sequence)

    def last_words(self, phase: str, text: str) -> None:
        """Write down the exception that ends the worker; the end of `text` if it is long."""
        # A file name that is no UTF-8 puts lone surrogates into the message of its exception.
        data = text.encode(errors="backslashreplace")[-MAX_TEXT:].decode(errors="ignore").encode()
        _TEXT.pack_into(self._memory, _AT_TEXT, len(data), data)
        state = self.read()
        self.say(phase, step=state.step, stamp=state.stamp, operation=state.operation.encode())

    def say_status(self, data: bytes) -> None:
        """Write down how the training goes, in at most `MOST_BYTES`."""
        _STATUS.pack_into(self._memory, _AT_STATUS, len(data), zlib.crc32(data), data)

    def tick(self) -> None:
        """A thread of the worker has run."""
        _HEARTBEAT.pack_into(self._memory, _AT_HEARTBEAT, time.monotonic())

    def read(self) -> PageState:
        """Read the latest state. A writer that died between two writes is read as it left it."""
        for _ in range(_TRIES):
            (before,) = _SEQUENCE.unpack_from(self._memory, 0)
            raw = self._memory[_AT_STATE:_AT_TEXT]
            (after,) = _SEQUENCE.unpack_from(self._memory, 0)
            if before == after and before % 2 == 0:
                break
        phase, since_s, step, model, bucket, buckets, stamp, size, label = _STATE.unpack(raw)
        # The page is written by the user's process, where anything may run wild: nothing in it is an index unchecked.
        name = PHASES[phase] if phase < len(PHASES) else "computing"
        text = label[: max(0, min(size, _LABEL_BYTES))].decode(errors="replace")
        return PageState(name, since_s, step, model, bucket, buckets, stamp, text)

    def heartbeat_s(self) -> float:
        """The time of the last heartbeat, in seconds of the monotonic clock."""
        (tick_s,) = _HEARTBEAT.unpack_from(self._memory, _AT_HEARTBEAT)
        return float(tick_s)

    def text(self) -> str:
        """The traceback that ended the worker, or ""."""
        size, data = _TEXT.unpack_from(self._memory, _AT_TEXT)
        return str(data[: min(size, MAX_TEXT)].decode(errors="replace"))[:MAX_TEXT]

    def status(self) -> bytes | None:
        """The latest training status; None if it is just being written, or never was."""
        size, checksum, data = _STATUS.unpack_from(self._memory, _AT_STATUS)
        data = data[: min(size, MOST_BYTES)]
        return data if data and zlib.crc32(data) == checksum else None

    def detach(self) -> None:
        """Keep what is written from now on in this process; a late writer does no harm."""
        self._memory = mmap.mmap(-1, PAGE_BYTES)

    def close(self) -> None:
        """Detach and close."""
        self.detach()
        os.close(self.fd)
