"""Workers and a parameter server, with gradients that are pushed while backward computes, by a schedule.

What differs from `parameter_server`, as `offbeat.engine.early_push` and `parameter_return` have it:

* A contribution is cut into as many parts as each shard has blocks, in the order of the plan's own scheduler. A part is
  pushed once all gradients in it are complete, one after the other; the one that is needed last, which stands for one
  block of each shard, is held back until the optimizer's step.
* The announcement is on the same link, behind the parts that are on their way there. Before it nothing is made of them.
* The optimizer's step returns at once. Parts of the next parameters come back one by one, of those that can be sent at
  the same time the most urgent first, while the next forward pass computes; each of its layers waits for its own.
  Before backward all are there.

The first steps, in which a worker learns the order, are not played: they are steps to warm up.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError
from offbeat.float_sum import add_up
from offbeat.protocol.training import PullDone
from offbeat.scenario import Replay
from offbeat.sim.cross_iteration import profile_of
from offbeat.sim.parameter_server import STEP_S, SimulatedServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.fabric import Served
    from offbeat.plan import Plan
    from offbeat.scenario import Scenario
    from offbeat.scheduling import Scheduler
    from offbeat.sim.compute_time import ComputeTimes
    from offbeat.sim.faults import Faults
    from offbeat.sim.links import Links
    from offbeat.sim.worker import SimWorker

_MOST_PARTS = 64


@dataclass(frozen=True)
class EarlyParts:
    """The parts of a contribution, in the order in which they are pushed, on a machine with a factor of 1.

    Args:
        ready_s: [P] when each may be pushed, since backward began.
        places: [P] of each among those that come back at the same time.
        needed: [L] the parts that each layer waits for, in order of the forward pass.
        forward_s: [L] that each layer computes.
        backward_s: of all layers.
    """

    ready_s: tuple[float, ...]
    places: tuple[int, ...]
    needed: tuple[frozenset[int], ...]
    forward_s: tuple[float, ...]
    backward_s: float

    @classmethod
    def of(cls, scenario: Scenario, scheduler: Scheduler, fabric: Served, links: Links) -> EarlyParts:
        """The parts of a replay's gradients.

        Raises:
            ScenarioError: if it is a script, of which it is not known when which gradient is complete.
        """
        workload, world = scenario.workload, len(scenario.workers.hosts)
        if not isinstance(workload, Replay):
            raise ScenarioError(
                f"Cannot simulate {scheduler!r} for the script {workload.path}: when which of its gradients is "
                "complete is not known. Replay a profile (workload.kind)."
            )
        profile = dataclasses.replace(
            profile_of(workload, world, links),
            latency_s=2 * links.to_server_s,
            bandwidth=min(links.servers / world, links.slowest),
            gap_s=0.0,
        )
        layers = workload.layers()
        layer_of = [index for index, layer in enumerate(layers) for _ in layer.shapes]
        size = profile.size_bytes
        count = max(1, min(_MOST_PARTS, round(size / fabric.block_bytes / links.shards)))
        ready_s, needed = [0.0] * count, [set[int]() for _ in layers]
        end = 0
        for one in (one for block in scheduler.schedule(profile).blocks for one in block.slices):
            gradient, begin = profile.gradients[one.gradient], end
            end += one.numel * gradient.itemsize
            for part in range(begin * count // size, -(-end * count // size)):
                ready_s[part] = max(ready_s[part], gradient.ready_s)
                needed[layer_of[one.gradient]].add(part)
        first = [min(i for i, parts in enumerate(needed) if part in parts) for part in range(count)]
        order = sorted(range(count), key=lambda part: (first[part], part))
        pushed = [*(part for part in range(count) if part != order[-1]), order[-1]]
        number = {part: place for place, part in enumerate(pushed)}
        return cls(
            ready_s=tuple(itertools.accumulate((ready_s[part] for part in pushed), max)),
            places=tuple(order.index(part) for part in pushed),
            needed=tuple(frozenset(number[part] for part in parts) for parts in needed),
            forward_s=tuple(layer.forward_s for layer in layers),
            backward_s=profile.backward_s,
        )

    @property
    def compute_s(self) -> float:
        """Seconds of both passes."""
        return add_up(self.forward_s) + self.backward_s


def objection(plan: Plan) -> str:
    """The reason why a plan with a server and a scheduler is not modelled; "" if it is."""
    if plan.sync.gated:
        return (
            f"Cannot simulate {plan.scheduling!r} with {plan.sync!r}: where a worker may push in its turn only, what "
            "leaves early is not modelled. Leave out scheduling (plan.scheduling)."
        )
    if plan.tuning is not None:
        return (
            f"Cannot simulate {plan.scheduling!r} with {plan.tuning!r}: what is asked for of the data while parameters "
            "come back is not modelled. Leave out one of them (plan.tuning)."
        )
    return ""


class SimulatedEarlyPush(SimulatedServer):
    """A row whose plan has a server and a scheduler, in virtual time.

    Args:
        plan, compute_times, links: as of a `SimulatedServer`.
        parts: of a contribution.
        size_bytes, pull_bytes, steps, batch, faults: as of a `SimulatedServer`.
    """

    def __init__(
        self,
        plan: Plan,
        compute_times: Sequence[ComputeTimes],
        links: Links,
        parts: EarlyParts,
        *,
        size_bytes: float,
        pull_bytes: float,
        steps: int,
        batch: int,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(
            plan,
            compute_times,
            links,
            size_bytes=size_bytes,
            pull_bytes=pull_bytes,
            steps=steps,
            batch=batch,
            faults=faults,
            places=parts.places,
        )
        self._parts = parts
        self._last = len(parts.places) - 1  # that is held back

    def _compute(self, worker: SimWorker) -> None:
        if worker.left or not worker.lacking:  # else it leaves when they are here
            super()._compute(worker)

    def _pass(self, worker: SimWorker, computing_s: float, lost_s: float) -> None:
        worker.factor = computing_s / self._parts.compute_s if self._parts.compute_s else 1.0
        worker.layer, worker.passed_s, worker.lost_s = 0, self.now_s, lost_s
        self._go_forward(worker)

    def _go_forward(self, worker: SimWorker) -> None:
        """Compute the layers whose parameters are here, and begin backward behind the last of them."""
        parts, layers = self._parts, len(self._parts.needed)
        if worker.layer == layers:
            return
        while worker.layer < layers and not worker.lacking & parts.needed[worker.layer]:
            worker.passed_s = max(worker.passed_s, self.now_s) + worker.factor * parts.forward_s[worker.layer]
            worker.layer += 1
        if worker.layer == layers:
            self._later(worker, worker.passed_s - self.now_s, lambda: self._go_backward(worker))

    def _go_backward(self, worker: SimWorker) -> None:
        self._forget_push(worker)
        worker.offered, worker.push = 0, (worker.rank, self._members[worker.rank].step)
        for ready_s in self._parts.ready_s[: self._last]:
            self._later(worker, worker.factor * ready_s, lambda: self._offer(worker))
        self._later(worker, worker.factor * self._parts.backward_s + worker.lost_s, lambda: self._computed(worker))

    def _offer(self, worker: SimWorker) -> None:
        """Push one more part, when those before it are there."""
        worker.offered += 1
        if worker.flow is None:
            self._transfers.send(worker)

    def _has_computed(self, worker: SimWorker) -> None:
        self._later(worker, STEP_S / 2, lambda: self._bring(worker))

    def _bring(self, worker: SimWorker) -> None:
        worker.lacking = set(range(self._last + 1))
        worker.announcement = self._announcement(worker)
        if worker.flow is None:
            self.pushed_all(worker)
        self._later(worker, STEP_S / 2, lambda: self._stepped(worker))

    def pushed_all(self, worker: SimWorker) -> None:
        """Announce the contribution, and push what was held back, if the optimizer's step was made."""
        announcement, worker.announcement = worker.announcement, None
        if announcement is not None:
            worker.is_announced, worker.offered = True, self._last + 1
            self._say(worker, announcement)
            self._transfers.send(worker)

    def given_part(self, worker: SimWorker, part: int) -> None:
        """Have the layers go on that have waited for it."""
        self._later(worker, self._links.to_server_s, lambda: self._part_is_here(worker, part))

    def given(self, worker: SimWorker) -> None:
        """Do nothing: who has the last part has all."""

    def _part_is_here(self, worker: SimWorker, part: int) -> None:
        worker.lacking.discard(part)
        if not worker.lacking:
            self._say(worker, PullDone(0, worker.clock))
        if worker.left:
            self._go_forward(worker)
        elif not worker.lacking:
            self._compute(worker)
