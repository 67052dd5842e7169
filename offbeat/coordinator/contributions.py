"""A worker's contribution, from the moment in which it is computed until the worker has the next parameters."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

from offbeat.coordinator.policy_runner import times_s
from offbeat.errors import PeerError
from offbeat.history import NoticeGiven
from offbeat.protocol.optimizer_spec import outer_of
from offbeat.protocol.training import Notice, Refused
from offbeat.sync import Pulled, Pushed, PushEnding, Ready, TakesEveryNth
from offbeat.sync.state import UNCOUNTED_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.coordinator.arrivals import Arrivals
    from offbeat.coordinator.data_leases import LeaseManager
    from offbeat.coordinator.decisions import Decisions
    from offbeat.coordinator.job_record import JobRecord
    from offbeat.coordinator.model_record import ModelRecord
    from offbeat.coordinator.plan_swap import PlanSwaps
    from offbeat.coordinator.question_rounds import QuestionRounds
    from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
    from offbeat.protocol.shards import PushDone, PushNearlyDone
    from offbeat.protocol.training import Announce, ContributionInfo, PullDone
    from offbeat.sync import Member, Push

_LIKE_BATCH = 0.1  # the part by which batches may differ before that is said


class Contributions:
    """The contributions of one job.

    Args:
        leases: of the data that they are computed from.
        swaps: which plan holds.
        rounds: what all are asked.
        arrivals, decisions: what becomes of them.
        check_hyper: raises PeerError if an optimizer cannot go on with the hyper-parameters that a worker brings.
    """

    def __init__(
        self,
        job: JobRecord,
        *,
        leases: LeaseManager,
        swaps: PlanSwaps,
        rounds: QuestionRounds,
        arrivals: Arrivals,
        decisions: Decisions,
        check_hyper: Callable[[OptimizerSpec, Sequence[Hyper], int], None],
    ) -> None:
        self._job, self._leases, self._swaps, self._rounds = job, leases, swaps, rounds
        self._arrivals, self._decisions, self._check_hyper = arrivals, decisions, check_hyper
        self._capped: set[int] = set()  # workers that have said they had more samples than they were leased

    def announce(self, worker: int, message: Announce) -> None:
        """A worker has computed a contribution.

        Raises:
            PeerError: if it is not its turn, or not of this model, or not for this optimizer.
        """
        job, one, clock = self._job, self._job.model(message.model, worker), message.clock
        member = one.runner.state.members[worker]
        if clock != member.step or member.phase != "computing":
            raise PeerError(
                f"Cannot accept contribution {clock} of rank {worker}: it is {member.phase}, and number "
                f"{member.step} is next."
            )
        try:
            _check(one, worker, message, swapped=self._swaps.count > 0 and not job.compares)
            if not message.about.change:
                self._check_hyper(one.optimizer, message.about.hyper, worker)
        except PeerError as error:  # it would come back with the same
            job.out.send(worker, Refused(str(error)))
            raise
        if one.at_once.get(worker) == clock:
            one.granted.add((worker, clock))
            one.latest[worker] = clock
        push, about = (worker, clock), message.about
        hidden_s = _hidden_s(member, about.computing_s, job.now_s)
        # The first steps of a worker pay for what later ones do not.
        computing_s = job.now_s - member.since_s + hidden_s if member.steps_here >= UNCOUNTED_STEPS else None
        # Of several models one may be stepped less often, on more leases than it names.
        most = self._leases.most_samples(worker, about.used) if len(job.models) == 1 else None
        is_valid = self._leases.announce(message.model, push, about.used, computing_s, hidden_s=hidden_s)
        if not is_valid and about.weight:
            self._tell_void(one, push, about.weight)
            about = msgspec.structs.replace(about, weight=0.0)
        elif most is not None and about.weight > most:
            self._tell_too_many(worker, clock, about.weight, most)
            about = msgspec.structs.replace(about, weight=float(most))
        weight = about.weight
        if job.needs_validator:
            about, weight = self._trusted(one, worker, about)
        one.announced[push] = about
        one.record(worker).step = about.step
        goes_by = "those of its first contribution"
        if job.compares:
            goes_by = "those of the validator" if job.needs_validator else "those that most name"
        if not about.change and (differs := one.schedules.hear(worker, about.step, about.hyper, goes_by)):
            job.out.record(NoticeGiven(message.model, one.runner.state.version, worker, differs))
            job.tell(differs, worker)
            job.out.send(worker, Notice(differs))
        one.clocks[worker] = clock
        ready = Ready(worker, clock, job.now_s, weight)
        # Who says that its own steps end is in an update by itself, which is compared with nothing.
        ends = about.ends and not job.compares
        self._decisions.carry_out(message.model, one.runner.bring(ready, change=about.change, ends=ends))

    def _trusted(self, one: ModelRecord, worker: int, about: ContributionInfo) -> tuple[ContributionInfo, float]:
        """Keep of a worker's words what counts where there are validators; and what it weighs in a round.

        A validator's weighs nothing there, since it moves nothing, and that of a worker no more than a validator's.
        """
        if about.weight:
            one.batches[worker] = max(about.weight, one.batches.get(worker, 0.0))
        if worker not in self._job.validators:
            about = msgspec.structs.replace(about, weight=min(about.weight, one.most_weight))
            return about, about.weight
        one.trusted_hyper = one.trusted_hyper if about.change else about.hyper
        one.most_weight = about.weight or one.most_weight
        if self._job.expects_like_batches:
            self._compare_batches(one, worker)
        return about, 0.0

    def _compare_batches(self, one: ModelRecord, validator: int) -> None:
        """Say once of a validator that its contributions are of more or fewer samples than the workers' are."""
        workers, job = one.runner.trainers, self._job
        if validator in one.told_batches or not workers or not {*workers, validator} <= one.batches.keys():
            return
        theirs, mine = median(one.batches[worker] for worker in workers), one.batches[validator]
        if abs(mine - theirs) <= _LIKE_BATCH * theirs:
            return
        one.told_batches.add(validator)
        text = (
            f"Rank {validator}, a validator, contributes {mine:g} samples at a time, and workers {theirs:g}: a "
            "reference that is less or more noisy than honest contributions rejects many of them. Give its loader the "
            "workers' batch size, or say in the plan how much longer than the reference they are: "
            f"validator={type(job.rule).__name__}(calibrate=...)."
        )
        job.out.log(text)
        job.out.send(validator, Notice(text))

    def nearly(self, message: PushNearlyDone) -> None:
        """Handle that nearly all of a shard's blocks of a contribution have arrived."""
        if self._arrivals.nearly(message):
            self._decisions.tell(message.model, PushEnding(message.worker, message.clock, self._job.now_s))

    def whole(self, message: PushDone) -> None:
        """Handle that all of a shard's blocks of a contribution have arrived."""
        if self._arrivals.whole(message):
            self._decisions.tell(message.model, Pushed(message.worker, message.clock, self._job.now_s))

    def pulled(self, worker: int, message: PullDone) -> None:
        """A worker has all blocks, and computes.

        Raises:
            PeerError: if it was not released for that step.
        """
        model, step, now_s = message.model, message.step, self._job.now_s
        one = self._job.model(model, worker)
        if worker in one.joining:
            one.joining.discard(worker)
            self._rounds.answer_those_who_are_ready()
            return
        member = one.runner.state.members[worker]
        if member.released_s is None or step != member.step:
            raise PeerError(f"Rank {worker} says it has pulled step {step}, but is at step {member.step}.")
        if one.applied.get(worker) == step - 1:  # what it pulled has it in it; word of the last block may come later
            self._arrivals.commit(model, (worker, step - 1))
            if member.clock < step:
                self._decisions.tell(model, Pushed(worker, step - 1, now_s))
        self._leases.stepped(worker, *times_s(member, one.arrived_s.get(worker), now_s))
        self._decisions.tell(model, Pulled(worker, now_s, message.pushes_early))
        self._pace()

    def _pace(self) -> None:
        """Have nobody wait for those that the tuning of batches found too slow for every round."""
        for worker, every in self._leases.every().items():
            for model, one in self._job.models.items():
                member = one.runner.state.members.get(worker)
                if member is not None and member.every != every:
                    self._decisions.tell(model, TakesEveryNth(worker, every, self._job.now_s))

    def _tell_too_many(self, worker: int, clock: int, samples: float, most: int) -> None:
        """A contribution is said to be of more samples than its worker was leased: it weighs as much as these."""
        if worker not in self._capped:
            self._capped.add(worker)
            self._job.tell(
                f"Rank {worker} says that its contribution {clock} is of {samples:g} samples, and was leased {most}: "
                "its contributions weigh no more than what it was leased."
            )

    def _tell_void(self, one: ModelRecord, push: Push, samples: float) -> None:
        """A contribution was computed from what others are given: it takes its turn, moves nothing, and is reported."""
        worker, clock = push
        one.runner.void[worker] = clock
        text = (
            f"Contribution {clock} of rank {worker} ({samples:g} samples) is dropped: the samples that it was computed "
            "from are leased again."
        )
        self._job.out.log(text)
        self._job.out.send(worker, Notice(text))


def _hidden_s(member: Member, computing_s: float | None, now_s: float) -> float:
    """Seconds that a worker has computed while parameters were still on their way to it, as it says.

    Args:
        computing_s: how long it has computed, as it says; no longer than since it was ready last, whatever it says.
    """
    most_s = now_s - (member.since_s if member.last_ready_s is None else member.last_ready_s)
    return max(0.0, min(computing_s or 0.0, most_s) - (now_s - member.since_s))


def _check(one: ModelRecord, worker: int, message: Announce, *, swapped: bool) -> None:
    """See that a contribution is what this model can be moved by.

    Args:
        swapped: the policy has been, so that it may be what an earlier one wanted.

    Raises:
        PeerError: if it is not.
    """
    policy = one.runner.policy
    wanted, brought = policy.contributes(message.clock) != "gradient", message.about.change
    if brought != wanted and not swapped:
        kinds = {False: "a gradient", True: "a change of the parameters"}
        raise PeerError(
            f"Cannot accept contribution {message.clock} of rank {worker}: it is {kinds[brought]}, and with {policy!r} "
            f"that is {kinds[wanted]}."
        )
    if brought:
        outer_of(message.about.hyper)
