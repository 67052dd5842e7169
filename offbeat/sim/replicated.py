"""Workers that all hold the parameters: an all-reduce in every step, or every few steps.

All of them end a step together, so a step is worked out rather than played. A bucket is sent when the slowest worker
has it and the one before is there; a ring takes 2 (N-1)/N of its bytes over the slowest link, in 2 (N-1) rounds
(Patarasuk and Yuan 2009).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.pacing import BatchTuning
    from offbeat.sim.course import Course
    from offbeat.sim.links import Links
    from offbeat.sim.sizes import Bucket
    from offbeat.sync import Policy, Push

# Of a step with an exchange, beyond what is computed and sent: the fence, the optimizer, Python.
_STEP_S = 0.002
_TOLD_EVERY = 5  # steps, where batches are tuned (`offbeat.engine.agreed`)


@dataclass(frozen=True)
class Played:
    """What became of a row.

    Args:
        step_s: of each worker, its steps.
        samples: of each worker, in each of them.
        waited_s: of each worker, what its steps took beyond computation.
        staleness: of each contribution; empty where nothing can be stale.
        swaps: what controllers decided: when, for which policy, and why.
        updates: of a server, in order: when each was made everywhere, of which contributions, and which part of a round
            it is.
        read: of each contribution of a server, how many updates were in the parameters it was computed on.
    """

    step_s: list[list[float]]
    samples: list[list[int]]
    waited_s: list[list[float]]
    staleness: list[int]
    swaps: list[tuple[float, Policy, str]] = field(default_factory=list)
    updates: list[tuple[float, tuple[Push, ...], float]] = field(default_factory=list)
    read: dict[Push, int] = field(default_factory=dict)


def ring_s(size_bytes: float, world: int, links: Links) -> float:
    """Seconds of one all-reduce."""
    if world == 1:
        return 0.0
    return 2 * (world - 1) * (size_bytes / world / links.slowest + links.to_worker_s / 2)


def play(
    courses: Sequence[Course],
    links: Links,
    *,
    buckets: Sequence[Bucket],
    policy: Policy,
    steps: int,
    batch: int,
    tune: BatchTuning | None = None,
) -> Played:
    """Play so many steps of all workers.

    Args:
        batch: samples of a worker's step, on average.
        tune: how batches follow the machines.
    """
    world = len(courses)
    played = Played([[] for _ in courses], [[] for _ in courses], [[] for _ in courses], [])
    tuning = None if tune is None else tune.init(batch * world, together=True)
    for rank in range(world if tune is not None else 0):
        tuning = tune.join(tuning, rank)  # type: ignore[union-attr, arg-type]
    untold: list[list[tuple[int, float, float]]] = []
    clock_s = [0.0] * world
    for step in range(steps):
        counts = dict.fromkeys(range(world), batch)
        if tune is not None and tuning is not None:
            if step % _TOLD_EVERY == 0:
                for told in untold:
                    least_s = min(wait_s for _, _, wait_s in told)
                    for rank, (count, compute_s, wait_s) in enumerate(told):
                        tuning = tune.observe(tuning, rank, count, compute_s, least_s, wait_s - least_s)
                untold.clear()
            tuning, counts = tune.plan(tuning, step)
        took = [course.next_s(counts[rank] if tune is not None else None) for rank, course in enumerate(courses)]
        begun_s, own_s = list(clock_s), [sum(times) for times in took]
        what = policy.contributes(step)
        if what is None:
            clock_s = [at_s + one_s for at_s, one_s in zip(clock_s, own_s, strict=True)]
        else:
            end_s = 0.0
            for bucket in buckets:
                # What is lost to bad luck is lost between the backward pass and the optimizer's step.
                ready_s = max(
                    at_s + computing_s * bucket.ready + (lost_s if what != "gradient" else 0.0)
                    for at_s, (computing_s, lost_s) in zip(begun_s, took, strict=True)
                )
                end_s = max(end_s, ready_s) + ring_s(bucket.size_bytes, world, links)
            # Nobody steps before its own bad luck is over; the next exchange begins when all have stepped.
            clock_s = [max(end_s, at_s + one_s) + _STEP_S for at_s, one_s in zip(begun_s, own_s, strict=True)]
        waits_s = [now_s - at_s - one_s for now_s, at_s, one_s in zip(clock_s, begun_s, own_s, strict=True)]
        untold.append([(counts[rank], own_s[rank], waits_s[rank]) for rank in range(world)])
        for rank in range(world):
            played.step_s[rank].append(clock_s[rank] - begun_s[rank])
            played.samples[rank].append(counts[rank])
            played.waited_s[rank].append(waits_s[rank])
    return played
