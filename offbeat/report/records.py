"""The lines of `metrics.jsonl`, and a reader that forgives a torn one.

All workers append whole lines to one file. A worker that is killed, or a disk that is full, can tear the last line it
wrote; a newer offbeat can write kinds of records that this one does not know. Neither may cost the rest of the file:
such lines are counted and skipped. NaN and infinity are written as null, and read as NaN.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CHUNK_BYTES = 4 << 20
_OPENING = b'{"kind":'
FILE_NAME = "metrics.jsonl"


class Bucket(msgspec.Struct, frozen=True):
    """What one bucket of gradients holds."""

    index: int
    size_bytes: int
    parameters: list[str] = []


class Start(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """A model was prepared; one per worker and model. `time_s` is unix time, here and below."""

    rank: int
    time_s: float
    world: int
    host: str = "?"
    pid: int = 0
    torch: str = "?"
    offbeat: str = "?"
    plan: str = ""
    model: str = ""
    buckets: list[Bucket] = []


class Step(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """One step of one worker.

    Args:
        time_s: when it began.
        compute_s: from its beginning to the end of the local backward.
        communication_s: from the first bucket issued to the last one done.
        wait_s: how long the worker was blocked: communication that compute did not hide.
        buckets: when each bucket was issued and done, in seconds from `time_s`.
    """

    rank: int
    step: int
    time_s: float
    step_s: float
    compute_s: float
    communication_s: float = 0.0
    wait_s: float = 0.0
    bytes_sent: int = 0
    samples: int = 0
    weight: float = 1.0
    buckets: list[tuple[float, float]] = []

    @property
    def end_s(self) -> float:
        """Unix time at which it ended."""
        return self.time_s + self.step_s

    @property
    def overlap_s(self) -> float:
        """How long buckets were on their way while the worker still computed."""
        if not self.buckets:
            return 0.0
        first_s = min(issued for issued, _ in self.buckets)
        last_s = max(done for _, done in self.buckets)
        return max(0.0, min(self.compute_s, last_s) - max(0.0, first_s))


class Log(msgspec.Struct, frozen=True, tag_field="kind", tag="log"):
    """Values of the user's, such as the loss; None stands for NaN or infinity."""

    rank: int
    step: int
    time_s: float
    values: dict[str, float | None]


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag="event"):
    """Something worth telling people about, such as a stall; `step` is -1 if it belongs to none."""

    rank: int
    time_s: float
    what: str
    text: str
    step: int = -1


class End(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """A worker ended in order; `error` says of what, if it failed."""

    rank: int
    time_s: float
    steps: int = 0
    error: str | None = None


Record = Start | Step | Log | Event | End
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Follower:
    """Reads what a file has grown by, a bounded piece at a time.

    Call order: `poll` as often as wanted; an empty list means that there is nothing new now.

    Args:
        path: the file; it need not exist yet.
        begin_bytes: where to begin, such as the size of what an earlier run left in the same file.

    Attributes:
        at_bytes: how far it has read.
        unread: lines that were skipped because they are no record.
        first_error: what was wrong with the first of them.
    """

    def __init__(self, path: Path, begin_bytes: int = 0) -> None:
        self._path = path
        self.at_bytes = begin_bytes
        self._lost = False  # inside a line too long to be a record, until its end is found
        self.unread = 0
        self.first_error: str | None = None

    def poll(self) -> list[Record]:
        """The records of the whole lines that were added since the last call, at most 4 MiB of them."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.at_bytes:
                    self.at_bytes = 0  # another file took its place
                file.seek(self.at_bytes)
                data = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            if len(data) == _CHUNK_BYTES:
                self._skip("a line longer than 4 MiB")
                self._lost = True
                self.at_bytes += len(data)
            return []
        self.at_bytes += len(whole) + 1
        lines = whole.split(b"\n")
        if self._lost:
            self._lost = False
            del lines[0]
        return [record for line in lines if line.strip() and (record := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Record | None:
        try:
            return _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._skip(str(error))
        # Another worker's line may hang on to one that was torn.
        at = line.rfind(_OPENING)
        if at > 0:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                return _DECODER.decode(line[at:])
        return None

    def _skip(self, why: str) -> None:
        if not self._lost:
            self.unread += 1
        self.first_error = self.first_error or why


def read_records(path: Path, follower: Follower | None = None) -> Iterator[Record]:
    """All records that are in the file now, in the order in which they were written.

    Args:
        path: the file.
        follower: the reader to use, for who wants to know what it skipped.

    Raises:
        OffbeatError: if the file is missing, empty, or holds no record at all.
    """
    folder = path.parent
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise OffbeatError(
            f"Cannot report on {folder}: {path.name} cannot be read ({error.strerror}). "
            "Give the run folder that `offbeat run` made, such as runs/20260131-120000-train-4711."
        ) from error
    if size_bytes == 0:
        raise OffbeatError(
            f"Cannot report on {folder}: {path.name} is empty, because no worker prepared a model. "
            "See the output of the run, and run it again."
        )
    follower = follower or Follower(path)
    found, seen_bytes = False, -1
    while follower.at_bytes != seen_bytes:
        seen_bytes = follower.at_bytes
        for record in follower.poll():
            found = True
            yield record
    if not found:
        why = follower.first_error or "its only line has no end"
        raise OffbeatError(
            f"Cannot report on {folder}: {path.name} holds no record ({why}). "
            "Give a file that offbeat wrote, or run again if this one is damaged."
        )
