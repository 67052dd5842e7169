"""Transfers between workers and the server: contributions there, parameters back, part by part."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

from offbeat.sim.disturbances import SERVER
from offbeat.sim.flows import Flows
from offbeat.sim.max_min_fair import FlowPath
from offbeat.sim.worker import PARTS, PendingUpdate, SimWorker
from offbeat.sync import Pushed, PushEnding

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.sim.disturbances import Disturbances
    from offbeat.sim.links import Links
    from offbeat.sim.timeline import Timeline
    from offbeat.sync import Apply, Push

_WEIGHTS = (0.5, 1.0, 2.0)


class TransferOwner(Protocol):
    """The owner of transfers."""

    def arriving(self, event: PushEnding | Pushed) -> None:
        """A contribution is nearly there, or whole."""

    def made(self, update: PendingUpdate) -> None:
        """An update is made everywhere."""

    def given(self, worker: SimWorker) -> None:
        """A worker has all of its next parameters."""


class SimulatedTransfers:
    """The transfers of a job.

    Args:
        job: is told what happens.
        push_bytes, pull_bytes: of a contribution, and of the parameters.
    """

    def __init__(
        self,
        job: TransferOwner,
        timeline: Timeline,
        links: Links,
        troubles: Disturbances,
        *,
        push_bytes: float,
        pull_bytes: float,
    ) -> None:
        self._job, self._timeline, self._links, self._troubles = job, timeline, links, troubles
        self._push_bytes, self._pull_bytes = push_bytes / PARTS, pull_bytes / PARTS
        self._flows = Flows(timeline, {"in": links.servers, "out": links.servers})
        self._shares: dict[int, random.Random] = {}
        self._last_in_order: PendingUpdate | None = None
        self._count = 0  # of updates that are made everywhere

    def send(self, worker: SimWorker) -> None:
        """Push the next part of its contribution."""
        push, back_s = worker.push, self._troubles.back_s(worker.rank, self._timeline.now_s)
        if back_s > self._timeline.now_s:
            self._timeline.at(back_s, lambda: self.send(worker) if worker.push == push else None)
            return
        if not worker.brought:
            share = self._shares.setdefault(worker.rank, random.Random(f"share {worker.rank}"))
            worker.way = FlowPath(("in",), self._links.worker[worker.host], share.choice(_WEIGHTS))
        if self._troubles.all:
            worker.way = worker.way._replace(most=self._rate(worker))
        worker.flow = self._flows.start(worker.way, self._push_bytes, lambda: self._arrives(worker, push))

    def _arrives(self, worker: SimWorker, push: Push) -> None:
        if worker.push != push:
            return
        if worker.update is not None:
            worker.update.missing[worker.brought] -= 1
            self._make(worker.update)
        worker.brought += 1
        now_s = self._timeline.now_s
        if worker.brought < PARTS:
            self.send(worker)
            if worker.brought == PARTS - 1:
                self._job.arriving(PushEnding(*push, now_s))
            return
        worker.arrived_s = now_s
        self._job.arriving(Pushed(*push, now_s))

    def apply(self, action: Apply, workers: list[SimWorker]) -> None:
        """Make an update as soon as its parts are there."""
        missing = [0] * PARTS
        update = PendingUpdate(missing, action.pushes, action.rate)
        for push in action.pushes:
            worker = workers[push[0]]
            if worker.push == push and worker.brought < PARTS:
                for part in range(worker.brought, PARTS):
                    missing[part] += 1
            if worker.push == push:
                worker.update = update
        if action.in_order:
            before, self._last_in_order = self._last_in_order, update
            update.follow(before)
        self._make(update)

    def _make(self, update: PendingUpdate) -> None:
        update.make(self._give, self._is_made)

    def _is_made(self, update: PendingUpdate) -> None:
        self._count += 1
        self._job.made(update)

    def pull(self, worker: SimWorker) -> None:
        """Start to send a worker its next parameters, as far as they are made."""
        worker.is_pulling, worker.got = True, 0
        worker.due = PARTS if worker.update is None else worker.update.made
        if worker.update is not None:
            worker.update.pullers.append(worker)
        self._give(worker)

    def _give(self, worker: SimWorker) -> None:
        parts, back_s = worker.due - worker.got, self._troubles.back_s(worker.rank, self._timeline.now_s)
        if worker.moving is not None or worker.is_waiting or not parts:
            return
        if back_s > self._timeline.now_s:
            worker.is_waiting = True
            entry = worker.entry
            self._timeline.at(back_s, lambda: self._give_again(worker) if worker.entry == entry else None)
            return
        worker.read = self._count

        def there() -> None:
            worker.moving, worker.got = None, worker.got + parts
            if worker.got < PARTS:
                self._give(worker)
            else:
                worker.is_pulling = False
                self._job.given(worker)

        worker.moving = self._flows.start(FlowPath(("out",), self._rate(worker)), parts * self._pull_bytes, there)

    def _give_again(self, worker: SimWorker) -> None:
        worker.is_waiting = False
        self._give(worker)

    def give_all(self, worker: SimWorker, done: Callable[[], None]) -> None:
        """Parameters for a worker that has not had any."""
        self._flows.start(FlowPath(("out",), self._rate(worker)), PARTS * self._pull_bytes, done)

    def stop(self, worker: SimWorker) -> None:
        """Send nothing more of a worker's contribution."""
        if worker.update is not None:
            for part in range(worker.brought, PARTS):
                worker.update.missing[part] -= 1
            self._make(worker.update)
        if worker.flow is not None:
            self._flows.stop(worker.flow)
        worker.push, worker.update = (worker.rank, -1), None

    def tear_out(self, worker: SimWorker) -> None:
        """Lose what is on its way to and from a worker; what it waits for does not happen."""
        if worker.update is not None and worker in worker.update.pullers:
            worker.update.pullers.remove(worker)
        self.stop(worker)
        if worker.moving is not None:
            self._flows.stop(worker.moving)
        worker.moving, worker.is_waiting, worker.is_pulling = None, False, False
        worker.entry += worker.holds

    def forget(self) -> None:
        """Drop what was to be made in order."""
        self._last_in_order = None

    def throttle(self) -> None:
        """Adapt the flows to what passes the server now."""
        now_s, troubles = self._timeline.now_s, self._troubles
        is_up = troubles.back_s(SERVER, now_s) <= now_s
        rate = self._links.servers * troubles.part(SERVER, now_s) if is_up else 0.0
        self._flows.limit({"in": rate, "out": rate})

    def queue_s(self, link: str) -> float:
        """Seconds that a message waits behind the data on its way "in" or "out"."""
        return self._links.queue_s if self._flows.on(link) > 1 else 0.0

    def _rate(self, worker: SimWorker) -> float:
        """Bytes per second of its link, now."""
        return self._links.worker[worker.host] * self._troubles.part(worker.rank, self._timeline.now_s)
