"""The decisions of the policy, as messages: the one place where a coordinator gives its actions a meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.coordinator.instructions import PolicyTimer
from offbeat.coordinator.short_updates import ShortUpdates
from offbeat.protocol.shards import ApplyContributions, DropContribution, ReleaseFromShard
from offbeat.protocol.training import Evicted, Granted, ReleaseWorker
from offbeat.sync import Apply, Deadline, Drop, Evict, Grant, Pushed, Release, Wake

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat.coordinator.arrivals import Arrivals
    from offbeat.coordinator.data_leases import LeaseManager
    from offbeat.coordinator.data_requests import DataRequests
    from offbeat.coordinator.job_record import JobRecord
    from offbeat.coordinator.model_record import ModelRecord
    from offbeat.protocol.training import ContributionInfo
    from offbeat.sync import Action, Event, Push

_TOO_SLOW = "it kept the others waiting for too long"


class Decisions:
    """The decisions about all models of one job.

    Args:
        leases, data: what workers compute next.
        arrivals: contributions on their way.
    """

    def __init__(self, job: JobRecord, leases: LeaseManager, data: DataRequests, arrivals: Arrivals) -> None:
        self._job, self._leases, self._data, self._arrivals = job, leases, data, arrivals
        self._has_applied = False
        self._short_updates = ShortUpdates(job)

    def tell(self, model: int, event: Event) -> None:
        """Ask the policy after an event, and carry out what it decides."""
        self.carry_out(model, self._job.models[model].runner.tell(event))

    def wake(self, model: int) -> None:
        """The time has come that the policy wanted to be asked at."""
        if model in self._job.models:
            self.tell(model, Deadline(self._job.now_s))

    def end(self, one: ModelRecord) -> None:
        """Handle that no worker trains a model any more, or until one comes."""
        self._short_updates.end(one)

    def take_has_applied(self) -> bool:
        """Whether there was an update since this was asked last."""
        has_applied, self._has_applied = self._has_applied, False
        return has_applied

    def carry_out(self, model: int, actions: Iterable[Action]) -> None:
        """Tell workers and shards what was decided; nothing when this incarnation is over."""
        if self._job.is_over:
            return
        one = self._job.models[model]
        actions = tuple(actions)
        # In order of rank, so that it does not depend on who was ready first.
        self._data.refill(sorted(action.worker for action in actions if isinstance(action, Release)))
        for action in actions:
            match action:
                case Grant(worker=worker):
                    self._grant(model, one, worker)
                case Apply():
                    self._apply(model, one, action)
                case Drop(pushes=pushes):
                    for push in pushes:
                        self._drop(model, one, push)
                case Release(worker=worker):
                    self._release(model, one, worker)
                case Evict(worker=worker):
                    self._evict(model, one, worker)
                case Wake(at_s=at_s):
                    self._job.out.set_timer(PolicyTimer(model), at_s)
        for push in sorted(push for push in one.too_early if not one.is_too_early(push)):
            one.too_early.discard(push)
            self.tell(model, Pushed(*push, self._job.now_s))
        for worker, clock in [push for push in one.announced if push not in one.runner.state.pending]:
            del one.announced[(worker, clock)]  # it went with its worker
            one.here.discard((worker, clock))
            self._job.out.decide(DropContribution(model, worker, clock, coming=False))

    def welcome(
        self,
        model: int,
        worker: int,
        values: bool = True,
        *,
        again: bool = False,
        fate: str = "",
        counted: bool = False,
        asked: int = 0,
    ) -> None:
        """Tell a worker that has just joined where it is, and give it the parameters.

        Args:
            fate: what became of the contribution that it came back with.
            counted: whether that is in the parameters.
            asked: number of the first question that it will be asked.
        """
        one = self._job.models[model]
        clock = one.runner.state.members[worker].step
        waits = one.must_wait(worker, clock, values=values)
        version = one.runner.state.version
        go = ReleaseWorker(
            model, clock, version, 0, values, again=again, waits=waits, asked=asked, counted=counted, fate=fate
        )
        self._job.out.send(worker, go)
        if values:
            one.joining.add(worker)
            as_is = self._job.needs_losses and worker in self._job.validators
            self._job.out.decide(ReleaseFromShard(model, worker, clock, as_is))

    def _grant(self, model: int, one: ModelRecord, worker: int) -> None:
        member = one.runner.state.members.get(worker)
        # Who computes is to push what it has not announced yet.
        clock = member.step if member is not None and member.phase == "computing" else one.clocks[worker]
        one.granted.add((worker, clock))
        one.latest[worker] = clock
        if one.at_once.get(worker) != clock:
            self._job.out.send(worker, Granted(model, clock))

    def _apply(self, model: int, one: ModelRecord, action: Apply) -> None:
        pushes = action.pushes
        brought = [one.announced.pop(push) for push in pushes]
        hyper = next((about.hyper for about in brought if about.weight), brought[0].hyper)
        if self._job.needs_validator:  # whatever workers say
            hyper = one.hyper_for(change=brought[0].change)
            brought = [msgspec.structs.replace(about, hyper=hyper) for about in brought]
            brought = self._limited(one, dict(zip(pushes, brought, strict=True)))
        references = tuple(sorted({worker for worker, _ in pushes} & self._job.validators))
        is_short = self._short_updates.decided(one, dict(zip(pushes, brought, strict=True)))
        # Who brings other hyper-parameters is heard where a rule goes by what most say.
        about = tuple(msgspec.structs.replace(about, hyper=()) if about.hyper == hyper else about for about in brought)
        one.granted.difference_update(pushes)
        one.applied.update(pushes)
        awaited = set(pushes) - one.here
        one.open.update({p: a.weight for p, a in zip(pushes, about, strict=True) if p in awaited})
        one.here.difference_update(pushes)
        self._job.out.decide(
            ApplyContributions(model, pushes, about, hyper, action.rate, action.in_order, references, is_short=is_short)
        )
        for push in pushes:
            self._leases.applied(model, push, awaited)
        self._has_applied = True

    def _limited(self, one: ModelRecord, brought: Mapping[Push, ContributionInfo]) -> list[ContributionInfo]:
        """Have contributions weigh nothing if their worker has pushed too many for the references so far."""
        if self._job.needs_losses:
            return list(brought.values())
        beyond = one.limit.beyond({push: about.weight for push, about in brought.items()}, self._job.validators)
        for worker in sorted({worker for worker, _ in beyond} - one.told_limited):
            one.told_limited.add(worker)
            self._job.out.log(
                f"Rank {worker} pushes more contributions than validators push references: those beyond one for each "
                "reference are rejected. If the worker is honest, have a faster validator, or several."
            )
        return [msgspec.structs.replace(about, weight=0.0) if p in beyond else about for p, about in brought.items()]

    def _drop(self, model: int, one: ModelRecord, push: Push) -> None:
        del one.announced[push]
        coming = push in one.granted
        one.granted.discard(push)
        one.here.discard(push)
        self._leases.dropped(model, push)
        self._job.out.decide(DropContribution(model, *push, coming))

    def _release(self, model: int, one: ModelRecord, worker: int) -> None:
        clock = one.clocks[worker]
        stale = one.runner.last_staleness.get(worker, 0)
        version, waits = one.runner.state.version, one.must_wait(worker, clock + 1)
        counted = one.is_counted(worker, clock)
        self._job.out.send(worker, ReleaseWorker(model, clock + 1, version, stale, counted=counted, waits=waits))
        self._job.out.decide(ReleaseFromShard(model, worker, clock + 1))

    def _evict(self, model: int, one: ModelRecord, worker: int) -> None:
        job, runner = self._job, one.runner
        self._data.lose(worker)
        self._arrivals.remove(model, worker)
        job.out.send(worker, Evicted(model, _TOO_SLOW))
        runner.note_end(worker, "evicted")
        job.evicted[model, worker] = why = f"{_TOO_SLOW}, by {runner.policy!r}"
        of = f" from model {model}" if len(job.models) > 1 else ""
        job.tell(
            f"Rank {worker} is evicted{of} at version {runner.state.version}: {why}. The others continue without it "
            f"until it reconnects; {self._leases.what_changes()}.",
            worker,
        )
