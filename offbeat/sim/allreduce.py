"""Workers that all hold the parameters: an all-reduce in every step, or every few steps.

All of them end a step together, so a step is worked out rather than played. A bucket is sent when the slowest worker
has it and the one before is there; a ring takes 2 (N-1)/N of its bytes over the slowest link, in 2 (N-1) rounds
(Patarasuk and Yuan 2009); a switch takes its bytes once over the slowest link.

On a switch a bucket's sum may be of the first k workers (`KSync`). Those that come later find it there; they hold the
others up only where these are further ahead than the switch keeps sums.

What a worker loses to bad luck (`[straggle]`) comes behind its backward pass, as in the lab's replays: by then an
exchange of gradients is over, so that neither hides in the other, and the next exchange waits for whoever lost most.

An average that is applied later (`LocalSGD(delay=1)`) travels while the next steps compute, from when the last worker
has sent its part; it is waited for, if it is not there yet, where the next one is sent. Of a fragment only its bytes
travel, the same of each.

A fault strikes before the optimizer's step: behind the exchange of that step's gradients, or before that of a change.

Where the plan's controller swaps the policy all confer, in four rounds of messages; that optimizers average on the way
back what they have gathered in steps of the workers' own is not counted.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from offbeat.float_sum import add_up
from offbeat.sim.controller_driver import SimulatedController
from offbeat.sim.detection_times import MEND_S, retried_s
from offbeat.sim.disturbances import Disturbances
from offbeat.sim.faults import Faults
from offbeat.sim.result import SimResult
from offbeat.sync import KSync, StepsLocally

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from offbeat.batching import BatchTuning
    from offbeat.control import Controller
    from offbeat.sim.compute_time import ComputeTimes
    from offbeat.sim.links import Links
    from offbeat.sim.message_sizes import BucketSize
    from offbeat.sync import Policy

# Of a step with an exchange, beyond what is computed and sent: the fence, the optimizer, Python.
_STEP_S = 0.002
_CONFERRED = 4  # all-reduces of nothing, as long as which it takes to say what is wanted, and whether all can
_TOLD_EVERY = 5  # steps, where batches are tuned (`offbeat.loading.replicated_source`)


SumTime: TypeAlias = "Callable[[float, int, float, float], float]"
"""Seconds of one sum, of its bytes, how many workers, the slowest link's bytes per second and a message's seconds."""


def ring_s(size_bytes: float, world: int, slowest: float, to_worker_s: float) -> float:
    """Seconds of one all-reduce.

    Args:
        slowest: bytes per second of the slowest link.
        to_worker_s: of a message from one worker to another.
    """
    if world == 1:
        return 0.0
    return 2 * (world - 1) * (size_bytes / world / slowest + to_worker_s / 2)


def switch_s(size_bytes: float, world: int, slowest: float, to_worker_s: float) -> float:
    """Seconds of one sum that a switch makes: every worker sends it its part while it receives the sum.

    Args:
        slowest, to_worker_s: as of `ring_s`.
    """
    return size_bytes / slowest + to_worker_s if world > 1 else 0.0


def play(
    compute_times: Sequence[ComputeTimes],
    links: Links,
    *,
    buckets: Sequence[BucketSize],
    policy: Policy,
    steps: int,
    batch: int,
    tune: BatchTuning | None = None,
    faults: Faults | None = None,
    controller: Controller | None = None,
    sum_s: SumTime = ring_s,
    kept_steps: float = math.inf,
) -> SimResult:
    """Play so many steps of all workers.

    Args:
        batch: samples of a worker's step, on average.
        tune: how batches follow the machines.
        faults: what goes wrong.
        controller: has another policy than `policy` decide.
        sum_s: how long a sum takes, around a ring, by a switch or along other paths.
        kept_steps: steps of which it keeps the sums for who comes too late.
    """
    world = len(compute_times)
    driver = SimulatedController(policy, controller)
    played, group = (
        SimResult.of(world),
        SimulatedGroup(world, links, faults or Faults(), sum_s),
    )
    tuning = None if tune is None else tune.init(batch * world, together=True)
    for rank in range(world if tune is not None else 0):
        tuning = tune.join(tuning, rank)  # type: ignore[union-attr, arg-type]
    untold: list[dict[int, tuple[int, float, float]]] = []
    clock_s = [0.0] * world
    held_s = dict.fromkeys(range(world), 0.0)  # behind the exchange of the step before
    landing_s = 0.0  # when the average that is on its way is there
    last_s: deque[float] = deque()  # when the last worker had the sums of the steps that are kept
    for step in range(steps):
        for rank in group.strike(step, clock_s, computed=False, played=played):
            tuning = None if tune is None or tuning is None else tune.leave(tuning, rank)
        counts = dict.fromkeys(group.here, batch)
        if tune is not None and tuning is not None:
            if step % _TOLD_EVERY == 0:
                for told in untold:
                    least_s = min(wait_s for _, _, wait_s in told.values())
                    for rank, (count, compute_s, wait_s) in told.items():
                        if rank in group.here:
                            tuning = tune.observe(tuning, rank, count, compute_s, least_s, wait_s - least_s)
                untold.clear()
            tuning, counts = tune.plan(tuning, step)
        took = {rank: compute_times[rank].next_s(counts[rank] if tune is not None else None) for rank in group.here}
        begun_s, own_s = list(clock_s), {rank: add_up(times) for rank, times in took.items()}
        what, too_late = driver.contributes(step), frozenset[int]()
        # Bad luck strikes behind the backward pass. Gradients are exchanged by then, changes are not yet.
        after_s = {rank: lost_s if what == "gradient" else 0.0 for rank, (_, lost_s) in took.items()}
        before_s = {rank: own_s[rank] - after_s[rank] for rank in group.here}
        for rank in group.here:
            clock_s[rank] = group.computed_s(rank, begun_s[rank], before_s[rank])
        late_s = {rank: clock_s[rank] - begun_s[rank] - before_s[rank] for rank in group.here}
        gone: Collection[int] = ()
        if what != "gradient":
            computed_s = list(clock_s)
            gone = group.strike(step, clock_s, computed=True, played=played)
            late_s = {rank: late_s[rank] + clock_s[rank] - computed_s[rank] for rank in group.here}
        part = 1.0  # of the model
        if what == "change" and isinstance(driver.policy, StepsLocally):
            part = 1 / driver.policy.fragments
        if what == "change" and isinstance(driver.policy, StepsLocally) and driver.policy.delay:
            for rank in group.here:
                clock_s[rank] = max(clock_s[rank], landing_s) + _STEP_S
            landing_s = max(clock_s[rank] for rank in group.here)
            for bucket in buckets:
                landing_s = group.exchange(landing_s, part * bucket.size_bytes)
        elif what is not None:
            end_s, ends_s = last_s.popleft() if len(last_s) > kept_steps else 0.0, dict.fromkeys(group.here, 0.0)
            enough = min(driver.policy.k, len(group.here)) if isinstance(driver.policy, KSync) else len(group.here)
            for bucket in buckets:
                each_s = {
                    rank: begun_s[rank] + before_s[rank] - took[rank][0] * (1 - bucket.ready) + late_s[rank]
                    for rank in group.here
                }
                in_order_s = sorted(each_s.values())
                ready_s = in_order_s[enough - 1]
                if isinstance(driver.policy, KSync):
                    ready_s = min(ready_s + driver.policy.wait_s, in_order_s[-1])
                too_late = frozenset(rank for rank, at_s in each_s.items() if at_s > ready_s)
                end_s = group.exchange(max(end_s, ready_s), part * bucket.size_bytes, of_all=enough == len(group.here))
                ends_s = {
                    rank: end_s
                    if rank not in too_late
                    else max(end_s, group.found(rank, max(at_s, ends_s[rank]), bucket.size_bytes))
                    for rank, at_s in each_s.items()
                }
            last_s.append(max(ends_s.values()))
            for rank in group.here:
                stepping_s = max(ends_s[rank], clock_s[rank])
                clock_s[rank] = group.computed_s(rank, stepping_s, after_s[rank]) + _STEP_S
        computing_s = {rank: before_s[rank] + late_s[rank] + held_s[rank] for rank in group.here}
        held_s = {rank: after_s.get(rank, 0.0) for rank in range(world)}
        if what == "gradient":
            stepped_s = list(clock_s)
            gone = group.strike(step, clock_s, computed=True, played=played)
            held_s = {rank: held_s[rank] + clock_s[rank] - stepped_s[rank] for rank in range(world)}
        for rank in gone:
            tuning = None if tune is None or tuning is None else tune.leave(tuning, rank)
        waits_s = {rank: clock_s[rank] - begun_s[rank] - own_s[rank] for rank in group.here}
        untold.append({rank: (counts[rank], own_s[rank], waits_s[rank]) for rank in group.here})
        for rank in group.here:
            played.step_s[rank].append(clock_s[rank] - begun_s[rank])
            played.samples[rank].append(counts[rank])
            played.waited_s[rank].append(waits_s[rank])
        exchanged_at_s = None if what is None else min(clock_s[rank] for rank in group.here)
        if (swap := driver.stepped(step + 1, computing_s, batch, exchanged_at_s, too_late)) is not None:
            end_s = group.confer(max(landing_s, *(clock_s[rank] for rank in group.here)))
            for rank in group.here:
                played.step_s[rank][-1] += end_s - clock_s[rank]
                played.waited_s[rank][-1] += end_s - clock_s[rank]
                clock_s[rank] = end_s
            driver.adopt(swap, step + 1, end_s)
            played.swaps.append((end_s, swap.sync, swap.reason))
        driver.ask()
    return played


class SimulatedGroup:
    """The workers that go on, and what goes wrong among them.

    Args:
        world: workers of the beginning.
        links: of the scenario.
        faults: that strike them.
        sum_s: how long a sum takes.
    """

    def __init__(self, world: int, links: Links, faults: Faults, sum_s: SumTime = ring_s) -> None:
        self.here, self._sum_s = list(range(world)), sum_s
        self._links, self._faults, self._troubles = links, faults, Disturbances()
        self._is_broken = False  # by somebody who is gone, until the next exchange

    def computed_s(self, rank: int, begun_s: float, takes_s: float) -> float:
        """The time when a worker has computed its step."""
        return self._troubles.done_s(rank, begun_s, takes_s)

    def found(self, rank: int, begun_s: float, size_bytes: float) -> float:
        """The time when a worker has a sum that was made without it, for which it asks then."""
        links, troubles = self._links, self._troubles
        rate = links.worker[rank] * troubles.part(rank, begun_s) if self._faults.all else links.worker[rank]
        return troubles.done_s(rank, begun_s, size_bytes / rate + links.to_worker_s)

    def exchange(self, begun_s: float, size_bytes: float, *, of_all: bool = True) -> float:
        """The time when a sum is there that those whose sum it is have been ready for since then.

        Args:
            of_all: whether it is of all, who meet anew if one is gone.
        """
        links, troubles = self._links, self._troubles
        if not self._faults.all:
            return begun_s + self._sum_s(size_bytes, len(self.here), links.slowest, links.to_worker_s)
        if self._is_broken and of_all:
            self._is_broken, begun_s = False, begun_s + MEND_S
        whole_s = max(troubles.whole_s(rank, begun_s) for rank in self.here)
        begun_s = retried_s(begun_s, whole_s, self._faults.there_and_back_s)
        slowest = min(links.worker[rank] * troubles.part(rank, begun_s) for rank in self.here)
        takes_s = self._sum_s(size_bytes, len(self.here), slowest, links.to_worker_s)
        return max(troubles.done_s(rank, begun_s, takes_s) for rank in self.here)

    def confer(self, begun_s: float) -> float:
        """The time when all who have been there since then have voted."""
        return begun_s + _CONFERRED * ring_s(0.0, len(self.here), self._links.slowest, self._links.to_worker_s)

    def strike(self, step: int, clock_s: list[float], *, computed: bool, played: SimResult) -> list[int]:
        """Have strike what is due at this step, at each worker's own time; who is gone by it."""
        gone = []
        for rank in self.here if self._faults.all else ():
            for fault in self._faults.due(rank, step, computed=computed):
                played.struck.append((clock_s[rank], fault))
                if fault.ends:
                    gone.append(rank)
                    self._is_broken |= fault.kind != "leave"
                    continue
                self._troubles.add(*self._faults.lasting(fault, clock_s[rank]))
                clock_s[rank] = self._troubles.done_s(rank, clock_s[rank], 0.0)
        self.here = [rank for rank in self.here if rank not in gone]
        played.ended.update(gone)
        return gone
