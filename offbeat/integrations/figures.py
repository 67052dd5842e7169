"""Figures of how a run's workers train, by name, for those who draw them: from its metrics.jsonl, as that grows.

    offbeat/samples_per_s        of all workers together
    offbeat/step_s, wait_s, compute_s, communication_s    mean of a step
    offbeat/bytes_sent           by all, since the beginning
    offbeat/staleness, dropped   updates that a gradient is behind, mean; gradients that are in no update, in all
    offbeat/rank3/wait_s, compute_s    of one worker

A straggler computes longest and waits least.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from offbeat.report.records import EventRecord, Records, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PREFIX = "offbeat/"
METRICS = "metrics.jsonl"
RUN_DIR = "offbeat-run"
"""The folder of metrics in a framework's own; by a name that no import would find there."""
_MEANS = ("step_s", "wait_s", "compute_s", "communication_s")
_OF_EACH = ("wait_s", "compute_s")


class Window(NamedTuple):
    """Some steps, and what happened in them.

    Args:
        step: the last of them; 0 if there was none.
        values: figures by name; none without a step.
        events: in the order in which they were written.
    """

    step: int
    values: dict[str, float]
    events: list[EventRecord]

    @property
    def with_markers(self) -> dict[str, float]:
        """The figures, and 1 for each kind of event, for those who draw nothing but numbers."""
        return self.values | {f"{PREFIX}{event.what}": 1.0 for event in self.events}


class RunFigures:
    """The news in a run's folder, since it was looked at last.

    Args:
        run_dir: the folder.
        is_all: whether all that is there counts, and not only what is written from now on.
    """

    def __init__(self, run_dir: Path, *, is_all: bool = False) -> None:
        path = run_dir / METRICS
        self._records = Records(path, 0 if is_all or not path.exists() else path.stat().st_size)
        self._bytes_sent = self._dropped = 0

    def new(self) -> Window:
        """Read the news, together."""
        steps, events = self._read()
        return self._window(steps, events)

    def windows(self, together: int) -> Iterator[Window]:
        """Read the news, so many steps together, and what happened behind the last one of them.

        Args:
            together: steps of a window, at least 1.
        """
        steps, events = self._read()
        parts: dict[int, list[StepRecord]] = defaultdict(list)
        for step in steps:
            parts[step.step // together].append(step)
        for number in sorted(parts):
            yield self._window(parts[number], [])
        if events:
            yield Window(events[-1].step, {}, events)

    def _read(self) -> tuple[list[StepRecord], list[EventRecord]]:
        steps: list[StepRecord] = []
        events: list[EventRecord] = []
        while records := self._records.new():
            steps += [record for record in records if isinstance(record, StepRecord)]
            events += [record for record in records if isinstance(record, EventRecord)]
        return steps, events

    def _window(self, steps: Sequence[StepRecord], events: list[EventRecord]) -> Window:
        return Window(max((one.step for one in steps), default=0), self._of(steps), events)

    def _of(self, steps: Sequence[StepRecord]) -> dict[str, float]:
        if not steps:
            return {}
        ranks: dict[int, list[StepRecord]] = defaultdict(list)
        for step in steps:
            ranks[step.rank].append(step)
        self._bytes_sent += sum(step.bytes_sent for step in steps)
        self._dropped += sum(step.dropped for step in steps)
        took_s = {rank: sum(step.step_s for step in own) for rank, own in ranks.items()}
        figures = {
            "samples_per_s": sum(
                sum(step.samples for step in own) / took_s[rank] for rank, own in ranks.items() if took_s[rank]
            ),
            **{name: statistics.fmean(getattr(step, name) for step in steps) for name in _MEANS},
            "bytes_sent": self._bytes_sent,
            "staleness": statistics.fmean(step.staleness for step in steps),
            "dropped": self._dropped,
            **{
                f"rank{rank}/{name}": statistics.fmean(getattr(step, name) for step in own)
                for rank, own in sorted(ranks.items())
                for name in _OF_EACH
            },
        }
        return {PREFIX + name: float(value) for name, value in figures.items()}
