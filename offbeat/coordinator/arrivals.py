"""The arrival of contributions: which are whole at all shards, and what is withdrawn with a worker that is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.coordinator.model_record import WorkerDrain
from offbeat.errors import PeerError
from offbeat.history import ContributionsWithdrawn
from offbeat.protocol.shards import CommitUpdates, WithdrawContribution, WorkerRemoved

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.coordinator.data_leases import LeaseManager
    from offbeat.coordinator.events import ModelSettled
    from offbeat.coordinator.job_record import JobRecord
    from offbeat.protocol.shards import PushDone, PushNearlyDone, WorkerDrained
    from offbeat.sync import Push


class Arrivals:
    """The contributions of one job on their way.

    Args:
        leases: of the data that they were computed from.
    """

    def __init__(self, job: JobRecord, leases: LeaseManager) -> None:
        self._job, self._leases = job, leases

    def nearly(self, message: PushNearlyDone) -> bool:
        """Note that nearly all of a shard's blocks of a contribution have arrived; whether the policy is to know."""
        one, push = self._job.model(message.model), (message.worker, message.clock)
        is_here = push[0] in one.runner.state.members
        if not is_here or not one.everywhere(one.nearly, push):
            return False
        # Of one that is pushed while it is computed the policy has not heard yet.
        return one.clocks.get(push[0]) == push[1] and not one.is_too_early(push)

    def whole(self, message: PushDone) -> bool:
        """Note that all of a shard's blocks of a contribution have arrived; whether the policy is to know."""
        job, one, push = self._job, self._job.model(message.model), (message.worker, message.clock)
        is_here = push[0] in one.runner.state.members and message.entry == job.entries.get(push[0])
        if (not is_here and push not in one.open) or not one.everywhere(one.whole, push):
            return False
        self.commit(message.model, push)
        if not is_here:
            return False
        one.arrived_s[push[0]] = job.now_s
        if one.is_too_early(push):
            one.too_early.add(push)
            return False
        return True

    def drained(self, message: WorkerDrained) -> None:
        """A shard takes nothing more of a worker that is gone.

        Raises:
            PeerError: if it was not asked.
        """
        one = self._job.model(message.model)
        parting = one.partings.get(message.number)
        if parting is None:
            raise PeerError(f"A shard speaks of parting {message.number}, which was not asked for.")
        parting.missing -= 1
        if not parting.missing:
            del one.partings[message.number]
            self._withdraw(message.model, parting.pushes)

    def commit(self, model: int, push: Push) -> None:
        """A contribution is whole at all shards."""
        one = self._job.models[model]
        if push in one.announced:
            one.here.add(push)
        elif one.open.pop(push, None) is None:
            return
        self._job.out.decide(CommitUpdates(model, *push))
        self._leases.whole(model, push)

    def remove(self, model: int, worker: int) -> None:
        """A worker takes part no more, nor does anything of it that is still to come."""
        one = self._job.models[model]
        self.stop(model, worker)
        one.granted = {push for push in one.granted if push[0] != worker}
        one.at_once.pop(worker, None)
        one.joining.discard(worker)
        one.left_at.pop(worker, None)
        one.nearly = {push: count for push, count in one.nearly.items() if push[0] != worker}
        one.whole = {push: n for push, n in one.whole.items() if push[0] != worker or push in one.open}

    def stop(self, model: int, worker: int) -> None:
        """Tell all shards that a worker is gone; what is on its way is whole at all of them, or is withdrawn."""
        one = self._job.models[model]
        pushes = one.open_of(worker)
        asks = bool(pushes) and one.shards > 1
        one.parted += asks
        self._job.out.decide(WorkerRemoved(model, worker, one.parted if asks else 0))
        if asks:  # one may be whole there, and all have it, while word of that is on its way
            one.partings[one.parted] = WorkerDrain(pushes, one.shards - 1)
        else:
            self._withdraw(model, pushes)

    def settle(self, event: ModelSettled) -> None:
        """Commit what all shards have of a life that has ended, and have all of them undo the rest."""
        model, one = event.model, self._job.models[event.model]
        for push in event.whole:
            self.commit(model, push)
        for push, samples in event.withdrawn.items():
            worker, clock = push
            if one.open.pop(push, None) is not None:
                one.whole.pop(push, None)
            if one.applied.get(worker) == clock:
                del one.applied[worker]
            one.taken_back[worker] = min(clock, one.taken_back.get(worker, clock))  # two, if it has come back since
            one.runner.take_back(push, samples)
            self._job.out.decide(WithdrawContribution(model, worker, clock))
            self._leases.taken_back(model, push)
        if event.withdrawn:
            self._job.out.record(ContributionsWithdrawn(model, tuple(event.withdrawn)))

    def lost(self, model: int, push: Push) -> None:
        """The coordinating shard has lost a contribution that is in no update, with its worker if that is gone."""
        one = self._job.models[model]
        if one.clocks.get(push[0]) != push[1]:
            return  # it was being computed: nobody had heard of it
        if push[0] not in one.runner.state.members and push[0] not in one.runner.state.away:
            one.lost[push[0]] = push[1]
            one.record(push[0]).lost += 1

    def _withdraw(self, model: int, pushes: Iterable[Push]) -> None:
        """Withdraw with their worker those pushes that are not whole at all shards."""
        one = self._job.models[model]
        for worker, clock in pushes:
            samples = one.open.pop((worker, clock), None)
            if samples is None:
                continue
            one.whole.pop((worker, clock), None)
            if one.applied.get(worker) == clock:
                del one.applied[worker]
            one.lost[worker] = clock
            if one.runner.void.get(worker) != clock:
                one.runner.lose(worker, samples)
            self._job.out.decide(WithdrawContribution(model, worker, clock))
            self._job.tell(
                f"Contribution {clock} of rank {worker} ({samples:g} samples) is lost: only a part arrived.", worker
            )
            self._leases.withdrawn(model, (worker, clock))
