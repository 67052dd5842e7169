"""The coordinator's record of one model, beside the policy's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.coordinator.hyperparameters import HyperparameterCheck
from offbeat.coordinator.policy_runner import ContributionCounts, PolicyRunner
from offbeat.coordinator.progress import TrainingProgress
from offbeat.coordinator.reconnect import LostUpdates
from offbeat.coordinator.reference_limit import ReferenceLimit
from offbeat.protocol.optimizer_spec import outer_hyper
from offbeat.sync import State, StepsLocally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
    from offbeat.protocol.shards import UpdateMeasured
    from offbeat.protocol.training import ContributionInfo, ModelInfo, Reconnect
    from offbeat.sync import Policy, Push


@dataclass
class WorkerDrain:
    """Contributions of a worker that is gone, which may have arrived whole or not.

    Args:
        pushes: those that are in an update.
        missing: shards that have not said that they take nothing more of it.
    """

    pushes: tuple[Push, ...]
    missing: int


@dataclass
class ModelRecord:
    """A model that is trained; contributions are known by worker and number."""

    runner: PolicyRunner
    optimizer: OptimizerSpec
    shards: int
    to_fill: int  # shards that have not got their first values
    holders: int  # shards that hold blocks of it
    ranks: frozenset[int] = frozenset()  # of the workers that the job was to begin with here
    announced: dict[Push, ContributionInfo] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)  # worker: its last contribution that was announced
    latest: dict[int, int] = field(default_factory=dict)  # worker: its last contribution that was granted
    nearly: dict[Push, int] = field(default_factory=dict)  # at how many shards one has nearly arrived
    whole: dict[Push, int] = field(default_factory=dict)  # at how many shards a contribution has arrived
    open: dict[Push, float] = field(default_factory=dict)  # in an update, not known to be whole: their samples
    here: set[Push] = field(default_factory=set)  # contributions that are whole, and not decided
    measured: dict[int, list[UpdateMeasured]] = field(default_factory=dict)  # updates that wait, by version
    partings: dict[int, WorkerDrain] = field(default_factory=dict)  # by number
    parted: int = 0  # the number of the last one
    granted: set[Push] = field(default_factory=set)  # contributions that may be on their way and are not decided
    too_early: set[Push] = field(default_factory=set)  # contributions that are whole, and not granted: see below
    at_once: dict[int, int] = field(default_factory=dict)  # worker: number of the contribution it need not wait with
    joining: set[int] = field(default_factory=set)  # workers that have not got their first values
    left_at: dict[int, int] = field(default_factory=dict)  # workers that have stepped out, and the version then
    arrived_s: dict[int, float] = field(default_factory=dict)  # worker: when its last contribution was whole
    applied: dict[int, int] = field(default_factory=dict)  # worker: its last contribution that is in an update
    lost: dict[int, int] = field(default_factory=dict)  # worker: its last contribution that went with it
    taken_back: dict[int, int] = field(default_factory=dict)  # worker: its contribution that the life ended without
    expected: frozenset[int] = frozenset()  # workers of the life before, which are waited for until it starts
    losses: LostUpdates | None = None  # if it continues from an earlier life
    is_kept: bool = False  # what was decided in that life is all still there
    note: str = ""  # what happened to the server
    report: str = ""  # of what the beginning of this life has cost, once that is known
    schedules: HyperparameterCheck = field(default_factory=HyperparameterCheck)
    trusted_hyper: tuple[Hyper, ...] = ()  # that a validator said last with a gradient
    most_weight: float = 1.0  # that a contribution may have where there are validators: that of their last one
    batches: dict[int, float] = field(default_factory=dict)  # worker: most samples of a contribution, as it said
    limit: ReferenceLimit = field(default_factory=ReferenceLimit)  # on contributions beside one reference
    told_limited: set[int] = field(default_factory=set)  # workers of which it was said that they are beyond that
    told_batches: set[int] = field(default_factory=set)  # validators of which it was said that their batches differ
    pause: str = ""  # why nothing is decided, as people know
    told_short: set[str] = field(default_factory=set)  # why updates are left out, as people know
    left_out: list[float] = field(default_factory=list)  # samples of those left out since some have no data

    def must_wait(self, worker: int, clock: int, *, values: bool = True) -> bool:
        """Whether the worker is to wait for its grant with contribution `clock`; noted down.

        Who is given no values has heard from no other shard, which may not know yet that it takes part.
        """
        if self.runner.policy.gated or not values:
            self.at_once.pop(worker, None)
            return True
        self.at_once[worker] = clock
        return False

    def is_too_early(self, push: Push) -> bool:
        """Whether a contribution arrives that has not been granted.

        Its worker was told by an earlier policy that it need not wait for that; the present one learns of it later.
        """
        member = self.runner.state.members.get(push[0])
        return member is not None and member.step == push[1] and member.held and member.granted_s is None

    def hyper_for(self, *, change: bool) -> tuple[Hyper, ...]:
        """The hyper-parameters of an update where there are validators: nothing that workers say counts.

        Args:
            change: it is of changes, which the policy says how to apply, and not of gradients.
        """
        if change:
            return outer_hyper(self.runner.policy.outer if isinstance(self.runner.policy, StepsLocally) else None)
        return self.trusted_hyper or self.optimizer.groups

    def everywhere(self, at: dict[Push, int], push: Push) -> bool:
        """One more shard has come so far with a contribution; whether it was the last.

        Args:
            at: how many have, `nearly` or `whole`.
        """
        at[push] = at.get(push, 0) + 1
        if at[push] < self.holders:
            return False
        del at[push]
        return True

    def open_of(self, worker: int) -> tuple[Push, ...]:
        """The worker's contributions that are in an update, and are not known to be whole."""
        return tuple(push for push in self.open if push[0] == worker)

    def progress(self, data: dict[str, Any]) -> TrainingProgress:
        """The workers' progress, for a snapshot of what was decided so far.

        Args:
            data: where the data is.
        """
        state = self.runner.state
        following = dict(state.past)
        for worker, member in state.members.items():
            is_decided = member.held and (worker, member.step) not in state.pending
            following[worker] = member.first_undecided(is_decided=is_decided)
        following |= self.taken_back
        return TrainingProgress(
            next=following,
            present=tuple(sorted({*state.members, *state.away, *(() if self.runner.started else self.expected)})),
            orphans=tuple((worker, clock, state.pending[(worker, clock)]) for worker, clock in state.orphans),
            records={w: (r.applied, r.dropped, r.lost, r.samples) for w, r in self.runner.records.items()},
            note=self.note,
            data=data,
            validators=tuple(sorted(self.runner.validators or ())) or msgspec.UNSET,
            done=tuple(sorted(w for w, r in self.runner.records.items() if r.end == "done")) or msgspec.UNSET,
        )

    def book_losses(self, worker: int, back: Reconnect, decided: int) -> LostUpdates | None:
        """Book what a worker of an earlier life had brought and the snapshot has not.

        Args:
            decided: its contributions before that number are in the snapshot, or dropped.

        Returns:
            What is to be told, if the others' losses have been told already.
        """
        if self.losses is None:
            return None
        self.losses.book(worker, back, decided)
        self.record(worker).lost += sum(clock >= decided for clock, _ in back.done)
        late = LostUpdates(self.losses.version)
        late.book(worker, back, decided)
        return late if self.runner.started and late.by else None

    @property
    def counted(self) -> dict[int, int]:
        """Each worker's last contribution, if that is in an update and weighs something there."""
        return {worker: clock for worker, clock in self.applied.items() if self.is_counted(worker, clock)}

    def is_counted(self, worker: int, clock: int) -> bool:
        """Whether the contribution is in an update, and weighs something there."""
        return self.applied.get(worker) == clock and self.runner.void.get(worker) != clock

    def book_held(self, worker: int, clock: int) -> str:
        """Book the contribution that a worker had announced when it was lost; returns what became of it."""
        if self.applied.get(worker) == clock:
            return "is used" if self.is_counted(worker, clock) else "is not used"
        if (worker, clock) in self.runner.state.pending:
            return "is not decided on yet"
        if self.lost.get(worker) != clock:
            self.record(worker).dropped += 1
        return "was outdated, and is not used"

    def record(self, worker: int) -> ContributionCounts:
        """The counts of a worker, also of one that has gone."""
        return self.runner.records.setdefault(worker, ContributionCounts())


def revived(
    policy: Policy,
    details: ModelInfo,
    version: int,
    progress: TrainingProgress,
    now_s: Callable[[], float],
    gone: Set[int],
    validators: Set[int] = frozenset(),
    counted: Mapping[int, int] | None = None,
) -> ModelRecord:
    """The model of an earlier life, without workers yet; those that are `gone` since are not waited for.

    Args:
        counted: as `ModelRestored.applied`.
    """
    present = set(progress.present) - validators
    expected = present - gone
    runner = PolicyRunner(policy, len(expected), now_s)
    runner.leave_out(present - expected)
    runner.state = State(past=dict(progress.next), version=version, hosts=details.hosts)
    for worker, (applied, dropped, lost, samples) in progress.records.items():
        runner.records[worker] = ContributionCounts(applied, dropped, lost, samples, joined_s=now_s())
        if worker in (progress.done or ()):
            runner.records[worker].end = "done"
    losses = LostUpdates(version)
    for worker, _, samples in progress.orphans:
        losses.add(worker, [samples])
    return ModelRecord(
        runner,
        details.optimizer,
        details.shards,
        0,
        details.holders,
        ranks=details.begins_with,
        applied=dict(counted or {}),
        expected=frozenset(expected),
        losses=losses,
        is_kept=counted is not None,
        note=progress.note,
    )
