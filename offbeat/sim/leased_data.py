"""The data of a job with a server, dealt out by the server's own `LeaseManager`; only where batches are tuned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.batching import Lease
from offbeat.coordinator.data_leases import LeaseManager
from offbeat.coordinator.policy_runner import times_s
from offbeat.protocol.data_leases import RegisterLoader
from offbeat.sync.state import UNCOUNTED_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from offbeat.batching import BatchTuning, EndOfEpoch
    from offbeat.sim.worker import SimWorker
    from offbeat.sync import Member, Push


class LeasedData:
    """One loader's data.

    Args:
        tuning: how batches follow the machines; None if they do not, and then nothing is dealt out.
        now_s: virtual seconds.
        workers: of the job, by rank, in a list that grows.
        batch: samples of a worker's step, on average.
        samples: more than all steps take.
    """

    def __init__(
        self,
        tuning: BatchTuning | None,
        now_s: Callable[[], float],
        workers: list[SimWorker],
        *,
        batch: int,
        samples: int,
    ) -> None:
        self._tuning, self._now_s, self._workers = tuning, now_s, workers
        self._batch, self._samples, self._world = batch, samples, len(workers)
        self.begin()

    def begin(self) -> None:
        """Deal out everything anew, as a server does in its first moment."""
        self._dealer = None if self._tuning is None else LeaseManager(lambda _: self._tuning, self._now_s)

    def enrol(self, workers: Iterable[SimWorker], *, together: bool) -> None:
        """These take part; the first leases are dealt when all of the beginning do, or are lost."""
        if self._dealer is None:
            return
        about = RegisterLoader(
            loader=0,
            plan="",
            world=self._world,
            samples=self._samples,
            seed=0,
            shuffle=False,
            drop_last=False,
            batch=self._batch,
        )
        for worker in workers:
            worker.leases = []
            self._deal(self._dealer.enrol(worker.rank, about, together=together, world=self._world))

    def next(self, worker: SimWorker) -> int | None:
        """Samples of a worker's next step; None for as many as always."""
        if self._dealer is None:
            return None
        if not worker.leases:
            self._deal({worker.rank: self._dealer.refill(worker.rank).get(0, [])})
        return worker.leases[-1].count

    def announce(self, worker: SimWorker, member: Member) -> None:
        """A worker has computed a contribution from all that it was dealt."""
        if self._dealer is not None:
            used = [(0, lease.number) for lease in worker.leases]
            computing_s = self._now_s() - member.since_s if member.steps_here >= UNCOUNTED_STEPS else None
            self._dealer.announce(0, worker.push, used, computing_s)
            worker.leases = []

    def release(self, ranks: Iterable[int]) -> None:
        """These may go on."""
        if self._dealer is not None:
            for rank in sorted(ranks):
                self._deal({rank: self._dealer.refill(rank).get(0, [])})

    def applied(self, push: Push) -> None:
        """It is in an update."""
        if self._dealer is not None:
            self._dealer.applied(0, push)

    def whole(self, push: Push) -> None:
        """It has arrived."""
        if self._dealer is not None:
            self._dealer.whole(0, push)

    def dropped(self, push: Push) -> None:
        """It is not used."""
        if self._dealer is not None:
            self._dealer.dropped(0, push)

    def stepped(self, worker: SimWorker, member: Member | None) -> None:
        """A worker has its next parameters."""
        if self._dealer is not None and member is not None:
            self._dealer.stepped(worker.rank, *times_s(member, worker.arrived_s, self._now_s()))

    def lose(self, rank: int) -> None:
        """What a worker had goes to the others."""
        if self._dealer is not None:
            self._deal(self._dealer.lose(rank).get(0, {}))

    def together(self, together: bool) -> None:
        """Whether all wait for all from now on."""
        if self._dealer is not None:
            self._dealer.together(together)

    def every(self) -> Mapping[int, int]:
        """In which rounds each worker takes part."""
        return {} if self._dealer is None else self._dealer.every()

    def _deal(self, deals: Mapping[int, Iterable[Lease | EndOfEpoch]]) -> None:
        for rank, dealt in deals.items():
            self._workers[rank].leases += [deal for deal in dealt if isinstance(deal, Lease)]
