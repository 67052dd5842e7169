"""The sentence that says which worker paces the rounds and why, with figures."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.batching.worker_speed import TuningState, WorkerSpeed

_EVEN = 1.05  # cycles that differ by less are called even


def explain(
    state: TuningState, *, known: Mapping[int, WorkerSpeed], least: Mapping[int, int], most_change: float
) -> str:
    """Say which worker paces the rounds and why, and how sure that is.

    Args:
        known: the workers whose fits can be used.
        least: the smallest batch of each worker.
        most_change: of a batch, at a time.
    """
    regular = {worker: machine for worker, machine in known.items() if machine.batch and machine.every == 1}
    if not regular:
        return f"It is not known yet who paces the rounds: {len(state.machines)} workers, none observed for long."
    cycles_s = {worker: machine.cycle_s(machine.batch) for worker, machine in regular.items()}
    slowest = max(cycles_s, key=lambda worker: cycles_s[worker])
    parts = [
        f"Worker {slowest} paces the rounds with {cycles_s[slowest]:.3g} s ({_made_of(regular[slowest])})",
        _why(cycles_s, slowest, regular, least, most_change),
        _sure(regular[slowest]),
    ]
    rare = sorted((worker, machine.every) for worker, machine in state.machines.items() if machine.every > 1)
    if rare:
        parts.append("too slow for every round: " + ", ".join(f"worker {w} (1 of {every})" for w, every in rare))
    if len(known) < len(state.machines):
        parts.append(f"not known yet: {', '.join(f'worker {w}' for w in sorted(state.machines.keys() - known.keys()))}")
    total = sum(machine.batch for machine in state.machines.values() if machine.every == 1)
    if total != state.total:
        parts.append(_other_sum(state, total, least))
    return "; ".join(parts) + "."


def _other_sum(state: TuningState, total: int, least: Mapping[int, int]) -> str:
    """Say why the batches of a round make `total` samples instead of as many as were asked for."""
    if state.changed:  # the others are made up for when the next round is planned
        return f"a worker has joined, left or run out of memory since the last round: {total} samples of {state.total}"
    regular = {worker: machine for worker, machine in state.machines.items() if machine.every == 1}
    said = f"a round has {total} samples instead of {state.total}"
    if total > state.total and all(machine.batch <= least[worker] for worker, machine in regular.items()):
        return f"{said}, because no batch may be smaller"
    if total < state.total and all(machine.batch >= machine.most for machine in regular.values()):
        return f"{said}, because no batch may be larger"
    return said


def _made_of(machine: WorkerSpeed) -> str:
    fixed_s, sample_ms = round(machine.compute.fixed_s, 6), 1000 * machine.compute.per_sample_s
    transfer_s = round(machine.transfer_s, 6)
    return f"{fixed_s:.3g} s fixed, {machine.batch} samples of {sample_ms:.3g} ms, {transfer_s:.3g} s transfer"


def _why(
    cycles_s: Mapping[int, float],
    slowest: int,
    regular: Mapping[int, WorkerSpeed],
    least: Mapping[int, int],
    most_change: float,
) -> str:
    others = [worker for worker in cycles_s if worker != slowest]
    if not others:
        return "no other takes part in every round"
    mean_s = fmean(cycles_s[worker] for worker in others)
    longer = f"{100 * (cycles_s[slowest] / mean_s - 1):.0f} % longer than the others' mean"
    if cycles_s[slowest] <= _EVEN * min(cycles_s.values()):
        return f"{longer}, which is even"
    if regular[slowest].batch <= least[slowest]:
        return f"{longer}, because its batch may not be smaller"
    if all(regular[worker].batch >= regular[worker].most for worker in others):
        return f"{longer}, because the others' batches may not be larger"
    return f"{longer}, because batches change by at most {100 * most_change:.0f} % at a time and for a clear gain only"


def _sure(machine: WorkerSpeed) -> str:
    fit = machine.compute
    fixed = f"{100 * fit.fixed_s / fit.seconds:.0f} +- {100 * fit.fixed_error:.0f} % of it fixed"
    return (
        f"its computation is known to {100 * fit.error(machine.batch):.1f} % ({fit.steps} steps, "
        f"{100 * fit.noise:.0f} % noise, {fixed})"
    )
