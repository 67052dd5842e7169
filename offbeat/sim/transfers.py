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
    from collections.abc import Callable, Sequence

    from offbeat.sim.disturbances import Disturbances
    from offbeat.sim.links import Links
    from offbeat.sync import Apply, Push
    from offbeat.timeline import Timeline

_WEIGHTS = (0.5, 1.0, 2.0)


class TransferOwner(Protocol):
    """The owner of transfers."""

    def arriving(self, event: PushEnding | Pushed) -> None:
        """A contribution is nearly there, or whole."""

    def made(self, update: PendingUpdate) -> None:
        """An update is made everywhere."""

    def given(self, worker: SimWorker) -> None:
        """A worker has all of its next parameters."""

    def given_part(self, worker: SimWorker, part: int) -> None:
        """A worker has a part of its next parameters, where they come one by one."""

    def pushed_all(self, worker: SimWorker) -> None:
        """A worker has pushed all that it has offered."""


class SimulatedTransfers:
    """The transfers of a job.

    Args:
        job: is told what happens.
        push_bytes, pull_bytes: of a contribution, and of the parameters.
        places: of each part among those that come back at the same time; None if all parts that can be sent come
            back together.
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
        places: Sequence[int] | None = None,
    ) -> None:
        self._places, self._parts = places, PARTS if places is None else len(places)
        self._job, self._timeline, self._links, self._troubles = job, timeline, links, troubles
        self._push_bytes, self._pull_bytes = push_bytes / self._parts, pull_bytes / self._parts
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
        if worker.brought < self._parts:
            if worker.brought < worker.offered:
                self.send(worker)
            else:
                worker.flow = None
            if worker.brought == self._parts - 1:
                self._job.arriving(PushEnding(*push, now_s))
            if worker.flow is None:
                self._job.pushed_all(worker)
            return
        worker.arrived_s = now_s
        self._job.arriving(Pushed(*push, now_s))

    def apply(self, action: Apply, workers: list[SimWorker]) -> None:
        """Make an update as soon as its parts are there."""
        missing = [0] * self._parts
        update = PendingUpdate(missing, action.pushes, action.rate)
        for push in action.pushes:
            worker = workers[push[0]]
            if worker.push == push:
                for part in range(worker.brought, self._parts):
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
        worker.queue, worker.queued = [], 0
        worker.due = self._parts if worker.update is None else worker.update.made
        if worker.update is not None:
            worker.update.pullers.append(worker)
        self._give(worker)

    def _give(self, worker: SimWorker) -> None:
        if self._places is not None:
            worker.queue += sorted(range(worker.queued, worker.due), key=self._places.__getitem__)
            worker.queued = worker.due
        parts, back_s = worker.due - worker.got, self._troubles.back_s(worker.rank, self._timeline.now_s)
        if worker.moving is not None or worker.is_waiting or not parts:
            return
        if back_s > self._timeline.now_s:
            worker.is_waiting = True
            entry = worker.entry
            self._timeline.at(back_s, lambda: self._give_again(worker) if worker.entry == entry else None)
            return
        worker.read = self._count
        one = worker.queue.pop(0) if self._places is not None else None
        parts = parts if one is None else 1

        def there() -> None:
            worker.moving, worker.got = None, worker.got + parts
            if one is not None:
                self._job.given_part(worker, one)
            if worker.got < self._parts:
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
        self._flows.start(FlowPath(("out",), self._rate(worker)), self._parts * self._pull_bytes, done)

    def stop(self, worker: SimWorker) -> None:
        """Send nothing more of a worker's contribution."""
        if worker.update is not None:
            for part in range(worker.brought, self._parts):
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
