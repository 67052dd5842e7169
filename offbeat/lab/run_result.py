"""One run of one row, and what it amounts to: all ratios of a result are made from these.

A result file keeps the raw records of every repeat, so that any two rows can be compared later: `repeats` reads them
back.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.scenario import Scenario, TrainingScript

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.lab.arc_counters import Carried
    from offbeat.lab.link_sampler import Traffic
    from offbeat.lab.results import FaultCost, RawRun, ResultFile, SwapCost
    from offbeat.scenario import Replay
    from offbeat.topology import Arc


@dataclass(frozen=True)
class Reached:
    """The effort until rank 0 first measured the target: steps, seconds, and bytes that a worker sent, on average."""

    steps: int
    time_s: float
    sent_bytes: float


@dataclass
class RunResult:
    """The measurements of each worker, and offbeat's own (events, buckets, staleness)."""

    workers: list[RawRun]
    events: list[str] = field(default_factory=list)
    buckets: int = 0
    staleness: list[int] = field(default_factory=list)
    link: Traffic | None = None
    arcs: dict[Arc, Carried] = field(default_factory=dict)  # by each direction of each link
    seen_s: float = 0.0  # in which they passed
    recoveries: list[FaultCost] = field(default_factory=list)
    handovers: list[SwapCost] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def index(self) -> int:
        """The number of the repeat, from 0."""
        return self.workers[0].repeat

    @property
    def seconds_per_step(self) -> float:
        """Mean over the measured steps and workers."""
        return statistics.fmean(step for worker in self.workers for step in worker.step_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all workers together, each at its own pace."""
        return sum(worker.samples / sum(worker.step_s) for worker in self.workers)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a worker sent in the measured steps; mean over the workers."""
        return statistics.fmean(worker.bytes_sent for worker in self.workers)

    @property
    def final_metric(self) -> float | None:
        """The last measurement of rank 0; None if it measured nothing."""
        metrics = self.workers[0].metrics
        return metrics[-1][1] if metrics else None

    def stretches_s(self, begins: Sequence[int]) -> list[float | None]:
        """Mean over the workers' steps from each of these until before the next; None where none was measured.

        Args:
            begins: counted from the first that was measured; below 0 while warming up.
        """
        indices = [max(0, begin) for begin in begins]
        taken = [
            [step for worker in self.workers for step in worker.step_s[index:end]]
            for index, end in zip(indices, [*indices[1:], None], strict=False)
        ]
        return [statistics.fmean(steps) if steps else None for steps in taken]

    def time_to(self, workload: Replay | TrainingScript) -> float | None:
        """Training seconds until rank 0 first measured the workload's target, or None."""
        reached = self.reached(workload)
        return None if reached is None else reached.time_s

    def reached(self, workload: Replay | TrainingScript) -> Reached | None:
        """The effort until the workload's target was reached; None if it was not, or there is none.

        Files written before the steps of a metric were kept say 0 steps and bytes.
        """
        first = self.workers[0]
        for index, (time_s, value) in enumerate(first.metrics):
            if isinstance(workload, TrainingScript) and workload.reached(value):
                steps = first.metric_steps[index] if first.metric_steps else 0
                return Reached(steps, time_s, self.sent_bytes / len(first.step_s) * steps)
        return None


def repeats(report: ResultFile, row: str) -> list[RunResult]:
    """The runs of a row, in order."""
    own = [raw for raw in report.raw if raw.row == row]
    return [
        RunResult(sorted((raw for raw in own if raw.repeat == index), key=lambda raw: raw.rank))
        for index in sorted({raw.repeat for raw in own})
    ]


def reached(report: ResultFile, row: str) -> Reached | None:
    """The effort until a row reached the target, medians over its repeats; None if it did not in every one."""
    workload = Scenario.from_toml(report.scenario).workload
    runs = [one.reached(workload) for one in repeats(report, row)]
    found = [run for run in runs if run is not None]
    if not found or len(found) < len(runs):
        return None
    return Reached(
        steps=round(statistics.median(run.steps for run in found)),
        time_s=statistics.median(run.time_s for run in found),
        sent_bytes=statistics.median(run.sent_bytes for run in found),
    )


def behind_faults(report: ResultFile, row: str) -> dict[int, float]:
    """Seconds per step from each step at which the scenario has a fault until the next such step; medians."""
    scenario = Scenario.from_toml(report.scenario)
    steps = sorted({fault.step for fault in scenario.fault})
    begins = [step - scenario.run.warmup_steps for step in steps]
    found: dict[int, list[float]] = {}
    for one in repeats(report, row):
        for step, step_s in zip(steps, one.stretches_s(begins), strict=True):
            if step_s is not None:
                found.setdefault(step, []).append(step_s)
    return {step: statistics.median(values) for step, values in found.items()}
