"""Workers come, come back and go; models begin with them, and go on from snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.coordinator.instructions import PolicyTimer
from offbeat.coordinator.model_record import ModelRecord, revived
from offbeat.coordinator.policy_runner import PolicyRunner
from offbeat.coordinator.reconnect import ReconnectAction, judge
from offbeat.errors import PeerError, PlanError
from offbeat.history import LifeBegan
from offbeat.protocol.rank_reservation import MOST_RANKS, RanksReserved
from offbeat.protocol.shards import AdmitWorker
from offbeat.protocol.training import ModelOpened, Notice, Refused
from offbeat.protocol.worker_status import residual_lost
from offbeat.sync import State

if TYPE_CHECKING:
    from offbeat.coordinator.arrivals import Arrivals
    from offbeat.coordinator.data_leases import LeaseManager
    from offbeat.coordinator.data_requests import DataRequests
    from offbeat.coordinator.decisions import Decisions
    from offbeat.coordinator.events import ModelBegun, ModelRestored, RanksAsked, WorkerGone, WorkerOpened
    from offbeat.coordinator.job_record import JobRecord
    from offbeat.coordinator.plan_swap import PlanSwaps
    from offbeat.coordinator.question_rounds import QuestionRounds
    from offbeat.coordinator.questions import CollectiveQuestions
    from offbeat.protocol.training import LeaveAfter, Reconnect

_NO_VALIDATOR = (
    "No validator takes part, so that nothing can be judged, and workers wait. Start one: offbeat run --validator "
    "--job PLACE SCRIPT."
)
_START_MORE = "Start more: offbeat run --join PLACE --workers N SCRIPT."


class Membership:
    """The workers of one job, and the models that they train.

    Args:
        leases, data: what workers compute next.
        swaps: which plan holds.
        questions, rounds: what all are asked.
        arrivals, decisions: what becomes of contributions.
    """

    def __init__(
        self,
        job: JobRecord,
        *,
        leases: LeaseManager,
        data: DataRequests,
        swaps: PlanSwaps,
        questions: CollectiveQuestions,
        rounds: QuestionRounds,
        arrivals: Arrivals,
        decisions: Decisions,
    ) -> None:
        self._job, self._leases, self._data, self._swaps = job, leases, data, swaps
        self._questions, self._rounds, self._arrivals, self._decisions = questions, rounds, arrivals, decisions
        self._filled_early: dict[int, int] = {}  # shards that were filled before anybody opened the model here
        self._missed: set[int] = set()  # that were connected, and are gone before they opened any model
        self._reserved = 0  # ranks below this one were given to newcomers, or are not for any
        self._leaving: dict[int, int] = {}  # those that were told to leave: behind which of their steps

    # -- models --------------------------------------------------------------------------------------------------

    def begin(self, event: ModelBegun) -> None:
        """The first worker wants to train a model.

        Raises:
            PeerError: if its plan cannot be read, or it took part before, and nothing is known of that here.
        """
        job, model, details = self._job, event.model, event.details
        if details.back is not None:
            raise PeerError(
                "Cannot continue: the parameter server was restarted, and has no snapshot to resume from. Start the "
                "job again, from a checkpoint if there is one."
            )
        if details.holders > details.shards:
            raise PeerError(f"Cannot deal a model over {details.holders} shards: there are {details.shards}.")
        try:
            plan = self._swaps.begin(details.plan)
        except PlanError as error:
            raise PeerError(f"Cannot coordinate by this worker's plan: {error}") from error
        ranks = details.begins_with
        job.goes_by(plan)
        runner = PolicyRunner(plan.sync, len(ranks), job.time_s, State(hosts=details.hosts))
        to_fill = details.shards - self._filled_early.pop(model, 0)
        job.models[model] = ModelRecord(
            runner, details.optimizer, details.shards, to_fill, details.holders, ranks=ranks
        )
        for worker in self._missed & ranks:
            runner.miss(worker)
        self._write_down(model)

    def restore(self, event: ModelRestored) -> None:
        """A model continues from a snapshot, or from memory."""
        job, details, progress = self._job, event.details, event.progress
        if progress.data:
            self._leases.restore(progress.data)
            for worker in event.gone:
                self._leases.lose(worker)
        plan = self._swaps.begin(details.plan, details.swaps)
        job.goes_by(plan)
        job.validators.update(progress.validators or ())
        job.models[event.model] = revived(
            plan.sync, details, event.version, progress, job.time_s, event.gone, job.validators, event.applied
        )
        self._write_down(event.model)

    def forget(self, model: int) -> None:
        """All have left a model before there were any parameters."""
        one = self._job.models.pop(model)
        self._filled_early[model] = one.shards - one.to_fill  # other shards keep what they have been given
        if not self._job.models:
            self._swaps.forget()  # whoever comes next may have another
        self._job.out.set_timer(PolicyTimer(model), None)

    def filled(self, model: int) -> None:
        """A shard has its first values."""
        if model not in self._job.models:
            self._filled_early[model] = self._filled_early.get(model, 0) + 1
            return
        one = self._job.models[model]
        one.to_fill -= 1
        if not one.to_fill:
            for worker in sorted(one.runner.state.members):
                self._decisions.welcome(model, worker, asked=self._questions.next_number)
            self._start(model)

    def begin_with_who_is_here(self) -> None:
        """Do not wait any longer for workers that took part before."""
        for model, one in self._job.models.items():
            if not one.runner.started and one.losses is not None:
                one.runner.world = max(1, len(one.runner.trainers))
                self._start(model)
        for worker in self._leases.workers - self._job.workers:
            self._data.lose(worker)

    # -- workers -------------------------------------------------------------------------------------------------

    def reserve(self, event: RanksAsked) -> None:
        """Give ranks that nobody has had to newcomers that are about to be started."""
        job = self._job
        had = {*job.ranks, *job.workers, *(worker for one in job.models.values() for worker in one.runner.records)}
        first = max(self._reserved, event.least, max(had, default=-1) + 1)
        if first + event.count > MOST_RANKS:
            refusal = (
                f"Cannot give {event.count} more workers ranks: this job has had {first}, and {MOST_RANKS} is the most."
            )
            job.out.reply(event.asker, RanksReserved(refusal=refusal))
            return
        self._reserved = first + event.count
        job.out.reply(event.asker, RanksReserved(first))

    def open(self, event: WorkerOpened) -> None:
        """A worker takes part in a model, or takes part again.

        Raises:
            PeerError: if its plan is not of this job, or its rank was a validator's, and it is none, or the reverse.
        """
        job, model, worker, back = self._job, event.model, event.worker, event.details.back
        one = job.models[model]
        self._check_role(one, worker, is_validator=event.is_validator)
        is_trusted = event.is_validator or not job.needs_validator
        self._swaps.join(worker, event.details, life=job.life, is_trusted=is_trusted)
        job.evicted.pop((model, worker), None)
        job.workers.add(worker)
        self._missed.discard(worker)
        job.entries[worker] = event.entry
        decided = one.runner.state.past.get(worker, 0)
        verdict = judge(back, life=job.life, decided=decided)
        if verdict is ReconnectAction.LATER:
            job.out.send(worker, ModelOpened(model, wants_values=False, life=job.life, later=True))
            return
        fate = "" if back is None else self._take_back(one, worker, back, decided)
        if back is None:
            actions = one.runner.join(worker)
            if one.runner.started:
                self._log_joined(one, worker)
        else:
            # What it holds is not brought any more, or again under another number, which is not given again.
            least = back.clock + (back.holds and back.life == job.life)
            actions = one.runner.join(worker, least=least, weight=back.weight)
        job.out.decide(AdmitWorker(model, worker, one.runner.state.members[worker].step, event.entry))
        self._decisions.carry_out(model, actions)
        if not one.to_fill:
            counted = bool(fate) and back is not None and one.is_counted(worker, back.clock)
            self._decisions.welcome(
                model,
                worker,
                verdict is ReconnectAction.JOIN,
                again=verdict is ReconnectAction.AGAIN,
                fate=fate,
                counted=counted,
                asked=self._questions.next_number,
            )
            self._start(model)
        if back is not None and one.report:
            job.out.send(worker, Notice(one.report, life=job.life))  # its link may have been lost before it came
        if one.pause and not event.is_validator:
            job.out.send(worker, Notice(one.pause, waits=True))  # the others have been told
        self._tell_pause(one)

    def _check_role(self, one: ModelRecord, worker: int, *, is_validator: bool) -> None:
        job = self._job
        if is_validator and not job.needs_validator:
            raise PeerError(
                f"Cannot admit rank {worker} as a validator: the plan of this job has none. Start the job with a plan "
                "with validator=, such as Plan(validator=ZenoPS(), ...)."
            )
        was_worker = worker in one.ranks or (worker in one.runner.records and worker not in job.validators)
        if was_worker if is_validator else worker in job.validators:
            was, comes = ("worker", "validator") if is_validator else ("validator", "worker")
            raise PeerError(f"Cannot admit rank {worker} as a {comes}: it is a {was}'s. Join with another rank.")
        if is_validator:
            job.validators.add(worker)

    def announce_leave(self, worker: int, message: LeaveAfter) -> None:
        """A worker was asked to leave, and will say good-bye."""
        self._leaving[worker] = message.step

    def leave(self, event: WorkerGone) -> None:
        """A worker is gone."""
        job, worker = self._job, event.worker
        end = "gone" if event.replaced else self._tell_gone(event)
        job.workers.discard(worker)
        self._swaps.leave(worker)
        self._data.lose(worker)
        for model, one in job.models.items():
            one.runner.note_end(worker, end)
            if worker in one.runner.state.members or worker in one.runner.state.away:
                self._arrivals.remove(model, worker)
                self._decisions.carry_out(model, one.runner.leave(worker))
                self._rounds.step_out_who_asked(model)
            self._tell_pause(one)
            if not job.asked:
                self._decisions.end(one)
        self._rounds.leave(worker, returns=event.replaced)
        if event.error is not None or worker in job.validators:
            self._end_if_too_few()

    def miss(self, worker: int) -> None:
        """A worker is gone before it has opened any model."""
        self._missed.add(worker)
        for model, one in self._job.models.items():
            # Workers of an earlier life dial until they reach all shards; they are waited for.
            if worker in one.ranks and one.losses is None:
                self._decisions.carry_out(model, one.runner.miss(worker))
                self._rounds.step_out_who_asked(model)
        self._rounds.answer()

    def _take_back(self, one: ModelRecord, worker: int, back: Reconnect, decided: int) -> str:
        """A worker that took part before: book what became of its contributions; what did of the one that it holds."""
        self._questions.remember(back.answered)
        if back.life != self._job.life and (late := one.book_losses(worker, back, decided)):
            self._note(one, f"Rank {worker} reconnected to the restarted server later: {late}.")
        if back.life == self._job.life and back.holds:
            fate = one.book_held(worker, back.clock)
            self._job.tell(f"Rank {worker} is back; its contribution {back.clock} {fate}.", worker)
            return fate
        self._job.tell(f"Rank {worker} is back.", worker)
        if not back.holds or back.clock >= decided:
            return ""
        is_used = one.is_counted(worker, back.clock)
        return "is used" if is_used else "had been decided on before the server was restarted"

    def _start(self, model: int) -> None:
        """Begin to decide about a model, if all are here."""
        one = self._job.models[model]
        if one.runner.started:
            return
        self._decisions.carry_out(model, one.runner.start_if_all_are_here())
        if one.runner.started:
            if (losses := one.losses) is not None:
                one.note = ""
                how = "continues in its memory" if one.is_kept else "was restarted and resumes"
                one.report = f"The parameter server {how} from version {losses.version}: {losses}."
                self._note(one, one.report, life=self._job.life)
            self._rounds.step_out_who_asked(model)
            self._rounds.answer()

    # -- what people and the history are told --------------------------------------------------------------------

    def _write_down(self, model: int) -> None:
        """Have the history begin with where a model is."""
        out, runner, plan = self._job.out, self._job.models[model].runner, self._swaps.present
        runner.model, runner.record, state = model, out.record, runner.state
        runner.validators = self._job.validators if self._job.needs_validator else None
        if (rule := self._job.rule) is not None and self._job.too_few == "hold":
            runner.least = rule.least()
        assert plan is not None
        out.record(LifeBegan(model, self._job.life, plan.to_toml(), state.version, state.hosts, dict(state.past)))

    def _log_joined(self, one: ModelRecord, worker: int) -> None:
        """Say who is new, and what becomes of the batches."""
        state, changes = one.runner.state, self._leases.what_changes()
        if worker in self._job.validators:
            self._job.out.log(f"Rank {worker} validates from version {state.version} on.")
            return
        count, version = len(one.runner.trainers), state.version
        self._job.out.log(f"Rank {worker} has joined at version {version}: {count} workers take part; {changes}.")

    def _tell_pause(self, one: ModelRecord) -> None:
        """Say once why nothing is decided, and that something is again."""
        pause = self._why_paused(one) if self._job.asked else ""
        if one.pause == pause:
            return
        goes_on = "A validator takes part" if one.pause == _NO_VALIDATOR else "Enough workers take part"
        one.note = f"{one.note.replace(one.pause, '').strip()} {pause}".strip()
        one.pause = pause
        if self._job.asked:
            self._job.tell(pause or f"{goes_on}: training goes on.", waits=bool(pause))

    def _why_paused(self, one: ModelRecord) -> str:
        """Say why nothing is decided, and the way out; "" if something is."""
        if one.runner.lacks_validator:
            return _NO_VALIDATOR
        if not one.runner.started or not one.runner.is_paused:  # at the beginning all are waited for
            return ""
        return f"{self._too_few(one)}, and workers wait. {_START_MORE}"

    def _too_few(self, one: ModelRecord) -> str:
        rule, count = self._job.rule, one.runner.left_to_train
        assert rule is not None
        return f"{count} {'worker takes' if count == 1 else 'workers take'} part, and {rule!r} needs {rule.least()}"

    def _end_if_too_few(self) -> None:
        """End the job for all, if the plan says so and fewer are left than its rule needs."""
        job = self._job
        if job.too_few != "raise" or job.rule is None or job.was_ended:
            return
        for one in job.models.values():
            if not one.runner.started or not one.runner.trainers:
                continue
            if one.runner.lacks_validator:
                text = f"Cannot go on: no validator is left, and {job.rule!r} needs one."
            elif one.runner.left_to_train < job.rule.least():
                text = f"Cannot go on: {self._too_few(one)}."
            else:
                continue
            job.was_ended = True
            job.out.log(text)
            for worker in sorted(job.workers):
                job.out.send(worker, Refused(f"{text} The plan has too_few='raise'; with 'hold' it would wait."))
            return

    def _note(self, one: ModelRecord, text: str, life: int | None = None) -> None:
        one.note = f"{one.note} {text}".strip()
        self._job.tell(text, life=life)

    def _tell_gone(self, event: WorkerGone) -> str:
        """Let all know that a worker is gone, and why; how it ended, as `WorkerStatus.phase` has it."""
        job, worker, error = self._job, event.worker, event.error
        step, count = self._leaving.pop(worker, None), len(job.asked - {worker})
        changes = self._leases.what_changes()
        if error is not None:
            if worker in job.validators:
                job.tell(f"Rank {worker}, a validator, is gone: {error}", worker)
            elif all(worker != evicted for _, evicted in job.evicted):  # else all know
                status = job.statuses.get(worker)
                lost = residual_lost(0.0 if status is None else status.residual)
                job.tell(f"Rank {worker} is gone: {error}{lost} The others continue; {changes}.", worker)
            return "gone"
        if step is None:
            return "done"
        if count:
            left = f"left cleanly behind its step {step}"
            goes_on = "1 worker continues" if count == 1 else f"{count} workers continue"
            if worker in job.validators:  # with which no batch goes
                job.tell(f"Rank {worker}, a validator, was asked to leave, and {left}.", worker)
            else:
                job.tell(f"Rank {worker} was asked to leave, and {left}: {goes_on}; {changes}.", worker)
        return "left"
