"""The cost of each fault to those that it did not strike, in virtual time; the lab measures the same."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.fault_spec import Fault
    from offbeat.sim.result import SimResult


def others_s(played: SimResult, dropped: int) -> list[float | None]:
    """Seconds, for each fault that struck and is over at some time, in order of time, that the longest step of another
    worker which ended before the next one struck is longer than that worker's median; None if there is none.

    Args:
        dropped: first steps of each worker, which do not count.
    """
    ends_s = [list(itertools.accumulate(steps))[dropped:] for steps in played.step_s]
    found = []
    for index, (struck_s, fault) in enumerate(played.struck):
        if fault.stays:
            continue
        until_s = played.struck[index + 1][0] if index + 1 < len(played.struck) else math.inf
        more_s = [
            max(took) - statistics.median(steps[dropped:])
            for rank, steps in enumerate(played.step_s)
            if rank != _struck(fault)
            if (took := [step_s for step_s, end_s in zip(steps[dropped:], ends_s[rank], strict=True)
                         if struck_s < end_s <= until_s])
        ]  # fmt: skip
        found.append(max(0.0, *more_s) if more_s else None)
    return found


def _struck(fault: Fault) -> int | None:
    """The worker that it strikes itself."""
    return fault.worker if fault.target == "worker" and fault.kind != "join" else None
