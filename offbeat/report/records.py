"""The lines of metrics.jsonl.

All workers append whole lines to one file. A worker that is killed, or a disk that is full, may leave half a line: it
is waited for while the run goes on, and left out (and counted) afterwards. So are lines of a newer offbeat.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_OPENING = b'{"kind":'
_MOST_BYTES = 64 << 20  # taken in at once
_LATELY_BYTES = 1 << 16  # more than the last words of all workers


class BucketRecord(msgspec.Struct, frozen=True):
    """One bucket of a model's layout."""

    index: int
    size_bytes: int
    parameters: list[str]


class StartRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="start", kw_only=True):
    """A worker has prepared a model.

    Args:
        first_here, here: the first of the workers on its machine, and their number; 0 if that is not known.
    """

    rank: int
    time_s: float
    world: int
    host: str
    pid: int
    torch: str
    offbeat: str
    plan: str
    model: str
    buckets: list[BucketRecord]
    first_here: int = 0
    here: int = 0


class LayoutRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="layout", kw_only=True):
    """The buckets in which gradients lie from this step on; the blocks of a schedule, if there is one."""

    rank: int
    step: int
    time_s: float
    buckets: list[BucketRecord]


class StepRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="step", kw_only=True):
    """One exchange of one worker.

    Args:
        wait_s: for the others; `early_wait_s` of it before the exchange, for data or answers.
        buckets: [issued, done] of each, in seconds since `time_s`.
        dropped: what was brought is not in the parameters.
        buckets_of: the earlier step whose exchange the buckets are, and this one has hidden; -1 if they are this one's.
        waits: [began, ended, bucket] of each wait for one of these buckets, in seconds since `time_s`.
        backward: [began, ended], likewise; None where nothing is hidden behind the next step.
        between: [first round done, second issued] of each bucket, likewise, if its sum is made in two rounds.
    """

    rank: int
    step: int
    time_s: float
    step_s: float
    compute_s: float
    communication_s: float
    wait_s: float
    early_wait_s: float = 0.0
    bytes_sent: int
    samples: int
    weight: float
    staleness: int = 0
    buckets: list[tuple[float, float]]
    dropped: bool = False
    buckets_of: int = -1
    waits: list[tuple[float, float, int]] = []
    backward: tuple[float, float] | None = None
    between: list[tuple[float, float]] = []


class LogRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="log", kw_only=True):
    """Values that the script logged."""

    rank: int
    step: int
    time_s: float
    values: dict[str, float | None]  # JSON has no NaN: it is null


OF_JOB = -1
"""The rank of events that no worker recorded: what the launcher saw or did."""


class EventRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="event", kw_only=True):
    """An event worth showing to people.

    Args:
        what: such as "stall", "swap", "membership", "server", "pause" and "resumption" (of all at a server); "killed",
            "exited" and "interrupted" are the launcher's.
        plan: that holds from then on, as TOML, if that is what happened.
    """

    rank: int
    step: int
    time_s: float
    what: str
    text: str
    plan: str = ""


class ResourceRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="resources", kw_only=True):
    """The resources that a worker's process used over about a second, which ended at `time_s`.

    Args:
        cpu_cores: processor seconds per second.
        memory_bytes: resident.
        sent_bytes_per_s: payload of its exchanges.
    """

    rank: int
    time_s: float
    cpu_cores: float
    memory_bytes: int
    sent_bytes_per_s: float


class EndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="end", kw_only=True):
    """A worker is done; `error` is what it died of, if it could still say so, and `left` if it was asked to leave."""

    rank: int
    time_s: float
    steps: int
    error: str | None
    left: bool = False


Record = StartRecord | LayoutRecord | StepRecord | LogRecord | EventRecord | ResourceRecord | EndRecord


class BucketNames:
    """The buckets of each step, by rank: those of a schedule from the step on from which it held.

    Args:
        records: in the order in which they were written.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._layouts: dict[int, list[tuple[int, Sequence[BucketRecord]]]] = {}
        for record in records:
            if isinstance(record, StartRecord | LayoutRecord):
                first = record.step if isinstance(record, LayoutRecord) else -1
                self._layouts.setdefault(record.rank, []).append((first, record.buckets))

    def of(self, step: StepRecord) -> Sequence[BucketRecord]:
        """The buckets whose times a step's record has; none if they are not known."""
        number = step.step if step.buckets_of < 0 else step.buckets_of
        layouts = [buckets for first, buckets in self._layouts.get(step.rank, ()) if first <= number]
        return layouts[-1] if layouts else ()


def label(bucket: BucketRecord) -> str:
    """The layers between which a bucket reaches.

    >>> label(BucketRecord(0, 8, ["fc.bias", "fc.weight", "conv.weight"]))
    'fc.bias … conv.weight'
    """
    names = bucket.parameters
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


class Records:
    """The records in a run's metrics.jsonl, also while it grows.

    Args:
        path: the file; it need not exist yet.
        skip_bytes: how much to leave out, such as what an earlier run wrote.
    """

    def __init__(self, path: Path, skip_bytes: int = 0) -> None:
        self._path = path
        self._offset = skip_bytes
        self._decoder = msgspec.json.Decoder(Record)
        self.damaged = 0  # lines that could not be read
        self.earlier = 0  # runs in the file before the last one, as far as it was read by `all`

    def new(self) -> list[Record]:
        """The records that were added since the last call; a line that is not whole yet comes with a later one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return self._decode(whole)

    def all(self) -> list[Record]:
        """All records from here to the end, of the last run in the file."""
        found: list[Record] = []
        while batch := self.new():
            found += batch
        last, self.earlier = last_run(found)
        return last

    def _decode(self, lines: bytes) -> list[Record]:
        found = []
        for line in filter(None, lines.splitlines()):  # who has left half a line begins a new one
            try:
                found.append(self._decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.damaged += 1
                found += self._rescue(line)
        return found

    def _rescue(self, line: bytes) -> list[Record]:
        """Another worker's record that hangs on to the end of a torn one."""
        start = line.rfind(_OPENING)
        if start > 0:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                return [self._decoder.decode(line[start:])]
        return []


def append(path: Path, record: Record) -> None:
    """Add a record to a file that may have records of others: the launcher's of what the workers cannot say.

    What cannot be written is left out: how the job ends is told all the same.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, msgspec.json.encode(record) + b"\n")
        finally:
            os.close(fd)


def has_ended(path: Path) -> bool:
    """Whether all workers that have written to a metrics.jsonl lately have ended, as far as they could still say so."""
    if not path.is_file():
        return False
    size_bytes = path.stat().st_size
    lately = Records(path, max(0, size_bytes - _LATELY_BYTES)).new()
    # A sample may be written just behind its worker's end; what is of the whole job has rank -1.
    last = {record.rank: record for record in lately if record.rank >= 0 and not isinstance(record, ResourceRecord)}
    return bool(last) and all(_is_of_end(record) for record in last.values())


def _is_of_end(record: Record) -> bool:
    return isinstance(record, EndRecord) or (isinstance(record, EventRecord) and record.what == "exited")


def last_run(records: Sequence[Record]) -> tuple[list[Record], int]:
    """The records of the last run in a folder that was used more than once, and how many runs came before it.

    A worker begins anew when it starts after its end, or as another process; with the second of these begins another
    run.
    """
    begun: dict[int, int] = {}  # of the newest run, by rank
    earlier = 0
    pids: dict[int, int] = {}
    ended: set[int] = set()
    for index, record in enumerate(records):
        if isinstance(record, StartRecord):
            if record.rank in ended or pids.get(record.rank, record.pid) != record.pid:
                if not begun or record.rank in begun:
                    begun, earlier = {}, earlier + 1
                begun[record.rank] = index
                ended.discard(record.rank)
            pids[record.rank] = record.pid
        elif isinstance(record, EndRecord):
            ended.add(record.rank)
    if not begun:
        return list(records), 0
    first = min(begun.values())  # a rank that only the earlier run had is left out, too
    last = [record for index, record in enumerate(records) if index >= begun.get(record.rank, first)]
    return last, earlier
