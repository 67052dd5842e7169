"""The totals of the records, per worker.

Rates, shares, compute per step and `waited_s` leave out the first step, because it holds the start-up of the process;
`samples`, `bytes_sent` and `wait_s` hold everything.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.report.formatting import span
from offbeat.report.records import OF_JOB, EndRecord, EventRecord, LogRecord, ResourceRecord, StartRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat.report.records import Record

_RECENT = 20  # steps that the live view's rates are taken over
_FEWEST_STEPS = 5  # to compare workers over
PACE = 1.15
"""A worker sets the pace if it takes this many times as long as the usual one; less is noise on a busy machine."""


@dataclass
class WorkerTotals:
    """One worker's sums.

    Args:
        rank: the worker's.
        step: the last one it completed, -1 if none.
        values: what its script logged last, by name.
        cpu_cores: sum of `used` samples. memory_bytes: the most it had.
    """

    rank: int
    host: str = ""
    steps: int = 0
    step: int = -1
    samples: int = 0
    bytes_sent: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    compute_s: float = 0.0
    first: StepRecord | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    last_event: str = ""
    ended: bool = False
    error: str | None = None
    cpu_cores: float = 0.0
    memory_bytes: int = 0
    used: int = 0
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, record: Record) -> None:
        """Take in one record of this worker's."""
        if isinstance(record, StepRecord):
            self.first = self.first or record
            self.steps += 1
            self.step = record.step
            self.samples += record.samples
            self.bytes_sent += record.bytes_sent
            self.step_s += record.step_s
            self.compute_s += record.compute_s
            self.wait_s += record.wait_s
            self.recent.append(record)
        elif isinstance(record, LogRecord):
            self.values.update(record.values)
        elif isinstance(record, StartRecord):
            self.host = record.host
        elif isinstance(record, EventRecord):
            self.last_event = record.text
        elif isinstance(record, ResourceRecord):
            self.used += 1
            self.cpu_cores += record.cpu_cores
            self.memory_bytes = max(self.memory_bytes, record.memory_bytes)
        elif isinstance(record, EndRecord):
            self.ended, self.error = True, record.error

    @property
    def steps_per_s(self) -> float:
        return self._rate(self.steps, 1)

    @property
    def samples_per_s(self) -> float:
        return self._rate(self.samples, self.first.samples if self.first else 0)

    @property
    def waiting_share(self) -> float:
        """Part of its time in which it waited for others."""
        return self._rate(self.wait_s, self.first.wait_s if self.first else 0.0)

    @property
    def waited_s(self) -> float:
        """The seconds that `waiting_share` is made of."""
        return self.wait_s - (self.first.wait_s if self.first and self.steps > 1 else 0.0)

    @property
    def compute_share(self) -> float:
        """Part of its time in which it computed."""
        return self._rate(self.compute_s, self.first.compute_s if self.first else 0.0)

    @property
    def compute_per_step_s(self) -> float:
        return self.compute_share / self.steps_per_s if self.steps_per_s else 0.0

    def _rate(self, total: float, first: float) -> float:
        """Per second of the steps after the first; of the first if there is no other."""
        first_s = self.first.step_s if self.first else 0.0
        if self.steps == 1:
            return total / first_s if first_s else 0.0
        return (total - first) / (self.step_s - first_s) if self.step_s > first_s else 0.0

    @property
    def recent_samples_per_s(self) -> float:
        took_s = sum(step.step_s for step in self.recent)
        return sum(step.samples for step in self.recent) / took_s if took_s else 0.0

    @property
    def recent_waiting_share(self) -> float:
        took_s = sum(step.step_s for step in self.recent)
        return sum(step.wait_s for step in self.recent) / took_s if took_s else 0.0


def tally(records: Iterable[Record]) -> list[WorkerTotals]:
    """The sums of all workers, in order of rank."""
    found: dict[int, WorkerTotals] = {}
    for record in records:
        if record.rank == OF_JOB:
            continue
        found.setdefault(record.rank, WorkerTotals(record.rank)).add(record)
    return [found[rank] for rank in sorted(found)]


def steps_heading(workers: Iterable[WorkerTotals]) -> str:
    """The heading of the workers' steps: which are meant, if some were made before the run began."""
    return "run's steps" if any(worker.first and worker.first.step for worker in workers) else "steps"


def pace(records: Sequence[Record]) -> str:
    """Say which worker sets the pace, in one sentence; "" if there is too little to compare."""
    shared, count = _shared(records)
    workers = tally(shared)
    if len(workers) < 2 or count < _FEWEST_STEPS:
        return ""
    slowest = max(workers, key=lambda worker: worker.compute_per_step_s)
    others = [worker for worker in workers if worker is not slowest]
    usual_s = statistics.median_low(worker.compute_per_step_s for worker in others)
    if slowest.compute_per_step_s < PACE * usual_s:
        return f"No worker stands out: all {_habits(workers)} of the time for communication and for each other."
    return (
        f"Rank {slowest.rank} sets the pace: it computes {slowest.compute_per_step_s * 1e3:.1f} ms per step and waits "
        f"{slowest.waiting_share:.0%} of the time; the others {_habits(others)}."
    )


def told_pace(records: Sequence[Record]) -> str:
    """The run's own sentence about its pace when it ended: a server, or the tuning of batches, knows more."""
    told = [record.text for record in records if isinstance(record, EventRecord) and record.what == "pace"]
    return told[-1] if told else ""


def _habits(workers: Sequence[WorkerTotals]) -> str:
    computing = span([worker.compute_per_step_s * 1e3 for worker in workers], ".1f", " ms")
    return f"compute {computing} per step and wait {span([worker.waiting_share for worker in workers], '.0%')}"


def _shared(records: Sequence[Record]) -> tuple[list[Record], int]:
    """The records without the steps that not all workers have, and how many steps that leaves each.

    A worker that is killed takes its last records along: what the others did meanwhile is no comparison.
    """
    steps: dict[int, dict[tuple[int, int], StepRecord]] = {
        record.rank: {} for record in records if record.rank != OF_JOB
    }
    for record in records:
        if isinstance(record, StepRecord):
            # A second model's steps have the same numbers, and so have those after a checkpoint was loaded.
            own, nth = steps[record.rank], 0
            while (record.step, nth) in own:
                nth += 1
            own[record.step, nth] = record
    common = set.intersection(*map(set, steps.values())) if steps else set()
    rest: list[Record] = [record for record in records if not isinstance(record, StepRecord)]
    return rest + [record for own in steps.values() for key, record in own.items() if key in common], len(common)
