"""The time of each bucket in the median step: when it was issued and had arrived, and what it held up."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.float_sum import add_up
from offbeat.report.plots import COLOURS, INK, svg
from offbeat.report.records import BucketNames, StepRecord, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.report.records import BucketRecord, Record

_MOST_BUCKETS = 64
_BAR = 0.3  # inches


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in the median step, over all workers; seconds since the step began.

    Args:
        name: "bucket 1 of 3", and between which layers it reaches.
        size_bytes: of its gradients; 0 if several buckets were exchanged as one.
        computed_s: when the worker had computed all of the step's gradients itself.
        held_up_s: how long the step waited for this bucket after that, and after the buckets before it.
    """

    name: str
    size_bytes: int
    issued_s: float
    arrived_s: float
    computed_s: float
    held_up_s: float


def bucket_times(records: Sequence[Record]) -> list[BucketTimes]:
    """The buckets of the steps after the first, in the order of the layout; none if none was exchanged."""
    steps = [step for step in steps_with_own_buckets(records) if step.step > 0 and step.buckets]
    if not steps:
        return []
    layout = BucketNames(records).of(steps[-1])
    count = statistics.mode(len(step.buckets) for step in steps)
    steps = [step for step in steps if len(step.buckets) == count]
    held = [_held_up(step) for step in steps]
    fences = [step.compute_s + step.early_wait_s for step in steps]
    computed_s = statistics.median(fences)

    def usual_s(index: int, end: int) -> float:
        """Seconds from the beginning of the median step; unequal steps are compared by when all was computed."""
        since = [step.buckets[index][end] - fence for step, fence in zip(steps, fences, strict=True)]
        return max(0.0, computed_s + statistics.median(since))

    return [
        BucketTimes(
            _name(index, count, layout),
            layout[index].size_bytes if count == len(layout) else 0,
            usual_s(index, 0),
            usual_s(index, 1),
            computed_s,
            statistics.median(one[index] for one in held),
        )
        for index in range(min(count, _MOST_BUCKETS))
    ]


def draw_buckets(times: Sequence[BucketTimes]) -> str:
    """A bar per bucket, from when it was issued to when it had arrived.

    Raises:
        ImportError: if matplotlib is not installed.
    """

    def draw(panels: Sequence[Any]) -> None:
        axes, computed_ms = panels[0], times[0].computed_s * 1e3
        for place, one in enumerate(times):
            issued_ms, arrived_ms = one.issued_s * 1e3, one.arrived_s * 1e3
            border_ms = min(max(issued_ms, computed_ms), arrived_ms)
            axes.barh(place, border_ms - issued_ms, left=issued_ms, color=COLOURS[2], height=0.6)
            axes.barh(place, arrived_ms - border_ms, left=border_ms, color=COLOURS[1], height=0.6)
        axes.axvline(computed_ms, color=INK, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(times)), [one.name.partition(" (")[0] for one in times])
        axes.set_ylim(len(times) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds since the step began; dashed: all computed; green: hidden behind it; orange: not")

    return svg(draw, heights=(1.2 + _BAR * len(times),), width=14.0)


def steps_with_own_buckets(records: Sequence[Record]) -> list[StepRecord]:
    """The steps, each with the times of its own exchange and with what waited for that: where it was hidden behind the
    next step these stand in that one's record.
    """
    steps = [record for record in records if isinstance(record, StepRecord)]
    by_number = {(step.rank, step.step): step for step in steps}
    found = []
    for step in steps:
        if step.buckets_of < 0:
            if step.backward is None:
                found.append(step)
            continue
        if (own := by_number.get((step.rank, step.buckets_of))) is None:
            continue
        late_s = step.time_s - own.time_s
        found.append(
            msgspec.structs.replace(
                own,
                buckets=[(issued_s + late_s, done_s + late_s) for issued_s, done_s in step.buckets],
                between=[(done_s + late_s, issued_s + late_s) for done_s, issued_s in step.between],
                waits=[(began_s + late_s, ended_s + late_s, index) for began_s, ended_s, index in step.waits],
                buckets_of=own.step,
            )
        )
    return found


def _held_up(step: StepRecord) -> list[float]:
    """Seconds that the step waited for each bucket."""
    if step.buckets_of >= 0:
        return [add_up(ended - began for began, ended, i in step.waits if i == j) for j in range(len(step.buckets))]
    latest = step.compute_s + step.early_wait_s
    held = [0.0] * len(step.buckets)
    for index in sorted(range(len(held)), key=lambda index: step.buckets[index][1]):
        arrived = step.buckets[index][1]
        held[index] = max(0.0, arrived - latest)
        latest = max(latest, arrived)
    return held


def _name(index: int, count: int, layout: Sequence[BucketRecord]) -> str:
    if count != len(layout):
        return "all buckets" if count == 1 else f"exchange {index + 1} of {count}"
    return f"bucket {index + 1} of {count} ({label(layout[index])})"
