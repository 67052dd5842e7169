"""The data of a job with a server, as its workers ask for it; only where batches are tuned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.batching import Lease
from offbeat.protocol.data_leases import LeaseGrants, RegisterLoader, RequestLease, leases_of

if TYPE_CHECKING:
    from offbeat.protocol.data_leases import Used
    from offbeat.protocol.messages import ToWorker
    from offbeat.sim.worker import SimWorker


class LeasedData:
    """One loader's data, which the coordinator deals out.

    Args:
        is_tuned: whether batches are; else nothing is dealt out.
        world: workers of the beginning.
        batch: samples of a worker's step, on average.
        samples: more than all steps take.
    """

    def __init__(self, is_tuned: bool, *, world: int, batch: int, samples: int) -> None:
        self.batch = batch
        self._about = RegisterLoader(
            loader=0,
            plan="",
            world=world,
            samples=samples,
            seed=0,
            shuffle=False,
            drop_last=False,
            batch=batch,
        )
        self._is_tuned = is_tuned

    def register(self, worker: SimWorker) -> RegisterLoader | None:
        """A worker takes part: what it says then."""
        worker.leases = []
        return self._about if self._is_tuned else None

    def ask(self, worker: SimWorker) -> RequestLease | None:
        """Make the request of a worker that is about to compute, if it has nothing to compute from."""
        return RequestLease(0) if self._is_tuned and not worker.leases else None

    def hear(self, worker: SimWorker, message: ToWorker) -> None:
        """A worker is told something."""
        if isinstance(message, LeaseGrants):
            dealt = leases_of(message, self._about.samples)
            worker.leases += [deal for deal in dealt if isinstance(deal, Lease)]

    def samples(self, worker: SimWorker) -> int | None:
        """Samples of a worker's next step; None for as many as always."""
        return worker.leases[-1].count if self._is_tuned else None

    def take(self, worker: SimWorker) -> Used:
        """Take all that a worker was leased: it has computed a contribution from it."""
        used, worker.leases = tuple((0, lease.number) for lease in worker.leases), []
        return used
