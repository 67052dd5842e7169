"""The coordinator decides for a whole job, without I/O and without a clock: `handle(event) -> instructions`.

What happens comes in as events, each with its time; what is decided goes out as instructions, which the owner carries
out in their order, each as soon as it can: the first shard of a server sends and sets timers, the simulator plays them.
The same events lead to the same instructions, and to the same state.

An event that a peer is to blame for leads to `RejectPeer`, behind what else has come of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.coordinator.arrivals import Arrivals
from offbeat.coordinator.contributions import Contributions
from offbeat.coordinator.controller_driver import ControllerDriver
from offbeat.coordinator.data_leases import LeaseManager
from offbeat.coordinator.data_requests import DataRequests
from offbeat.coordinator.decisions import Decisions
from offbeat.coordinator.events import (
    LifeOver,
    ModelBegun,
    ModelForgotten,
    ModelRestored,
    ModelSettled,
    PatienceOver,
    PushLost,
    RanksAsked,
    ShardSaid,
    SwapAsked,
    TimePassed,
    WorkerGone,
    WorkerMissed,
    WorkerOpened,
    WorkerSaid,
)
from offbeat.coordinator.instructions import ConsentTimer, ControllerTimer, PolicyTimer
from offbeat.coordinator.job_record import JobRecord
from offbeat.coordinator.judgements import Judgements
from offbeat.coordinator.members import Membership
from offbeat.coordinator.plan_swap import PlanSwaps
from offbeat.coordinator.question_rounds import QuestionRounds
from offbeat.coordinator.questions import CollectiveQuestions
from offbeat.coordinator.replacements import Replacements
from offbeat.errors import PeerError
from offbeat.history import PlanAdopted
from offbeat.protocol.checkpoints import RequestReplacement
from offbeat.protocol.data_leases import SetDataState
from offbeat.protocol.loss_scores import ContributionsScored
from offbeat.protocol.plan_swap import PlanAgreement, SwapResult
from offbeat.protocol.shards import ModelFilled, PushDone, PushNearlyDone, UpdateMeasured, WorkerDrained
from offbeat.protocol.status import TellStatus
from offbeat.protocol.training import Announce, AskAllWorkers, LeaveAfter, PullDone
from offbeat.sync import ASP, BSP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.control import Controller, Metrics
    from offbeat.coordinator.events import CoordinatorEvent, ShardMessage
    from offbeat.coordinator.instructions import Instruction
    from offbeat.coordinator.judgements import JudgeUpdate
    from offbeat.coordinator.model_record import ModelRecord
    from offbeat.coordinator.plan_proposal import DecidingParts
    from offbeat.coordinator.progress import TrainingProgress
    from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
    from offbeat.protocol.plan_swap import AdoptPlan
    from offbeat.protocol.status import ModelStatus
    from offbeat.sync import Policy, Push


class Coordinator:
    """Coordinates all models of a job in one incarnation of its server.

    Args:
        read_plan: from TOML; raises PlanError.
        life: number of this incarnation.
        check_hyper: raises PeerError if an optimizer cannot go on with the hyper-parameters that a worker brings.
        judge: decides about updates by a robust rule, see `Judgements`; None if no plan has one that compares them.
    """

    def __init__(
        self,
        read_plan: Callable[[str], DecidingParts],
        life: int = 0,
        *,
        check_hyper: Callable[[OptimizerSpec, Sequence[Hyper], int], None],
        judge: JudgeUpdate | None = None,
    ) -> None:
        self._job = job = JobRecord(life)
        self._leases = leases = LeaseManager(
            lambda plan: read_plan(plan).tuning, job.time_s, lambda plan: read_plan(plan).keeps
        )
        self._swaps = swaps = PlanSwaps(read_plan, job.out, self._adopted, job.time_s)
        self._data = data = DataRequests(job, leases, lambda plan: (swaps.present or read_plan(plan)).sync)
        self._arrivals = arrivals = Arrivals(job, leases)
        self._judgements = None if judge is None else Judgements(job, judge)
        self._decisions = decisions = Decisions(job, leases, data, arrivals)
        self._controller = ControllerDriver(job.out, self._metrics, self._propose, job.time_s)
        questions = CollectiveQuestions()
        self._replacements = Replacements(job, questions, data)
        self._rounds = rounds = QuestionRounds(job, questions, self._replacements, swaps, arrivals, decisions)
        self._contributions = Contributions(
            job,
            leases=leases,
            swaps=swaps,
            rounds=rounds,
            arrivals=arrivals,
            decisions=decisions,
            check_hyper=check_hyper,
        )
        self._members = Membership(
            job,
            leases=leases,
            data=data,
            swaps=swaps,
            questions=questions,
            rounds=rounds,
            arrivals=arrivals,
            decisions=decisions,
        )

    def handle(self, event: CoordinatorEvent) -> list[Instruction]:
        """Hear of an event; what is to be done now, in this order."""
        self._job.now_s = event.at_s
        try:
            self._hear(event)
            while self._decisions.take_has_applied():
                self._controller.ask()
            if self._judgements is not None:  # who takes part may have changed
                self._judgements.losses.ask_all()
        except PeerError as error:
            self._job.out.reject(error)
        return self._job.out.take()

    # -- what the owner may ask at any time ----------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing is decided any more."""
        return self._job.is_over

    @property
    def models(self) -> dict[int, ModelRecord]:
        """The records of all models that are trained."""
        return self._job.models

    @property
    def version(self) -> int:
        """Updates of all models together; none may be decided on while a model has not started."""
        return self._job.version

    @property
    def started(self) -> bool:
        """Whether something is decided about every model."""
        return self._job.started

    @property
    def has_begun(self) -> bool:
        """Whether all workers of the beginning were here, in this life or in the one that it continues."""
        return bool(self.models) and all(one.runner.started or one.losses is not None for one in self.models.values())

    def has_granted(self, model: int, push: Push) -> bool:
        """Whether this is the last contribution that the worker was let push; perhaps before it is announced."""
        one, (worker, clock) = self._job.model(model), push
        return clock in (one.latest.get(worker), one.at_once.get(worker))

    def awaits(self, model: int, push: Push) -> bool:
        """Whether a contribution is in an update, and not known to be whole."""
        return push in self._job.model(model).open

    def status(self, at_s: float) -> tuple[ModelStatus, ...]:
        """The status of all models, for people."""
        pace, present = self._leases.explain(), self._swaps.present
        plan = "" if present is None else present.to_toml()
        return tuple(
            one.runner.status(
                number,
                at_s,
                world=len(one.ranks),
                note=one.note,
                pace=pace,
                plan=plan,
                statuses={} if place else self._job.statuses,  # of workers, and not of models
            )
            for place, (number, one) in enumerate(self.models.items())
        )

    def data_state(self) -> bytes:
        """The state of the data, for a checkpoint."""
        return self._data.state()

    def progress(self, model: int) -> TrainingProgress:
        """The workers' progress, for a snapshot of what was decided so far."""
        data = self._leases.to_plain() if model == min(self.models) else {}
        return self.models[model].progress(data)

    # -- events --------------------------------------------------------------------------------------------------

    def _hear(self, event: CoordinatorEvent) -> None:
        match event:
            case WorkerSaid():
                self._hear_worker(event)
            case ShardSaid(message=message):
                self._hear_shard(message)
            case PushLost(model=model, push=push):
                self._arrivals.lost(model, push)
            case TimePassed():
                self._hear_timer(event)
            case ModelBegun():
                self._members.begin(event)
                self._follow_controller()
            case ModelRestored():
                self._members.restore(event)
                self._follow_controller()
            case ModelSettled():
                self._arrivals.settle(event)
            case ModelForgotten(model=model):
                self._members.forget(model)
            case WorkerOpened():
                self._members.open(event)
            case WorkerGone():
                self._members.leave(event)
            case WorkerMissed(worker=worker):
                self._members.miss(worker)
            case PatienceOver():
                self._members.begin_with_who_is_here()
            case RanksAsked():
                self._members.reserve(event)
            case SwapAsked():
                self._ask_for_swap(event)
            case LifeOver():
                self._job.is_over = True

    def _hear_worker(self, event: WorkerSaid) -> None:
        worker = event.worker
        match event.message:
            case Announce() as message:
                self._contributions.announce(worker, message)
            case PullDone() as message:
                self._contributions.pulled(worker, message)
            case AskAllWorkers() as message:
                self._rounds.ask(worker, message)
            case PlanAgreement() as message:
                self._swaps.agree(worker, message)
            case TellStatus(status=status):
                self._job.statuses[worker] = status
            case LeaveAfter() as message:
                self._members.announce_leave(worker, message)
            case RequestReplacement() as message:
                self._replacements.want_parameters(worker, message)
            case ContributionsScored() as message:
                self._judging.scored(worker, message)
            case SetDataState(number=number):
                self._replacements.want_data(worker, number, event.body, event.asker)
            case message:
                self._data.hear(worker, message)

    def _hear_shard(self, message: ShardMessage) -> None:
        match message:
            case ModelFilled(model=model):
                self._members.filled(model)
            case PushNearlyDone():
                self._contributions.nearly(message)
            case PushDone():
                self._contributions.whole(message)
            case UpdateMeasured():
                self._judging.measured(message)
            case WorkerDrained():
                self._arrivals.drained(message)

    def _hear_timer(self, event: TimePassed) -> None:
        if self._job.is_over:
            return
        match event.timer:
            case PolicyTimer(model=model):
                self._decisions.wake(model)
            case ControllerTimer():
                self._controller.on_time()
            case ConsentTimer(number=number):
                self._swaps.consent(number)

    @property
    def _judging(self) -> Judgements:
        if self._judgements is None:
            raise PeerError("Cannot judge an update: no rule that compares whole contributions is known here.")
        return self._judgements

    # -- plans and their controllers -----------------------------------------------------------------------------

    def _ask_for_swap(self, event: SwapAsked) -> None:
        job, message = self._job, event.message

        def tell(text: str, refusal: str) -> None:
            job.out.reply(event.asker, SwapResult(message.number, text, refusal))

        if job.needs_validator and not event.is_trusted:
            tell("", f"Cannot swap the plan for {event.by}: in this job only who shows a validator's credential may.")
            return
        if any(one.runner.started and one.runner.is_paused for one in job.models.values()):
            tell("", "Cannot swap the plan while workers wait for more, or for a validator. Start one, and try again.")
            return
        self._swaps.swap(
            message.part,
            tell,
            job.workers,
            has_begun=job.started,
            whole=message.whole,
            ranks=job.ranks,
            by=event.by,
        )

    def _adopted(self, plan: DecidingParts, adopt: AdoptPlan, by: str) -> None:
        """Another plan holds: tell everybody, and have its policy decide."""
        job = self._job
        job.out.log(f"From version {job.version} on {adopt.text}")
        together = self._swaps.are_level and all(map(_is_in_step, job.models.values()))
        job.out.record(PlanAdopted(adopt.plan if plan.is_served else self._swaps.until_left(together=together), by))
        job.out.adopt(adopt)
        self._leases.together(plan.sync.bound == 0)
        self._follow_controller()
        for model, one in job.models.items():
            sync = plan.sync
            if not plan.is_served:
                sync = one.runner.policy if together else ASP()
            self._decisions.carry_out(model, one.runner.swap(sync, by_controller=plan.controller is not None))

    def _follow_controller(self) -> None:
        present = self._swaps.present
        self._controller.follow(None if present is None else present.controller)

    def _metrics(self, controller: Controller) -> Metrics | None:
        """The metrics for the controller: of the model that was prepared first."""
        job = self._job
        return None if job.is_over or not job.started else job.models[min(job.models)].runner.metrics(controller)

    def _propose(self, sync: Policy, reason: str) -> None:
        """The controller wants another policy."""

        def tell(_: str, refusal: str) -> None:
            if refusal:
                self._controller.refused(sync, refusal)

        self._swaps.control(sync, reason, tell, self._job.workers)


def _is_in_step(one: ModelRecord) -> bool:
    """Whether all workers are at the same step of a BSP round, and so come to the sync point together.

    Otherwise some wait there while others still bring contributions, which must not be averaged over fewer workers for
    that: each is applied by itself, as with `ASP`. As many contributions need not be as many steps, since one may be of
    several; whether the workers are equally far in their scripts is in `PlanSwaps.are_level`.
    """
    steps = {member.step for member in one.runner.state.members.values()}
    return isinstance(one.runner.policy, BSP) and len(steps) == 1
