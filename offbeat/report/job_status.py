"""Conclusions from the status of a job, in words."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from offbeat.report.per_worker import PACE

if TYPE_CHECKING:
    from offbeat.protocol.status import ModelStatus


def pacemaker(model_status: ModelStatus) -> str:
    """Say which worker paces the rounds, in one sentence; "" if there is too little to compare."""
    if model_status.pace:
        return model_status.pace
    known = [seen for seen in model_status.present if seen.step_s]
    if len(known) < 2:
        return ""
    slowest = max(known, key=lambda seen: seen.step_s)
    usual_s = statistics.median(seen.step_s for seen in known if seen is not slowest)
    if slowest.step_s < PACE * usual_s:
        return (
            f"No worker stands out: a step takes the slowest, rank {slowest.worker}, {_ms(slowest.step_s)}, and the "
            f"others {_ms(usual_s)} (median)."
        )
    if not slowest.turn_s:
        return (
            f"Rank {slowest.worker} sets the pace: it computes {_ms(slowest.step_s)} per step, "
            f"{slowest.step_s / usual_s - 1:.0%} longer than the others' median of {_ms(usual_s)}."
        )
    return (
        f"Rank {slowest.worker} sets the pace: a step takes it {_ms(slowest.step_s)} ({_ms(slowest.computing_s)} of it "
        f"computing), {slowest.step_s / usual_s - 1:.0%} longer than the others' median of {_ms(usual_s)}."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
