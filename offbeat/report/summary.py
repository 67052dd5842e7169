"""`Run`: the records of a run added up, while it lasts or afterwards.

Rates and shares leave out each worker's first step, because it holds the start-up of the process; totals (bytes, seconds
waited, samples) hold everything. Memory does not grow with the number of steps.

A folder that was used twice holds several runs: a worker that starts again, after its end or as another process, begins
anew, and `Run.earlier` counts what was left behind.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.report.curve import Curve
from offbeat.report.records import End, Event, Follower, Log, Start, Step, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from offbeat.report.records import Record

_RECENT_S = 3.0
_RACES_OPEN = 4096  # steps that some workers have ended and others not
_EVENTS_KEPT = 500
# A worker paces the run if it computes this much longer than the others; less is noise on a busy machine.
_CLEARLY = 1.15
_NETWORK_BOUND = 0.3


@dataclass
class Part:
    """Sums over the steps of a worker after its first."""

    steps: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    overlap_s: float = 0.0
    wait_s: float = 0.0
    samples: int = 0

    def add(self, step: Step) -> None:
        """One more step."""
        self.steps += 1
        self.step_s += step.step_s
        self.compute_s += step.compute_s
        self.overlap_s += step.overlap_s
        self.wait_s += step.wait_s
        self.samples += step.samples


@dataclass
class Worker:
    """One worker's part in the run.

    Attributes:
        steps, samples, bytes_sent, waited_s: totals, the first step included.
        paced: in how many of `Run.races` steps this worker computed longest.
        values: the last value of each name that was logged; NaN if it was not finite.
        begun_s, last_s: unix time of its first and its latest record.
    """

    rank: int
    start: Start | None = None
    end: End | None = None
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    waited_s: float = 0.0
    paced: int = 0
    begun_s: float = math.inf
    last_s: float = 0.0
    last_step: int = -1
    after_first: Part = field(default_factory=Part)
    values: dict[str, float] = field(default_factory=dict)
    step_time: Curve = field(default_factory=Curve)
    logged: dict[str, Curve] = field(default_factory=dict)
    _recent: deque[Step] = field(default_factory=lambda: deque(maxlen=512))

    @property
    def name(self) -> str:
        """Such as ``rank 0 on host``."""
        return f"rank {self.rank}" + (f" on {self.start.host}" if self.start else "")

    @property
    def steps_per_s(self) -> float:
        """NaN before the second step."""
        return _ratio(self.after_first.steps, self.after_first.step_s)

    @property
    def samples_per_s(self) -> float:
        """NaN before the second step."""
        return _ratio(self.after_first.samples, self.after_first.step_s)

    @property
    def waiting_share(self) -> float:
        """The part of its time for which it was blocked, from 0 to 1; NaN before the second step."""
        return _ratio(self.after_first.wait_s, self.after_first.step_s)

    @property
    def compute_s(self) -> float:
        """Mean seconds per step from its beginning to the end of backward; NaN before the second step."""
        return _ratio(self.after_first.compute_s, self.after_first.steps)

    def recent(self) -> Part:
        """The last steps, about three seconds of them."""
        part = Part()
        for step in self._recent:
            if self.steps == 1 or step.end_s > self._recent[-1].end_s - _RECENT_S:
                part.add(step)
        return part

    def take(self, record: Record) -> None:
        """Add one of its records."""
        self.begun_s = min(self.begun_s, record.time_s)
        self.last_s = max(self.last_s, record.end_s if isinstance(record, Step) else record.time_s)
        match record:
            case Start():
                self.start = record
            case End():
                self.end = record
            case Step():
                self._take_step(record)
            case Log():
                for name, value in record.values.items():
                    self.values[name] = math.nan if value is None else value
                    self.logged.setdefault(name, Curve()).add(record.step, self.values[name])

    def _take_step(self, step: Step) -> None:
        if self.steps > 0:
            self.after_first.add(step)
            self.step_time.add(step.end_s, step.step_s)
        self.steps += 1
        self.samples += step.samples
        self.bytes_sent += step.bytes_sent
        self.waited_s += step.wait_s
        self.last_step = step.step
        self._recent.append(step)


class Run:
    """The records of a run added up.

    Call order: `take` for every record, in any order between workers; everything else at any time.

    Attributes:
        workers: by rank, those that have said something.
        events: the last 500, with stalls and what the engine noticed.
        races: steps that all workers have ended, so that the one who computed longest is known.
        earlier: workers' earlier lives in the same folder, which are left out.
        unread: lines of the file that are no record.
    """

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self.races = 0
        self.earlier = 0
        self.unread = 0
        self._open_races: OrderedDict[int, dict[int, float]] = OrderedDict()

    def take(self, record: Record) -> None:
        """Add one record."""
        worker = self.workers.get(record.rank)
        if worker is None or _begins_anew(worker, record):
            self._forget(worker)
            worker = self.workers[record.rank] = Worker(record.rank)
            self.workers = dict(sorted(self.workers.items()))
        worker.take(record)
        if isinstance(record, Event):
            self.events.append(record)
        elif isinstance(record, Step):
            self._race(worker, record)

    def take_all(self, records: Iterable[Record]) -> None:
        """Add records."""
        for record in records:
            self.take(record)

    def _forget(self, worker: Worker | None) -> None:
        if worker is None:
            return
        self.earlier += 1
        self.events = deque((e for e in self.events if e.rank != worker.rank), maxlen=_EVENTS_KEPT)
        self._open_races.clear()
        self.races = 0
        for other in self.workers.values():
            other.paced = 0

    def _race(self, worker: Worker, step: Step) -> None:
        """Note who computed longest. Steps are counted per worker, since two models share the engine's numbers."""
        if worker.steps == 1 or self.world < 2:
            return
        lap = self._open_races.setdefault(worker.steps, {})
        lap[worker.rank] = step.compute_s
        if len(lap) == self.world:
            self.workers[max(lap, key=lap.__getitem__)].paced += 1
            self.races += 1
            del self._open_races[worker.steps]
        elif len(self._open_races) > _RACES_OPEN:
            self._open_races.popitem(last=False)

    @property
    def world(self) -> int:
        """How many workers there are, as far as they have said."""
        said = max((w.start.world for w in self.workers.values() if w.start), default=0)
        return max(said, len(self.workers))

    @property
    def begun_s(self) -> float:
        """Unix time of the first record."""
        return min((w.begun_s for w in self.workers.values()), default=math.nan)

    @property
    def lasted_s(self) -> float:
        """From the first record to the last."""
        return max((w.last_s for w in self.workers.values()), default=math.nan) - self.begun_s

    @property
    def steps(self) -> int:
        """Of the worker that got farthest."""
        return max((w.steps for w in self.workers.values()), default=0)

    @property
    def steps_per_s(self) -> float:
        """Mean over the workers."""
        return _mean(w.steps_per_s for w in self.workers.values())

    @property
    def samples_per_s(self) -> float:
        """Of all workers together."""
        rates = [w.samples_per_s for w in self.workers.values() if not math.isnan(w.samples_per_s)]
        return sum(rates) if rates else math.nan

    @property
    def waiting_share(self) -> float:
        """Mean over the workers, from 0 to 1."""
        return _mean(w.waiting_share for w in self.workers.values())

    @property
    def bytes_sent(self) -> int:
        """By all workers together."""
        return sum(w.bytes_sent for w in self.workers.values())

    def value(self, name: str) -> float | None:
        """Mean over the workers of the last value logged under a name; None if nobody logged it."""
        values = [w.values[name] for w in self.workers.values() if name in w.values]
        return statistics.fmean(values) if values else None

    def names(self) -> list[str]:
        """What was logged: loss and accuracy first."""
        names = {name for w in self.workers.values() for name in w.values}
        return sorted(names, key=lambda name: (name != "loss", name != "accuracy", name))

    def outcome(self) -> str:
        """How the run ended, in one sentence."""
        failed = [w for w in self.workers.values() if w.end and w.end.error]
        if failed:
            # The first to go is the culprit more often than those who noticed.
            first = min(failed, key=lambda w: w.end.time_s if w.end else math.inf)
            assert first.end is not None
            others = f" ({len(failed) - 1} more ended with an error)" if len(failed) > 1 else ""
            return f"{first.name} ended with {(first.end.error or '').splitlines()[0]}{others}"
        missing = [str(rank) for rank in range(self.world) if rank not in self.workers or not self.workers[rank].end]
        if missing:
            ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
            return f"Not finished: {ranks} left no record of an end, so the run goes on, or was killed."
        return f"Finished: {len(self.workers)} worker{'s' * (len(self.workers) > 1)}, {self.steps} steps."

    def pace(self) -> str:
        """Who paces the run, and why, in one sentence."""
        ready = [w for w in self.workers.values() if not math.isnan(w.compute_s)]
        if len(ready) < 2:
            return "One worker alone: nobody waits for anybody." if self.world == 1 else "Too few steps to say who paces."
        slowest = max(ready, key=lambda w: w.compute_s - w.after_first.wait_s / w.after_first.steps)
        others = [w for w in ready if w is not slowest]
        theirs_s = statistics.median(w.compute_s for w in others)
        share = _mean(w.waiting_share for w in others)
        if slowest.compute_s > _CLEARLY * theirs_s:
            return (
                f"{slowest.name} paces the run: it computes {_ms(slowest.compute_s)} a step and waits "
                f"{slowest.waiting_share:.0%} of the time; the others compute {_ms(theirs_s)} and wait {share:.0%}."
            )
        everyone_s = statistics.median(w.compute_s for w in ready)
        even = f"No worker paces the run: all compute about {_ms(everyone_s)} a step"
        most = max(ready, key=lambda w: w.paced)
        if self.waiting_share > _NETWORK_BOUND:
            turns = (
                f" and being last changes between them (most often rank {most.rank}: {most.paced / self.races:.0%} of steps)"
                if self.races
                else ""
            )
            return f"{even}{turns}; they wait {self.waiting_share:.0%} of the time for communication and for each other."
        return f"{even} and wait {self.waiting_share:.0%} of the time."


def read_run(path: Path) -> Run:
    """The run in a `metrics.jsonl`.

    Raises:
        OffbeatError: if the file is missing, empty, or holds no record at all.
    """
    run = Run()
    follower = Follower(path)
    run.take_all(read_records(path, follower))
    run.unread = follower.unread
    return run


def _begins_anew(worker: Worker, record: Record) -> bool:
    if not isinstance(record, Start) or (worker.start is None and worker.end is None):
        return False
    return worker.end is not None or (worker.start is not None and worker.start.pid != record.pid)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
