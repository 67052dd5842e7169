"""A history as a file: appended to while a process lives, read when it is over.

    file  = magic chunk chunk chunk ...
    chunk = number of its first record u64 | size u32 | crc32 of what follows the header u32
          | crc32 of the header before it u32 | records as a msgpack array, deflated       (big endian)

Every process writes a file of its own, and one that is started again writes another, so that nothing is ever appended
to what a killed process has left unfinished. Chunks are made and written by a thread of their own, 20 times a second:
who records something pays for appending it to a queue. A killed process takes at most what it recorded in the last
50 ms with it. Who can write no more, as on a full disk, says so in the file: over what is there of an unfinished chunk,
or over the last whole ones, which takes no room.

A file is input like any other: both sizes of a chunk are compared with bounds before anything is allocated for it, and
records are decoded into declared types only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import HistoryError
from offbeat.history.records import FORMAT, READS, HistoryEnded, HistoryHeader, Kind, Record
from offbeat.safe_read import UnreadableError, decode, open_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO

_log = logging.getLogger("offbeat")
_MAGIC = b"offbeat history\n"
_CHUNK = struct.Struct("!QII")
_CHECK = struct.Struct("!I")
_FLUSH_S = 0.05
_MOST_BYTES = 1 << 20  # of a chunk, before and after it is inflated
_MOST_GROWTH = 64  # so many times a chunk may grow when it is inflated
_MOST_TOGETHER = 256  # records in a chunk; one is at most 256 KiB of text, but most are 40 bytes
_MOST_QUEUED = 1 << 18  # records that may wait for a slow disk, or one that is full
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MOST_FILES = 10_000  # of one name, in a folder
_MOST_GIVEN = 8  # whole chunks that are given up, so that there is room to say that nothing more is written


class HistoryWriter:
    """A writer that appends records to a new file. Never raises once it is made, and waits for the disk only in
    `flush` and `close`.

    Where the disk is full it keeps what is recorded in memory until there is room, or until that is too much.

    Args:
        folder: is made if there is none.
        name: of the file; one with a number is taken if there is one of this name.
        kind: of process.
        job: that it takes part in.
        rank: of a worker.

    Raises:
        OSError: if there can be no such file.
    """

    def __init__(self, folder: Path, name: str, *, kind: Kind, job: str, rank: int = 0) -> None:
        from offbeat.version import __version__

        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._fd = _create(folder, name)
        self._queue: deque[Record] = deque()
        self._number = 0  # of the next record to write
        self._is_over = False  # nothing is recorded any more
        self._unwritten = b""  # of the last chunk
        self._size = 0  # of the file
        self._whole: deque[tuple[int, int]] = deque(maxlen=_MOST_GIVEN)  # where chunks end, and what comes next there
        self._why = ""  # nothing more can be written
        self._full = ""  # why nothing can be written at present
        self._stop, self._writing = threading.Event(), threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._thread = threading.Thread(target=self._run, name="offbeat-history", daemon=True)
        self.append(HistoryHeader(FORMAT, kind, job, rank, time.time(), __version__))
        self.flush()  # so that of a process that is killed at once it is known that it was there
        self._thread.start()

    def append(self, record: Record) -> None:
        """Queue a record; returns at once."""
        if self._is_over:
            return
        self._queue.append(record)
        if len(self._queue) > _MOST_QUEUED:
            self._give_up(self._full or "the disk is too slow")

    def flush(self) -> None:
        """Write what is queued; waits for the disk."""
        with self._writing:
            self._flush()

    def close(self, why: str = "") -> None:
        """Write what is queued, and that nothing is missing; a second call does nothing.

        Args:
            why: it ends before the job does.
        """
        if self._stop.is_set():
            return
        self.append(HistoryEnded(why[: 1 << 10]))
        self._stop.set()
        self._thread.join()
        if self._full and not self._is_over:
            self._give_up(self._full)
            self._write_why()
        self._is_over = True
        os.close(self._fd)

    def _run(self) -> None:
        while not self._stop.wait(_FLUSH_S):
            self.flush()
        self.flush()

    def _flush(self) -> None:
        """Write the queue to the file, on one thread at a time: another may give up meanwhile."""
        while (self._queue or self._unwritten) and not self._is_over:
            if not self._unwritten:
                together = [self._queue.popleft() for _ in range(min(len(self._queue), _MOST_TOGETHER))]
                self._unwritten = (b"" if self._number else _MAGIC) + _chunk(self._number, together, self._encoder)
                self._number += len(together)
            try:
                while self._unwritten:
                    size = os.write(self._fd, self._unwritten)
                    self._unwritten, self._size = self._unwritten[size:], self._size + size
                self._whole.append((self._size, self._number))
            except OSError as error:  # a full disk is no reason to end the run
                if error.errno not in _FULL:
                    self._give_up(error.strerror or str(error))
                    continue
                self._wait_for_room(error.strerror or str(error))
                return
            if self._full:
                self._full = ""
                _log.warning("The history %s is written again; nothing is missing in it.", self.path)
        if self._is_over:
            self._queue.clear()
            self._write_why()

    def _wait_for_room(self, why: str) -> None:
        if not self._full:
            _log.warning(
                "Cannot write the history %s at present: %s. Up to %d records are kept in memory until there is room.",
                self.path,
                why,
                _MOST_QUEUED,
            )
        self._full = why

    def _give_up(self, why: str) -> None:
        self._is_over, self._why = True, why
        _log.warning("Cannot write the history %s any further: %s. Training continues without it.", self.path, why)

    def _write_why(self) -> None:
        """Have the file end with why nothing more is in it; once, and on the thread that writes."""
        why, self._why = self._why, ""
        while why and self._whole:
            place, number = self._whole.pop()
            last = _chunk(number, [HistoryEnded(why[: 1 << 10], gave_up=True)], self._encoder)
            with contextlib.suppress(OSError):  # no room there: then in the place of the chunk before
                if os.pwrite(self._fd, last, place) == len(last):
                    os.ftruncate(self._fd, place + len(last))
                    return


class HistoryLog:
    """A file that a `HistoryWriter` has written, to be iterated over.

    Args:
        path: of it.

    Raises:
        HistoryError: if it cannot be read, or is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_torn = False  # after iterating: it ends in the middle of a chunk
        self.gave_up = ""  # after iterating: why its writer could write no more, while its process went on
        first = next(iter(self), None)
        if not isinstance(first, HistoryHeader):
            raise HistoryError(f"Cannot read {path}: it says nothing of who wrote it. It was cut off at its beginning.")
        if first.format not in READS:
            raise HistoryError(
                f"Cannot read {path}: its format is {first.format}, this version of offbeat reads "
                f"{' and '.join(map(str, READS))}. It was written "
                f"by offbeat {first.offbeat}."
            )
        self.header = first

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records, in order.

        Raises:
            HistoryError: if it cannot be read, or is damaged before its end.
        """
        try:
            with open_file(self.path) as file:
                yield from self._records(file)
        except OSError as error:
            raise HistoryError(f"Cannot read {self.path}: {error.strerror}.") from error

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        self.is_torn, self.gave_up = False, ""
        if (magic := file.read(len(_MAGIC))) != _MAGIC:
            if _MAGIC.startswith(magic):
                self.is_torn = True
                return
            raise HistoryError(f"Cannot read {self.path}: it is no history of offbeat's.")
        number = 0
        while payload := self._payload(file, number):
            try:
                records = decode(_DECODER.decode, payload)
            except UnreadableError as error:
                raise self._damaged(number, str(error)) from error
            number += len(records)
            if records and isinstance(last := records[-1], HistoryEnded) and last.gave_up:
                self.gave_up = last.why
            yield from records

    def _payload(self, file: BinaryIO, number: int) -> bytes:
        """The next chunk, inflated; empty at the end, or what a killed process left of one."""
        head = file.read(_CHUNK.size + _CHECK.size)
        if len(head) < _CHUNK.size + _CHECK.size:
            self.is_torn = bool(head)
            return b""
        first, size, crc = _CHUNK.unpack_from(head)
        if zlib.crc32(head[: _CHUNK.size]) != _CHECK.unpack_from(head, _CHUNK.size)[0]:
            raise self._damaged(number, "a checksum is wrong")
        if first != number:
            raise self._damaged(number, f"the next one there is number {first}")
        if not 0 < size <= _MOST_BYTES:
            raise self._damaged(number, f"{size} bytes belong together, and {_MOST_BYTES} is the most")
        data = file.read(size)
        if len(data) < size:
            self.is_torn = True
            return b""
        if zlib.crc32(data) != crc:
            raise self._damaged(number, "a checksum is wrong")
        inflating, most = zlib.decompressobj(), min(_MOST_BYTES, _MOST_GROWTH * size)
        try:
            payload = inflating.decompress(data, most)
        except zlib.error as error:
            raise self._damaged(number, str(error)) from error
        if not inflating.eof or inflating.unused_data or not payload:
            raise self._damaged(number, f"it is no whole chunk of at most {most} bytes")
        return payload

    def _damaged(self, number: int, why: str) -> HistoryError:
        return HistoryError(
            f"Cannot read {self.path} from record {number} on: {why}. The file was damaged after it was written."
        )


_DECODER = msgspec.msgpack.Decoder(list[Record])


def write_log(path: Path, records: Iterable[Record]) -> None:
    """Write a file of these records, the first of which is its `HistoryHeader`; for tests and tools.

    Raises:
        OSError: if it cannot be written.
    """
    records, encoder, number = list(records), msgspec.msgpack.Encoder(), 0
    with path.open("wb") as file:
        file.write(_MAGIC)
        while number < len(records):
            together = records[number : number + _MOST_TOGETHER]
            file.write(_chunk(number, together, encoder))
            number += len(together)


def _chunk(number: int, records: list[Record], encoder: msgspec.msgpack.Encoder) -> bytes:
    """Encode these records; in several chunks, if they are large."""
    plain = encoder.encode(records)
    if len(plain) > _MOST_BYTES // 2 and len(records) > 1:
        half = len(records) // 2
        return _chunk(number, records[:half], encoder) + _chunk(number + half, records[half:], encoder)
    data = zlib.compress(plain, 1)
    if len(plain) > _MOST_GROWTH * len(data) // 2:
        data = zlib.compress(plain, 0)
    head = _CHUNK.pack(number, len(data), zlib.crc32(data))
    return head + _CHECK.pack(zlib.crc32(head)) + data


def _create(folder: Path, name: str) -> tuple[Path, int]:
    """A file that was not there; its descriptor."""
    for number in range(1, _MOST_FILES):
        path = folder / (f"{name}.log" if number == 1 else f"{name}.{number}.log")
        try:
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
    raise OSError(f"there are {_MOST_FILES} histories called {name}")
