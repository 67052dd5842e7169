"""The cost of a fault to those that it did not strike: the time until their next step, and the work that was lost.

Each fault answers for the time until the next one strikes, or until the end. See `FaultCost` for what is measured.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

from offbeat.lab.recorder import Begun, MeasuredStep
from offbeat.lab.results import FaultCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.fault_spec import Fault, Fired
    from offbeat.lab.jobs import RowJob
    from offbeat.lab.recorder import Line

Said = tuple[float, str]  # when, in seconds since 1970, and what


def recoveries(
    job: RowJob, repeat: int, fired: Sequence[Fired], lines: Sequence[Sequence[Line]], said: Sequence[Said]
) -> list[FaultCost]:
    """One for each fault that struck and is over at some time, in order of time.

    Args:
        fired: in that order.
        lines: what the recorders of rank 0, 1, ... wrote.
        said: what the job told of itself.
    """
    ahead_s = time.time() - time.perf_counter()  # of the clock of the recorders
    made = []
    for index, one in enumerate(fired):
        if one.fault.stays:
            continue
        end_s = fired[index + 1].time_s if index + 1 < len(fired) else math.inf
        struck_s = one.time_s - ahead_s
        others_s = back_s = redone = None
        if job.restarts:
            back_s = _back_s(one.fault.step - job.scenario.run.warmup_steps, struck_s, lines)
            redone = max(_redone(one.fault, own, job.scenario.run.warmup_steps) for own in lines)
        else:
            others_s = _others_s(_others(one.fault, lines), struck_s, end_s - ahead_s)
        words = [text for time_s, text in said if one.time_s <= time_s < end_s]
        made.append(
            FaultCost(
                row=job.row.name,
                repeat=repeat,
                fault=one.fault.words,
                others_s=others_s,
                back_s=back_s,
                redone_steps=redone,
                said=list(dict.fromkeys(words)),
            )
        )
    return made


def _others(fault: Fault, lines: Sequence[Sequence[Line]]) -> list[list[MeasuredStep]]:
    """The steps of each worker that is not struck itself."""
    is_one = fault.target == "worker" and fault.kind != "join"
    return [
        [line for line in own if isinstance(line, MeasuredStep)]
        for rank, own in enumerate(lines)
        if not (is_one and rank == fault.worker)
    ]


def _others_s(workers: Sequence[Sequence[MeasuredStep]], struck_s: float, end_s: float) -> float | None:
    """Seconds that the longest step ending in that time exceeds that worker's median; None without a step."""
    more_s = [
        max(took) - statistics.median(step.step_s for step in steps)
        for steps in workers
        if (took := [step.step_s for step in steps if struck_s < step.end_s <= end_s])
    ]
    return round(max(0.0, *more_s), 3) if more_s else None


def _back_s(step: int, struck_s: float, lines: Sequence[Sequence[Line]]) -> float | None:
    """Seconds until every worker had done that step, after the restart; None if one never did."""
    done_s = [
        next((line.end_s for line in _since_restart(own) if isinstance(line, MeasuredStep) and line.step == step), None)
        for own in lines
    ]
    times_s = [time_s - struck_s for time_s in done_s if time_s is not None]
    return round(max(times_s), 3) if len(times_s) == len(lines) else None


def _redone(fault: Fault, lines: Sequence[Line], warmup_steps: int) -> int:
    """Steps that this worker had done and did again."""
    later = _since_restart(lines)
    if not later:
        return 0
    before = [line.step + warmup_steps + 1 for line in lines[: -len(later)] if isinstance(line, MeasuredStep)]
    again = later[0]
    assert isinstance(again, Begun)
    return max(0, max(before, default=fault.step) - again.done)


def _since_restart(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines from the last beginning on; none if there was but one."""
    begun = [index for index, line in enumerate(lines) if isinstance(line, Begun)]
    return lines[begun[-1] :] if len(begun) > 1 else []
