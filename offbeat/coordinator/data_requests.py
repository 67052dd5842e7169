"""Workers' requests for data, and the answers: `LeaseManager` decides, this is its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import DisagreementError, PeerError, PlanError
from offbeat.protocol.data_leases import (
    LeaseGrants,
    MemoryExhausted,
    RegisterLoader,
    RequestLease,
    ReturnLease,
    lease_grants,
)
from offbeat.protocol.training import Refused
from offbeat.safe_read import UnreadableError, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from offbeat.batching import EndOfEpoch, Lease
    from offbeat.coordinator.data_leases import LeaseManager
    from offbeat.coordinator.job_record import JobRecord
    from offbeat.sync import Policy


class DataRequests:
    """The data of one job.

    Args:
        policy_of: a plan in TOML, if no other holds; raises PlanError if it cannot be read.
    """

    def __init__(self, job: JobRecord, leases: LeaseManager, policy_of: Callable[[str], Policy]) -> None:
        self._job, self._leases, self._policy_of = job, leases, policy_of

    def hear(self, worker: int, message: RegisterLoader | RequestLease | ReturnLease | MemoryExhausted) -> None:
        """A worker says something about its data.

        Raises:
            DisagreementError: if its data is not the others'.
            PeerError: if it cannot be.
        """
        match message:
            case RegisterLoader():
                self._register(worker, message)
            case RequestLease(loader=loader):
                self._deal_out(loader, {worker: self._leases.take(worker, loader)})
            case ReturnLease(loader=loader, numbers=numbers):
                self._leases.give_back(worker, loader, numbers)
            case MemoryExhausted(loader=loader, count=count):
                self._leases.out_of_memory(worker, loader, count)

    def refill(self, workers: Iterable[int]) -> None:
        """Lease to released workers as much as their last contributions used."""
        for worker in workers:
            for loader, deals in self._leases.refill(worker).items():
                self._deal_out(loader, {worker: deals})

    def lose(self, worker: int) -> None:
        """A worker is gone: what it had not brought is dealt to others."""
        models = self._job.models.items()
        unclear = {(model, push) for model, one in models if one.shards > 1 for push in one.open_of(worker)}
        for loader, deals in self._leases.lose(worker, unclear).items():
            self._deal_out(loader, deals)

    def load(self, state: bytes | bytearray) -> str:
        """Go on where another run's data was; why that cannot be, or ""."""
        try:
            dealt_afresh = self._leases.load(decode(msgspec.json.decode, state))
        except (UnreadableError, PeerError) as error:
            return str(error)
        for loader, deals in dealt_afresh.items():
            for worker in deals:
                self._job.out.send(worker, LeaseGrants(loader, (), afresh=True))
            self._deal_out(loader, deals)
        return ""

    def state(self) -> bytes:
        """The state of the data, for `load`."""
        return msgspec.json.encode(self._leases.to_plain())

    def _register(self, worker: int, message: RegisterLoader) -> None:
        job, loader = self._job, message.loader
        self._check_joins(worker, message)
        try:
            together = self._policy_of(message.plan).bound == 0
        except PlanError as error:
            raise PeerError(f"Cannot lease data by this worker's plan: {error}") from error
        world = min((one.runner.world for one in job.models.values()), default=message.world)
        try:
            deals = self._leases.enrol(worker, message, together=together, world=world, ranks=job.ranks)
        except DisagreementError as error:  # it would come back with the same
            job.out.send(worker, Refused(str(error), disagrees=True))
            raise
        if (own := deals.pop(worker, None)) is not None:
            first, *others = [lease_grants(loader, deal) for deal in own] or [LeaseGrants(loader, ())]
            job.out.send(worker, msgspec.structs.replace(first, void=self._leases.void(worker, message)))
            for other in others:
                job.out.send(worker, other)
        self._deal_out(loader, deals)

    def _check_joins(self, worker: int, about: RegisterLoader) -> None:
        """See that who joins later is to have a part of data that this server deals out.

        Raises:
            PeerError: if not.
        """
        is_new = worker not in (self._job.ranks or range(about.world))
        if is_new and about.loader not in self._leases.epochs():
            text = (
                f"Cannot lease data to rank {worker}: this job began without a server, and its workers still go "
                "through the parts that they were given then. Train with workers that join from the beginning of a "
                "job with a server."
            )
            self._job.out.send(worker, Refused(text))
            raise PeerError(text)

    def _deal_out(self, loader: int, deals: Mapping[int, Iterable[Lease | EndOfEpoch]]) -> None:
        for worker, of_worker in deals.items():
            for deal in of_worker:
                self._job.out.send(worker, lease_grants(loader, deal))
