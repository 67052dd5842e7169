"""The batches of the next round, from what is known of the machines; the rules are those of `tuning`.

In all of it `known` are the workers whose fits can be used, and `least` is the smallest batch of each worker.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from offbeat.batching.balance import CycleCost, shares, split

if TYPE_CHECKING:
    from offbeat.batching.worker_speed import TuningState, WorkerSpeed

_PROBE = 0.1  # of a batch
_FIRST_SHARE = 0.25  # of an equal share, for a worker that joins later
_BLOCKED_STEPS = 3  # in a row
_LEAST_GAIN = 0.01  # of the time of a round, whoever is blocked
_SURE = 2.0  # standard errors
MOST_EVERY = 100  # who is so slow takes part as good as never


def next_batches(
    state: TuningState, *, known: dict[int, WorkerSpeed], least: dict[int, int], gain: float, most_change: float
) -> TuningState:
    """The state with the batches of the round that begins.

    Args:
        gain: by which part a round must become shorter for batches to change.
        most_change: of a batch, at a time.
    """
    state = dataclasses.replace(state, probing=not known)
    if not known:
        costs = [CycleCost(0.0, 1.0, least[worker], machine.most) for worker, machine in state.machines.items()]
        return _with_batches(state, dict(zip(state.machines, split(costs, state.total), strict=True)), {})
    unknown = _of_unknown(state, known, least)
    total = state.total - sum(unknown.values())
    every = {} if state.together else _every(known, total, least, gain)
    regular = {worker: machine for worker, machine in known.items() if worker not in every}
    best_s = max(cycle_s for cycle_s, _ in _cycles(regular, total, least))
    if not _pays(state, known, best_s, gain):
        return state
    batches = unknown | _toward(regular, total, least, most_change)
    for worker, rounds in every.items():
        # No more than an equal share, so that the others can make room for it.
        most = max(least[worker], total // len(known))
        batches[worker] = min(most, _filling(known[worker], least[worker], rounds * best_s, most_change))
    return _with_batches(state, batches, every)


def in_round(state: TuningState, round: int, *, known: dict[int, WorkerSpeed], least: dict[int, int]) -> dict[int, int]:
    """The batches of those that take part in `round`; the others make room for those that do not always."""
    rare = sorted(worker for worker, machine in state.machines.items() if machine.every > 1)
    here = {
        worker: state.machines[worker].batch
        for place, worker in enumerate(rare)
        if (round + place) % state.machines[worker].every == 0
    }
    batches = {worker: m.batch for worker, m in state.machines.items() if m.every == 1 and m.batch}
    if state.probing and batches:
        return _probed(state, batches, round, least)
    if not here:
        return batches
    room = {worker: known[worker] for worker in batches if worker in known}
    rest = state.total - sum(here.values()) - sum(batch for worker, batch in batches.items() if worker not in room)
    costs = [machine.cost(min(least[worker], machine.batch), machine.batch) for worker, machine in room.items()]
    return batches | dict(zip(room, split(costs, rest), strict=True)) | here


def _probed(state: TuningState, batches: dict[int, int], round: int, least: dict[int, int]) -> dict[int, int]:
    """Give one of each pair 10 % more and the other as much less, and in the next round the reverse."""
    batches, workers = dict(batches), sorted(batches)
    turn = round // 2 % len(workers)
    workers = [*workers[turn:], *workers[:turn]]  # if their number is odd, somebody else is left out each time
    for one, other in zip(workers[::2], workers[1::2], strict=False):
        up, down = (one, other) if round % 2 else (other, one)
        most = min(state.machines[up].most - batches[up], batches[down] - least[down])
        probe = min(max(0, most), max(1, int(_PROBE * min(batches[up], batches[down]))))
        batches[up] += probe
        batches[down] -= probe
    return batches


def _of_unknown(state: TuningState, known: dict[int, WorkerSpeed], least: dict[int, int]) -> dict[int, int]:
    """Keep the batches of unmeasured workers as they are, small at first, unless the others cannot make up for it."""
    unknown = {worker: machine for worker, machine in state.machines.items() if worker not in known}
    small = math.ceil(_FIRST_SHARE * state.total / len(state.machines))
    batches = {worker: min(m.most, max(least[worker], m.batch or small)) for worker, m in unknown.items()}
    fewest = state.total - sum(machine.most for machine in known.values())
    most = state.total - sum(least[worker] for worker in known)
    if fewest <= sum(batches.values()) <= most:
        return batches
    costs = [CycleCost(0.0, 1.0, least[worker], machine.most) for worker, machine in unknown.items()]
    return dict(zip(unknown, split(costs, most if sum(batches.values()) > most else fewest), strict=True))


def _every(known: dict[int, WorkerSpeed], total: int, least: dict[int, int], gain: float) -> dict[int, int]:
    """Workers that are too slow for every round even with the smallest batch: in every which they take part."""
    rest = dict(known)
    while True:
        # Those at their smallest batch are the ones in question; the others say how long a round should be.
        level_s = max((cycle_s for cycle_s, at_least in _cycles(rest, total, least) if not at_least), default=math.inf)
        shortest_s = {worker: _shortest_s(machine, least[worker]) for worker, machine in rest.items()}
        slowest = max(shortest_s, key=lambda worker: shortest_s[worker])
        # Who was found too slow stays so until it clearly is not: no going back and forth.
        bound_s = level_s * (1 + gain if rest[slowest].every == 1 else 1)
        if shortest_s[slowest] <= bound_s or sum(m.most for w, m in rest.items() if w != slowest) < total:
            break
        del rest[slowest]
    every = {}
    for worker in known.keys() - rest.keys():
        machine = known[worker]
        rounds = machine.cycle_s(least[worker]) / level_s
        stays = machine.every - 1 < rounds <= machine.every * (1 + gain)
        every[worker] = max(2, machine.every if stays else math.ceil(min(MOST_EVERY, rounds / (1 + gain))))
    return every


def _pays(state: TuningState, known: dict[int, WorkerSpeed], best_s: float, gain: float) -> bool:
    """Whether batches should change, if rounds could be as short as `best_s`."""
    if state.changed or not all(machine.batch for machine in state.machines.values()):
        return True
    now_s, slowest = max((machine.cycle_s(machine.batch) / machine.every, worker) for worker, machine in known.items())
    # Beyond what is clear, batches would only follow the noise.
    clear = max(_LEAST_GAIN, _SURE * known[slowest].compute.error(known[slowest].batch))
    blocked = any(machine.blocked >= _BLOCKED_STEPS for machine in state.machines.values())
    return now_s > best_s * (1 + (clear if blocked else max(gain, clear)))


def _cycles(machines: dict[int, WorkerSpeed], total: int, least: dict[int, int]) -> list[tuple[float, bool]]:
    """Time each worker with its best batch, not rounded: how long it takes, and whether its batch is the smallest."""
    best = shares([machine.cost(least[worker], machine.most) for worker, machine in machines.items()], total)
    return [(m.cycle_s(batch), batch <= least[w]) for (w, m), batch in zip(machines.items(), best, strict=True)]


def _toward(machines: dict[int, WorkerSpeed], total: int, least: dict[int, int], change: float) -> dict[int, int]:
    """The best batches for which none has to change by more than that; by more only if the sum demands it."""
    while True:
        costs = [_near(machine, least[worker], change) for worker, machine in machines.items()]
        if sum(cost.least for cost in costs) <= total <= sum(cost.most for cost in costs) or change > total:
            return dict(zip(machines, split(costs, total), strict=True))
        change *= 2


def _filling(machine: WorkerSpeed, least: int, time_s: float, change: float) -> int:
    """The batch that fills `time_s`, less what may be wrong about it; it changes by no more than that."""
    cost, doubt = _near(machine, least, change), min(0.5, machine.compute.error(least))
    return max(cost.least, min(cost.most, int((time_s * (1 - doubt) - cost.fixed_s) / cost.per_sample_s)))


def _near(machine: WorkerSpeed, least: int, change: float) -> CycleCost:
    """Bounded to batches near the present one; the machine's own bounds are stronger."""
    low = min(machine.batch - 1, math.ceil(machine.batch * (1 - change)))
    high = max(machine.batch + 1, math.floor(machine.batch * (1 + change)))
    return machine.cost(min(machine.most, max(least, low)), max(least, min(machine.most, high)))


def _shortest_s(machine: WorkerSpeed, least: int) -> float:
    """The cycle with the smallest batch: the shortest that it may be in truth."""
    compute = machine.compute
    return machine.transfer_s + compute.predict(least) * max(0.0, 1 - _SURE * compute.error(least))


def _with_batches(state: TuningState, batches: dict[int, int], every: dict[int, int]) -> TuningState:
    machines = {
        worker: dataclasses.replace(machine, batch=batches[worker], every=every.get(worker, 1), blocked=0)
        for worker, machine in state.machines.items()
    }
    moved = any((m.batch, m.every) != (machines[w].batch, machines[w].every) for w, m in state.machines.items())
    return dataclasses.replace(state, machines=machines, changed=False, plans=state.plans + moved)
