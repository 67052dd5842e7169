"""The first shard's second job: it asks the policy, and tells all shards and workers what was decided."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from offbeat.coordinator.controller_driver import ControllerDriver
from offbeat.coordinator.data_leases import LeaseManager
from offbeat.coordinator.model_record import ModelRecord, WorkerDrain, revived
from offbeat.coordinator.plan_swap import CONSENT_S, PlanSwaps
from offbeat.coordinator.policy_runner import PolicyRunner, times_s
from offbeat.coordinator.questions import CollectiveQuestions
from offbeat.coordinator.reconnect import ReconnectAction, judge
from offbeat.coordinator.replacements import Replacements
from offbeat.errors import DisagreementError, OffbeatError, PeerError, PlanError
from offbeat.history import LifeBegan, NoticeGiven, ParametersReplaced, PlanAdopted
from offbeat.protocol.checkpoints import MayPut
from offbeat.protocol.data_leases import (
    FromData,
    LeaseGrants,
    MemoryExhausted,
    RegisterLoader,
    RequestLease,
    ReturnLease,
    dealt,
)
from offbeat.protocol.optimizer_spec import outer_of
from offbeat.protocol.plan_swap import LEAVING
from offbeat.protocol.shards import (
    AdmitWorker,
    AllowReplacement,
    ApplyContributions,
    CommitUpdates,
    DropContribution,
    ReleaseFromShard,
    WithdrawContribution,
    WorkerRemoved,
)
from offbeat.protocol.training import Evicted, Granted, ModelOpened, Notice, Refused, ReleaseWorker
from offbeat.safe_read import UnreadableError, decode
from offbeat.sync import (
    ASP,
    BSP,
    Apply,
    Deadline,
    Drop,
    Evict,
    Grant,
    Pulled,
    Pushed,
    PushEnding,
    Ready,
    Release,
    State,
    TakesEveryNth,
    Wake,
)
from offbeat.sync.state import UNCOUNTED_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set

    from offbeat.batching import EndOfEpoch, Lease
    from offbeat.control import Controller, Metrics
    from offbeat.coordinator.loss import LostContribution
    from offbeat.coordinator.plan_proposal import DecidingParts, Tell
    from offbeat.coordinator.progress import TrainingProgress
    from offbeat.history import Record
    from offbeat.protocol.checkpoints import RequestReplacement
    from offbeat.protocol.messages import Decision, ToWorker
    from offbeat.protocol.optimizer_spec import Hyper, OptimizerSpec
    from offbeat.protocol.plan_swap import AdoptPlan, PlanAgreement
    from offbeat.protocol.status import ModelStatus
    from offbeat.protocol.training import Announce, AskAllWorkers, LeaveAfter, ModelInfo, Reconnect
    from offbeat.protocol.worker_status import TrainingStatus
    from offbeat.sync import Action, Policy, Push


_log = logging.getLogger("offbeat")
_TOO_SLOW = "it kept the others waiting for too long"


class Coordinator:
    """Coordinates all models of a job.

    Args:
        read_plan: from TOML.
        decide: carries a decision to all shards; returns what this one lost by it.
        say: sends a message to a worker.
        life: of the server.
        adopt: tells all workers and shards which plan holds.
        record: writes the history.
        check_hyper: raises PeerError if an optimizer cannot go on with the hyper-parameters that a worker brings.
    """

    def __init__(
        self,
        read_plan: Callable[[str], DecidingParts],
        decide: Callable[[Decision], LostContribution | None],
        say: Callable[[int, ToWorker], None],
        life: int = 0,
        adopt: Callable[[AdoptPlan], None] = lambda adopt: None,
        record: Callable[[Record], None] = lambda record: None,
        *,
        check_hyper: Callable[[OptimizerSpec, Sequence[Hyper], int], None],
    ) -> None:
        self._check_hyper = check_hyper
        self._read_plan, self._decide, self._say = read_plan, decide, say
        self._have_adopted, self._record = adopt, record
        self._dealer = LeaseManager(
            lambda plan: read_plan(plan).tuning,
            lambda: asyncio.get_running_loop().time(),
            lambda plan: read_plan(plan).keeps,
        )
        self.life = life
        self.is_over = False  # nothing is decided any more: what would follow could be in no snapshot
        self.models: dict[int, ModelRecord] = {}
        self._entries: dict[int, int] = {}  # by worker
        self._filled_early: dict[int, int] = {}  # shards that were filled before anybody opened the model here
        self._workers: set[int] = set()  # that are connected
        self._missed: set[int] = set()  # that were, and are gone before they opened any model
        self.statuses: dict[int, TrainingStatus] = {}  # what workers say of themselves
        self._leaving: dict[int, int] = {}  # those that were told to leave: behind which of their steps
        self._evicted: dict[tuple[int, int], str] = {}  # by model and worker: why
        self._questions = CollectiveQuestions()
        self._replacements = Replacements(self._questions)
        self._replaced_at = -1  # version at which something was replaced last
        self._swaps = PlanSwaps(read_plan, say, self._adopted, lambda: asyncio.get_running_loop().time())
        self._controlling = ControllerDriver(self._metrics, self._propose)

    # -- what happens --------------------------------------------------------------------------------------------

    def begin(self, model: int, details: ModelInfo) -> None:
        """The first worker wants to train a model.

        Raises:
            PeerError: if its plan cannot be read, or it took part before, and nothing is known of that here.
        """
        if details.back is not None:
            raise PeerError(
                "Cannot go on: the parameter server was restarted, and has no snapshot to go on from. Start the job "
                "again, from a checkpoint if there is one."
            )
        try:
            plan = self._swaps.begin(details.plan)
        except PlanError as error:
            raise PeerError(f"Cannot coordinate by this worker's plan: {error}") from error
        self._controlling.follow(plan.controller)
        now_s = asyncio.get_running_loop().time
        ranks = details.begins_with
        coordinator = PolicyRunner(plan.sync, len(ranks), now_s, State(hosts=details.hosts))
        to_fill = details.shards - self._filled_early.pop(model, 0)
        self.models[model] = ModelRecord(
            coordinator, details.optimizer, details.shards, to_fill, details.holders, ranks=ranks
        )
        for worker in self._missed & ranks:
            coordinator.miss(worker)
        self._write_down(model)

    def _write_down(self, model: int) -> None:
        """Have the history begin with where a model is."""
        coordinator = self.models[model].coordinator
        coordinator.model, coordinator.record, state = model, self._record, coordinator.state
        plan = self._swaps.present
        assert plan is not None
        self._record(LifeBegan(model, self.life, plan.to_toml(), state.version, state.hosts, dict(state.past)))

    def forget(self, model: int) -> None:
        """All have left before there were any parameters."""
        one = self.models.pop(model)
        self._filled_early[model] = one.shards - one.to_fill  # other shards keep what they have been given
        if one.timer is not None:
            one.timer.cancel()

    def join(self, model: int, worker: int, details: ModelInfo, entry: int = 0) -> None:
        """A worker takes part in a model, or takes part again.

        Args:
            entry: of its `OpenModel`.

        Raises:
            PeerError: if its plan is not of this job.
        """
        one, back = self.models[model], details.back
        self._swaps.join(worker, details, life=self.life)
        self._evicted.pop((model, worker), None)
        self._workers.add(worker)
        self._missed.discard(worker)
        self._entries[worker] = entry
        decided = one.coordinator.state.past.get(worker, 0)
        verdict = judge(back, life=self.life, decided=decided)
        if verdict is ReconnectAction.LATER:
            self._say(worker, ModelOpened(model, wants_values=False, life=self.life, later=True))
            return
        fate = "" if back is None else self._take_back(one, worker, back, decided)
        if back is None:
            actions = one.coordinator.join(worker)
            if one.coordinator.started:
                self._tell_joined(one, worker)
        else:
            # What it holds is not brought any more, or again under a number of this life: that one is not given again.
            least = back.clock + (back.holds and back.life == self.life)
            actions = one.coordinator.join(worker, least=least, weight=back.weight)
        self._decide(AdmitWorker(model, worker, one.coordinator.state.members[worker].step, entry))
        self._carry_out(model, actions)
        if not one.to_fill:
            counted = bool(fate) and back is not None and one.is_counted(worker, back.clock)
            again = verdict is ReconnectAction.AGAIN
            self._welcome(model, worker, verdict is ReconnectAction.JOIN, again=again, fate=fate, counted=counted)
            self._start(model)

    def _tell_joined(self, one: ModelRecord, worker: int) -> None:
        """Say who is new, and what becomes of the batches."""
        count = len(one.coordinator.state.members)
        version, changes = one.coordinator.state.version, self.what_changes()
        _log.warning("Rank %d has joined at version %d: %d workers take part; %s.", worker, version, count, changes)

    def what_changes(self) -> str:
        """What becomes of batches and learning rate when workers come and go, in words."""
        return self._dealer.what_changes()

    def filled(self, model: int) -> None:
        """A shard has its first values."""
        if model not in self.models:
            self._filled_early[model] = self._filled_early.get(model, 0) + 1
            return
        one = self._model(model)
        one.to_fill -= 1
        if not one.to_fill:
            for worker in sorted(one.coordinator.state.members):
                self._welcome(model, worker)
            self._start(model)

    def announce(self, worker: int, message: Announce) -> None:
        """A worker has computed a contribution.

        Raises:
            PeerError: if it is not its turn, or not of this model, or not for this optimizer.
        """
        one = self._model(message.model, worker)
        member = one.coordinator.state.members[worker]
        if message.clock != member.step or member.phase != "computing":
            raise PeerError(
                f"Cannot take contribution {message.clock} of rank {worker}: it is {member.phase}, and number "
                f"{member.step} is next."
            )
        try:
            _check(one, worker, message, swapped=self._swaps.count > 0)
            if not message.about.change:
                self._check_hyper(one.optimizer, message.about.hyper, worker)
        except PeerError as error:  # it would come back with the same
            self._say(worker, Refused(str(error)))
            raise
        if one.at_once.get(worker) == message.clock:
            one.granted.add((worker, message.clock))
            one.latest[worker] = message.clock
        push, about, now_s = (worker, message.clock), message.about, one.coordinator.now_s()
        # The first steps of a worker pay for what later ones do not.
        computing_s = now_s - member.since_s if member.steps_here >= UNCOUNTED_STEPS else None
        if not self._dealer.announce(message.model, push, about.used, computing_s) and about.weight:
            self._tell_void(one, push, about.weight)
            about = msgspec.structs.replace(about, weight=0.0)
        one.announced[push] = about
        one.record(worker).step = about.step
        if not about.change and (differs := one.schedules.hear(worker, about.step, about.hyper)):
            self._record(NoticeGiven(message.model, one.coordinator.state.version, worker, differs))
            self._tell_others(worker, differs)
            self._say(worker, Notice(differs))
        one.clocks[worker] = message.clock
        ready = Ready(worker, message.clock, now_s, about.weight)
        self._carry_out(message.model, one.coordinator.bring(ready, change=about.change, ends=about.ends))

    def _tell_void(self, one: ModelRecord, push: Push, samples: float) -> None:
        """A contribution was computed from what others are given: it takes its turn, moves nothing, and is reported."""
        worker, clock = push
        one.coordinator.void[worker] = clock
        text = (
            f"Contribution {clock} of rank {worker} ({samples:g} samples) is dropped: the samples that it was computed "
            "from are dealt out again."
        )
        _log.warning("%s", text)
        self._say(worker, Notice(text))

    def nearly(self, model: int, push: Push) -> None:
        """Nearly all of a shard's blocks of a contribution have arrived."""
        one = self._model(model)
        if push[0] not in one.coordinator.state.members:
            return
        if one.everywhere(one.nearly, push) and not one.is_too_early(push):
            self._carry_out(model, one.coordinator.tell(PushEnding(*push, one.coordinator.now_s())))

    def whole(self, model: int, push: Push, entry: int) -> None:
        """All of a shard's blocks of a contribution have arrived.

        Args:
            entry: of the worker, when it pushed it.
        """
        one = self._model(model)
        is_here = push[0] in one.coordinator.state.members and entry == self._entries.get(push[0])
        if not is_here and push not in one.open:
            return
        if one.everywhere(one.whole, push):
            self._commit(model, push)
            if not is_here:
                return
            one.arrived_s[push[0]] = one.coordinator.now_s()
            if one.is_too_early(push):
                one.too_early.add(push)
            else:
                self._carry_out(model, one.coordinator.tell(Pushed(*push, one.coordinator.now_s())))

    def parted(self, model: int, number: int) -> None:
        """A shard takes nothing more of a worker that is gone."""
        one = self._model(model)
        parting = one.partings.get(number)
        if parting is None:
            raise PeerError(f"A shard speaks of parting {number}, which was not asked for.")
        parting.missing -= 1
        if not parting.missing:
            del one.partings[number]
            self._withdraw(model, parting.pushes)

    def pulled(self, model: int, worker: int, step: int) -> None:
        """A worker has all blocks, and computes.

        Raises:
            PeerError: if it was not released for that step.
        """
        one = self._model(model, worker)
        if worker in one.joining:
            one.joining.discard(worker)
            self._answer_those_who_are_ready()
            return
        member = one.coordinator.state.members[worker]
        if member.released_s is None or step != member.step:
            raise PeerError(f"Rank {worker} says it has pulled step {step}, but is at step {member.step}.")
        if one.applied.get(worker) == step - 1:  # what it pulled has it in it; word of the last block may come later
            self._commit(model, (worker, step - 1))
            if member.clock < step:
                self._carry_out(model, one.coordinator.tell(Pushed(worker, step - 1, one.coordinator.now_s())))
        self._dealer.stepped(worker, *times_s(member, one.arrived_s.get(worker), one.coordinator.now_s()))
        self._carry_out(model, one.coordinator.tell(Pulled(worker, one.coordinator.now_s())))
        self._pace()

    def _pace(self) -> None:
        """Have nobody wait for those that the tuning of batches found too slow for every round."""
        for worker, every in self._dealer.every().items():
            for model, one in self.models.items():
                member = one.coordinator.state.members.get(worker)
                if member is not None and member.every != every:
                    self._carry_out(model, one.coordinator.tell(TakesEveryNth(worker, every, one.coordinator.now_s())))

    def has_granted(self, model: int, push: Push) -> bool:
        """Whether this is the last contribution that the worker was let push."""
        return self._model(model).latest.get(push[0]) == push[1]

    def look(self) -> tuple[ModelStatus, ...]:
        """How it goes."""
        pace, present = self._dealer.explain(), self._swaps.present
        plan = "" if present is None else present.to_toml()
        return tuple(
            one.coordinator.scene(
                number,
                world=len(one.ranks),
                note=one.note,
                pace=pace,
                plan=plan,
                statuses={} if place else self.statuses,  # of workers, and not of models
            )
            for place, (number, one) in enumerate(self.models.items())
        )

    def data(self, worker: int, message: FromData) -> None:
        """What a worker says about its data.

        Raises:
            DisagreementError: if its data is not the others'.
            PeerError: if it cannot be.
        """
        match message:
            case RegisterLoader(loader=loader, plan=plan):
                self._check_joins_data(worker, message)
                try:
                    together = (self._swaps.present or self._read_plan(plan)).sync.bound == 0
                except PlanError as error:
                    raise PeerError(f"Cannot deal out data by this worker's plan: {error}") from error
                world = min((one.coordinator.world for one in self.models.values()), default=message.world)
                try:
                    deals = self._dealer.enrol(worker, message, together=together, world=world, ranks=self._ranks)
                except DisagreementError as error:  # it would come back with the same
                    self._say(worker, Refused(str(error), disagrees=True))
                    raise
                if (own := deals.pop(worker, None)) is not None:
                    first, *others = [dealt(loader, deal) for deal in own] or [LeaseGrants(loader, ())]
                    self._say(worker, msgspec.structs.replace(first, void=self._dealer.void(worker, message)))
                    for other in others:
                        self._say(worker, other)
                self._deal_out(loader, deals)
            case RequestLease(loader=loader):
                self._deal_out(loader, {worker: self._dealer.take(worker, loader)})
            case ReturnLease(loader=loader, numbers=numbers):
                self._dealer.give_back(worker, loader, numbers)
            case MemoryExhausted(loader=loader, count=count):
                self._dealer.crowded(worker, loader, count)

    def _check_joins_data(self, worker: int, about: RegisterLoader) -> None:
        """See that who joins later is to have a part of data that this server deals out.

        Raises:
            PeerError: if not.
        """
        is_new = worker not in (self._ranks or range(about.world))
        if is_new and about.loader not in self._dealer.epochs():
            text = (
                f"Cannot deal out data to rank {worker}: this job began without a server, and its workers still go "
                "through the parts that they were given then. Train with workers that join from the beginning of a "
                "job with a server."
            )
            self._say(worker, Refused(text))
            raise PeerError(text)

    def books(self) -> bytes:
        """Where the data is."""
        return msgspec.json.encode(self._dealer.to_plain())

    def replace(self, worker: int, message: RequestReplacement) -> None:
        """A worker has other parameters for a model, and puts them when all others wait for that.

        Raises:
            PeerError: if another brings what one brings for all, or there is no such model.
        """
        model = message.model
        self._model(model)

        def answer(refusal: str) -> None:
            if refusal or model not in self.models:
                self._say(worker, MayPut(message.number, refusal or f"Model {model} is trained no more."))
                return
            self._tell_replaced(worker)
            self._decide(AllowReplacement(model, worker, message.number))

        self._replacements.want(worker, self._first(worker), "other parameters", answer)
        self._look_at_replacements()

    def restock(self, worker: int, place: bytes | bytearray, tell: Callable[[str], None]) -> None:
        """A worker has where another run's data was; all go on there when all others wait for that.

        Args:
            tell: called with why that cannot be, or "".

        Raises:
            PeerError: if another brings what one brings for all.
        """

        def answer(refusal: str) -> None:
            model = min(self.models)
            if not (refusal := refusal or self.go_on_in_data(place)):
                self._tell_replaced(worker)
                version = self.models[model].coordinator.state.version
                self._record(ParametersReplaced(model, version, worker, is_data=True))
            tell(refusal)

        self._replacements.want(worker, self._first(worker), "another place in the data", answer)
        self._look_at_replacements()

    def _first(self, worker: int) -> int:
        """Who brings what one worker brings for all."""
        return min(self._ranks, default=worker)

    def _look_at_replacements(self) -> None:
        if self.started:  # those who are not here, or not back, are to wait for it, too
            self._replacements.look(self._workers)

    def _tell_replaced(self, worker: int) -> None:
        """Say once of each load that what the server has is replaced, part by part."""
        for one in self.models.values():
            one.schedules.forget()
        if self.version == self._replaced_at:
            return
        self._replaced_at = self.version
        text = f"Rank {worker} replaces what the server has at version {self.version}: all load a checkpoint together."
        if self.version:
            self._tell_others(worker, text)
        else:  # as when a job is resumed: each has said that by itself
            _log.info("%s", text)

    def go_on_in_data(self, place: bytes | bytearray) -> str:
        """Go on where another run's data was; why that cannot be, or ""."""
        try:
            dealt_afresh = self._dealer.load(decode(msgspec.json.decode, place))
        except (UnreadableError, PeerError) as error:
            return str(error)
        for loader, deals in dealt_afresh.items():
            for worker in deals:
                self._say(worker, LeaseGrants(loader, (), afresh=True))
            self._deal_out(loader, deals)
        return ""

    def ask(self, worker: int, message: AskAllWorkers) -> None:
        """A worker asks what all are to be asked; until they have it takes no part, so that nobody waits for it.

        Raises:
            PeerError: if it still waits for an answer.
        """
        self._questions.ask(worker, message)
        for model, one in self.models.items():
            if one.coordinator.started and worker in one.coordinator.state.members:
                self._step_out(model, worker)
        self._answer()

    def swap(self, part: str, tell: Tell, *, whole: bool = False, by: str = "") -> None:
        """Somebody wants another plan; see `PlanSwaps.swap`."""
        self._swaps.swap(part, tell, self._workers, has_begun=self.started, whole=whole, ranks=self._ranks, by=by)

    def agree(self, worker: int, message: PlanAgreement) -> None:
        """What a worker makes of the plan that was proposed."""
        self._swaps.agree(worker, message)

    def _adopted(self, plan: DecidingParts, adopt: AdoptPlan, by: str) -> None:
        """Another plan holds: tell everybody, and have its policy decide."""
        _log.warning("From version %d on %s", self.version, adopt.text)
        together = self._swaps.are_level and all(map(_is_in_step, self.models.values()))
        self._record(PlanAdopted(adopt.plan if plan.is_served else self._swaps.until_left(together=together), by))
        self._have_adopted(adopt)
        self._dealer.together(plan.sync.bound == 0)
        self._controlling.follow(plan.controller)
        for model, one in self.models.items():
            sync = plan.sync
            if not plan.is_served:
                sync = one.coordinator.policy if together else ASP()
            self._carry_out(model, one.coordinator.swap(sync, by_controller=plan.controller is not None))

    def _metrics(self, controller: Controller) -> Metrics | None:
        """What the controller is told: of the model that was prepared first."""
        return (
            None if self.is_over or not self.started else self.models[min(self.models)].coordinator.metrics(controller)
        )

    def _propose(self, sync: Policy, reason: str) -> None:
        """The controller wants another policy."""

        def tell(_: str, refusal: str) -> None:
            if refusal:
                self._controlling.refused(sync, refusal)

        number = self._swaps.control(sync, reason, tell, self._workers)
        if number is not None:
            asyncio.get_running_loop().call_later(CONSENT_S, self._swaps.consent, number)

    def miss(self, worker: int) -> None:
        """A worker is gone before it has opened any model."""
        self._missed.add(worker)
        for model, one in self.models.items():
            if worker in one.ranks:
                self._carry_out(model, one.coordinator.miss(worker))
                self._step_out_who_asked(model)
        self._answer()

    @property
    def _ranks(self) -> frozenset[int]:
        """Of the workers that the job began with here, as far as that is known."""
        return max((one.ranks for one in self.models.values()), key=len, default=frozenset())

    def leaves(self, worker: int, message: LeaveAfter) -> None:
        """A worker was told to leave, and will say good-bye."""
        self._leaving[worker] = message.step

    def tell_gone(self, worker: int, error: OffbeatError | None) -> str:
        """Let all know that a worker is gone, and why; how it ended, in one word.

        Args:
            error: why it is lost; None if it has said good-bye.
        """
        step, count = self._leaving.pop(worker, None), len(self._workers - {worker})
        if error is not None:
            if all(worker != evicted for _, evicted in self._evicted):  # else all know
                self._tell_others(worker, f"Rank {worker} is gone: {error} The others go on; {self.what_changes()}.")
        elif step is None:
            return "done"
        elif count:
            goes_on = "1 worker goes on" if count == 1 else f"{count} workers go on"
            text = f"Rank {worker} was told to leave, and has left in order behind its step {step}: {goes_on}"
            self._tell_others(worker, f"{text}; {self.what_changes()}.")
        return "gone" if error is not None else "left"

    def _tell_others(self, worker: int, text: str) -> None:
        _log.warning("%s", text)
        for other in sorted(self._workers - {worker}):
            self._say(other, Notice(text))

    def leave(self, worker: int, end: str = "gone") -> None:
        """A worker is gone.

        Args:
            end: how it ended, as `WorkerStatus.phase` has it.
        """
        self._workers.discard(worker)
        self._swaps.leave(worker)
        self._lose_data(worker)
        for model, one in self.models.items():
            one.coordinator.note_end(worker, end)
            if worker in one.coordinator.state.members or worker in one.coordinator.state.away:
                self._remove(model, worker)
                self._carry_out(model, one.coordinator.leave(worker))
                self._step_out_who_asked(model)
        self._questions.leave(worker)
        self._replacements.leave(worker)
        for one in self.models.values():
            one.left_at.pop(worker, None)
        self._answer()

    # -- going on from a snapshot --------------------------------------------------------------------------------

    def restore(
        self, model: int, details: ModelInfo, version: int, progress: TrainingProgress, gone: Set[int] = frozenset()
    ) -> None:
        """A model goes on from a snapshot; it waits for the workers that took part, until `begin_with_who_is_here`.

        Args:
            gone: of these workers, those that are not waited for, unless they come before the others.
        """
        now_s = asyncio.get_running_loop().time
        if progress.data:
            self._dealer.restore(progress.data)
            for worker in gone:
                self._dealer.lose(worker)
        plan = self._swaps.begin(details.plan, details.swaps)
        self._controlling.follow(plan.controller)
        self.models[model] = revived(plan.sync, details, version, progress, now_s, gone)
        self._write_down(model)

    def stop(self) -> None:
        """This life is over: nothing is decided any more, nor anybody woken up for it."""
        self.is_over = True
        self._controlling.follow(None)
        for one in self.models.values():
            if one.timer is not None:
                one.timer.cancel()

    def begin_with_who_is_here(self) -> None:
        """Do not wait any longer for workers that took part before."""
        for model, one in self.models.items():
            if not one.coordinator.started and one.losses is not None:
                one.coordinator.world = max(1, len(one.coordinator.state.members))
                self._start(model)
        for worker in self._dealer.workers - self._workers:
            self._lose_data(worker)

    def progress(self, model: int) -> TrainingProgress:
        """How far the workers are, for a snapshot of what was decided so far."""
        data = self._dealer.to_plain() if model == min(self.models) else {}
        return self.models[model].progress(data)

    @property
    def version(self) -> int:
        """Updates of all models together; none may be decided on while a model has not started."""
        return sum(one.coordinator.state.version for one in self.models.values())

    @property
    def started(self) -> bool:
        """Whether something is decided about every model."""
        return bool(self.models) and all(one.coordinator.started for one in self.models.values())

    def _take_back(self, one: ModelRecord, worker: int, back: Reconnect, decided: int) -> str:
        """A worker that took part before: book what became of its contributions; what did of the one that it holds."""
        self._questions.remember(back.answered)
        if back.life != self.life and (late := one.book_losses(worker, back, decided)):
            self._tell(one, f"Rank {worker} came back to the restarted server later: {late}.")
        if back.life == self.life and back.holds:
            fate = one.book_held(worker, back.clock)
            self._tell_others(worker, f"Rank {worker} is back; its contribution {back.clock} {fate}.")
            return fate
        self._tell_others(worker, f"Rank {worker} is back.")
        return "had been decided on before the server was restarted" if back.holds and back.clock < decided else ""

    def _start(self, model: int) -> None:
        one = self.models[model]
        if one.coordinator.started:
            return
        self._carry_out(model, one.coordinator.start_if_all_are_here())
        if one.coordinator.started:
            if one.losses is not None:
                self._tell_losses(one)
            self._step_out_who_asked(model)
            self._answer()

    def _tell_losses(self, one: ModelRecord) -> None:
        losses = one.losses
        assert losses is not None
        one.note = ""
        self._tell(one, f"The parameter server was restarted and goes on from version {losses.version}: {losses}.")

    def _tell(self, one: ModelRecord, text: str) -> None:
        one.note = f"{one.note} {text}".strip()
        _log.warning("%s", text)
        for worker in sorted(self._workers):
            self._say(worker, Notice(text))

    # -- what is decided -----------------------------------------------------------------------------------------

    def _welcome(
        self,
        model: int,
        worker: int,
        values: bool = True,
        *,
        again: bool = False,
        fate: str = "",
        counted: bool = False,
    ) -> None:
        """Tell a worker that has just joined where it is, and give it the parameters.

        Args:
            fate: what became of the contribution that it came back with.
            counted: whether that is in the parameters.
        """
        one = self.models[model]
        clock = one.coordinator.state.members[worker].step
        waits = one.must_wait(worker, clock, values=values)
        version, asked = one.coordinator.state.version, self._questions.next_number
        go = ReleaseWorker(
            model, clock, version, 0, values, again=again, waits=waits, asked=asked, counted=counted, fate=fate
        )
        self._say(worker, go)
        if values:
            one.joining.add(worker)
            self._decide(ReleaseFromShard(model, worker, clock))

    def _carry_out(self, model: int, actions: Iterable[Action]) -> None:
        if self.is_over:
            return
        one = self.models[model]
        actions = tuple(actions)
        # In order of rank, so that it does not depend on who was ready first.
        for worker in sorted(action.worker for action in actions if isinstance(action, Release)):
            for loader, deals in self._dealer.refill(worker).items():
                self._deal_out(loader, {worker: deals})
        for action in actions:
            match action:
                case Grant(worker=worker):
                    one.granted.add((worker, one.clocks[worker]))
                    one.latest[worker] = one.clocks[worker]
                    if one.at_once.get(worker) != one.clocks[worker]:
                        self._say(worker, Granted(model, one.clocks[worker]))
                case Apply(pushes=pushes, rate=rate, in_order=in_order):
                    brought = [one.announced.pop(push) for push in pushes]
                    hyper = next((about.hyper for about in brought if about.weight), brought[0].hyper)
                    about = tuple(msgspec.structs.replace(about, hyper=()) for about in brought)
                    one.granted.difference_update(pushes)
                    one.applied.update(pushes)
                    one.open.update({p: a.weight for p, a in zip(pushes, about, strict=True) if p not in one.here})
                    one.here.difference_update(pushes)
                    self._decide(ApplyContributions(model, pushes, about, hyper, rate, in_order))
                    for push in pushes:
                        self._dealer.applied(model, push)
                case Drop(pushes=pushes):
                    for worker, clock in pushes:
                        del one.announced[(worker, clock)]
                        coming = (worker, clock) in one.granted
                        one.granted.discard((worker, clock))
                        one.here.discard((worker, clock))
                        self._dealer.dropped(model, (worker, clock))
                        self._decide(DropContribution(model, worker, clock, coming))
                case Release(worker=worker):
                    step = one.clocks[worker] + 1
                    stale = one.coordinator.last_staleness.get(worker, 0)
                    counted = one.is_counted(worker, one.clocks[worker])
                    version, waits = one.coordinator.state.version, one.must_wait(worker, step)
                    self._say(worker, ReleaseWorker(model, step, version, stale, counted=counted, waits=waits))
                    self._decide(ReleaseFromShard(model, worker, step))
                case Evict(worker=worker):
                    self._lose_data(worker)
                    self._remove(model, worker)
                    self._say(worker, Evicted(model, _TOO_SLOW))
                    self._tell_evicted(model, worker)
                case Wake(at_s=at_s):
                    self._wake(model, at_s)
        for push in sorted(push for push in one.too_early if not one.is_too_early(push)):
            one.too_early.discard(push)
            self._carry_out(model, one.coordinator.tell(Pushed(*push, one.coordinator.now_s())))
        for worker, clock in [push for push in one.announced if push not in one.coordinator.state.pending]:
            del one.announced[(worker, clock)]  # it went with its worker
            one.here.discard((worker, clock))
            self._decide(DropContribution(model, worker, clock, coming=False))
        if any(isinstance(action, Apply) for action in actions):
            self._controlling.ask()

    def _tell_evicted(self, model: int, worker: int) -> None:
        coordinator = self.models[model].coordinator
        coordinator.note_end(worker, "evicted")
        self._evicted[model, worker] = why = f"{_TOO_SLOW}, by {coordinator.policy!r}"
        of = f" of model {model}" if len(self.models) > 1 else ""
        self._tell_others(
            worker,
            f"Rank {worker} is taken out{of} at version {coordinator.state.version}: {why}. The others go on without "
            f"it until it comes back; {self.what_changes()}.",
        )

    def _remove(self, model: int, worker: int) -> None:
        one = self.models[model]
        loss = self._part(model, worker)
        if loss is not None:
            one.lost[worker] = loss.push[1]
            one.record(worker).lost += 1
        one.granted = {push for push in one.granted if push[0] != worker}
        one.at_once.pop(worker, None)
        one.joining.discard(worker)
        one.left_at.pop(worker, None)
        one.nearly = {push: count for push, count in one.nearly.items() if push[0] != worker}
        one.whole = {push: n for push, n in one.whole.items() if push[0] != worker or push in one.open}

    def _part(self, model: int, worker: int) -> LostContribution | None:
        """Tell all shards that a worker is gone; what is on its way is whole at all of them, or is withdrawn."""
        one = self.models[model]
        pushes = one.open_of(worker)
        asks = bool(pushes) and one.shards > 1
        one.parted += asks
        loss = self._decide(WorkerRemoved(model, worker, one.parted if asks else 0))
        if asks:  # one may be whole there, and all have it, while word of that is on its way
            one.partings[one.parted] = WorkerDrain(pushes, one.shards - 1)
        else:
            self._withdraw(model, pushes)
        return loss

    def _commit(self, model: int, push: Push) -> None:
        """A contribution is whole at all shards."""
        one = self.models[model]
        if push in one.announced:
            one.here.add(push)
        elif one.open.pop(push, None) is None:
            return
        self._decide(CommitUpdates(model, *push))
        self._dealer.whole(model, push)

    def _withdraw(self, model: int, pushes: Iterable[Push]) -> None:
        """What of these is not whole at all shards goes with its worker."""
        one = self.models[model]
        for worker, clock in pushes:
            samples = one.open.pop((worker, clock), None)
            if samples is None:
                continue
            one.whole.pop((worker, clock), None)
            if one.applied.get(worker) == clock:
                del one.applied[worker]
            one.lost[worker] = clock
            if one.coordinator.void.get(worker) != clock:
                one.coordinator.lose(worker, samples)
            self._decide(WithdrawContribution(model, worker, clock))
            text = f"Contribution {clock} of rank {worker} ({samples:g} samples) is lost: it came in part."
            self._tell_others(worker, text)
            self._dealer.withdrawn(model, (worker, clock))

    def _deal_out(self, loader: int, deals: Mapping[int, list[Lease | EndOfEpoch]]) -> None:
        for worker, of_worker in deals.items():
            for deal in of_worker:
                self._say(worker, dealt(loader, deal))

    def _lose_data(self, worker: int) -> None:
        unclear = {(m, push) for m, one in self.models.items() if one.shards > 1 for push in one.open_of(worker)}
        for loader, deals in self._dealer.lose(worker, unclear).items():
            self._deal_out(loader, deals)

    def _wake(self, model: int, at_s: float) -> None:
        one = self.models[model]
        if one.timer is not None:
            one.timer.cancel()
        wait_s = max(0.0, at_s - one.coordinator.now_s())
        one.timer = asyncio.get_running_loop().call_later(wait_s, self._on_wake, model)

    def _on_wake(self, model: int) -> None:
        one = self.models[model]
        one.timer = None
        self._carry_out(model, one.coordinator.tell(Deadline(one.coordinator.now_s())))

    def _answer(self) -> None:
        """Answer what all have asked, once all take part, or take part again."""
        self._look_at_replacements()
        if not all(one.coordinator.started for one in self.models.values()):
            return  # those who are not here, or not back, are to be asked, too
        for asked in self._questions.settle(self._workers):
            if any(ask.question == LEAVING for ask in asked.values()):
                self._swaps.left()
            for worker, ask in sorted(asked.items()):
                self._step_in(worker, refresh=ask.refresh)
            self._answer_those_who_are_ready()

    def _step_in(self, worker: int, *, refresh: bool) -> None:
        for model, one in self.models.items():
            if worker not in one.left_at:
                continue
            version = one.left_at.pop(worker)
            actions = one.coordinator.join(worker)
            self._decide(AdmitWorker(model, worker, one.coordinator.state.members[worker].step, self._entries[worker]))
            self._carry_out(model, actions)
            self._welcome(model, worker, refresh or version != one.coordinator.state.version)

    def _step_out(self, model: int, worker: int) -> None:
        one = self.models[model]
        one.left_at[worker] = one.coordinator.state.version
        self._part(model, worker)
        self._carry_out(model, one.coordinator.leave(worker, returns=True))

    def _step_out_who_asked(self, model: int) -> None:
        """Those who asked before it was decided for the first time wait for the others, not the others for them."""
        one = self.models[model]
        for worker in sorted(self._questions.askers):
            if one.coordinator.started and worker in one.coordinator.state.members:
                self._step_out(model, worker)

    def _answer_those_who_are_ready(self) -> None:
        def has_parameters(worker: int) -> bool:
            return all(worker not in one.joining for one in self.models.values())

        for worker, answer in self._questions.take_ready(has_parameters):
            self._say(worker, answer)

    def _model(self, model: int, worker: int | None = None) -> ModelRecord:
        one = self.models.get(model)
        if one is None or (worker is not None and worker not in one.coordinator.state.members):
            if worker is None:
                raise PeerError(f"A shard speaks of model {model}, which is not trained.")
            why = self._evicted.get((model, worker))
            if why is not None:
                raise PeerError(f"Rank {worker} was taken out of model {model}: {why}.")
            raise PeerError(f"Rank {worker} does not take part in model {model}.")
        return one


def _is_in_step(one: ModelRecord) -> bool:
    """Whether all wait for all, and have brought as much.

    Who is there waits, and what the others bring meanwhile is to weigh no more for that: with `ASP` it does not. Where
    all are in step they come there together. With as many contributions they are not yet: one may be of several steps,
    so they also have to be equally far in their scripts.
    """
    steps = {member.step for member in one.coordinator.state.members.values()}
    return isinstance(one.coordinator.policy, BSP) and len(steps) == 1


def _check(one: ModelRecord, worker: int, message: Announce, *, swapped: bool) -> None:
    """See that a contribution is what this model can be moved by.

    Args:
        swapped: the policy has been, so that it may be what an earlier one wanted.

    Raises:
        PeerError: if it is not.
    """
    policy = one.coordinator.policy
    wanted, brought = policy.contributes(message.clock) != "gradient", message.about.change
    if brought != wanted and not swapped:
        kinds = {False: "a gradient", True: "a change of the parameters"}
        raise PeerError(
            f"Cannot take contribution {message.clock} of rank {worker}: it is {kinds[brought]}, and with {policy!r} "
            f"that is {kinds[wanted]}."
        )
    if brought:
        outer_of(message.about.hyper)
