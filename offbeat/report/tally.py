"""What the records add up to, per worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.report.records import End, Event, Log, Start, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.report.records import Record

_RECENT = 20  # steps that the live view's rates are taken over
# A worker sets the pace if the others wait at least this share of their time longer than it does.
_PACE = 0.1


@dataclass
class Tally:
    """One worker's sums.

    Args:
        rank: the worker's.
        step: the last one it completed, -1 if none.
        values: what its script logged last, by name.
    """

    rank: int
    host: str = ""
    steps: int = 0
    step: int = -1
    samples: int = 0
    bytes_sent: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    values: dict[str, float | None] = field(default_factory=dict)
    last_event: str = ""
    ended: bool = False
    error: str | None = None
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, record: Record) -> None:
        """Take in one record of this worker's."""
        if isinstance(record, Step):
            self.steps += 1
            self.step = record.step
            self.samples += record.samples
            self.bytes_sent += record.bytes_sent
            self.step_s += record.step_s
            self.compute_s += record.compute_s
            self.wait_s += record.wait_s
            self.recent.append(record)
        elif isinstance(record, Log):
            self.values.update(record.values)
        elif isinstance(record, Start):
            self.host = record.host
        elif isinstance(record, Event):
            self.last_event = record.text
        elif isinstance(record, End):
            self.ended, self.error = True, record.error

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.step_s if self.step_s else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s if self.step_s else 0.0

    @property
    def waiting_share(self) -> float:
        """Part of its time in which it waited for others."""
        return self.wait_s / self.step_s if self.step_s else 0.0

    @property
    def recent_samples_per_s(self) -> float:
        took_s = sum(step.step_s for step in self.recent)
        return sum(step.samples for step in self.recent) / took_s if took_s else 0.0

    @property
    def recent_waiting_share(self) -> float:
        took_s = sum(step.step_s for step in self.recent)
        return sum(step.wait_s for step in self.recent) / took_s if took_s else 0.0


def tally(records: Iterable[Record]) -> list[Tally]:
    """The sums of all workers, in order of rank."""
    found: dict[int, Tally] = {}
    for record in records:
        found.setdefault(record.rank, Tally(record.rank)).add(record)
    return [found[rank] for rank in sorted(found)]


def pace(workers: list[Tally]) -> str:
    """Who sets the pace, in one sentence."""
    busy = [worker for worker in workers if worker.steps]
    if len(busy) < 2:
        return ""
    slowest = min(busy, key=lambda worker: worker.waiting_share)
    others = [worker for worker in busy if worker is not slowest]
    least = min(worker.waiting_share for worker in others)
    if least - slowest.waiting_share < _PACE:
        return "No worker stands out: all wait about equally long."
    compute_ms = slowest.compute_s / slowest.steps * 1e3
    usual_ms = sorted(worker.compute_s / worker.steps for worker in others)[len(others) // 2] * 1e3
    return (
        f"Rank {slowest.rank} on {slowest.host} sets the pace: it computes {compute_ms:.1f} ms per step, the others "
        f"{usual_ms:.1f} ms, and they wait for it."
    )
