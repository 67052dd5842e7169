"""Workers that ask what all are to be asked step out of training until it is answered: nobody waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import PeerError
from offbeat.protocol.checkpoints import LOADING
from offbeat.protocol.plan_swap import LEAVING
from offbeat.protocol.shards import AdmitWorker

if TYPE_CHECKING:
    from offbeat.coordinator.arrivals import Arrivals
    from offbeat.coordinator.decisions import Decisions
    from offbeat.coordinator.job_record import JobRecord
    from offbeat.coordinator.plan_swap import PlanSwaps
    from offbeat.coordinator.questions import CollectiveQuestions
    from offbeat.coordinator.replacements import Replacements
    from offbeat.protocol.training import AllWorkersAnswer, AskAllWorkers


class QuestionRounds:
    """The questions of one job, and who takes no part for one.

    Args:
        questions: what was asked and answered.
        replacements: wait for questions as well.
        swaps: hears when all have left the server.
    """

    def __init__(
        self,
        job: JobRecord,
        questions: CollectiveQuestions,
        replacements: Replacements,
        swaps: PlanSwaps,
        arrivals: Arrivals,
        decisions: Decisions,
    ) -> None:
        self._job, self._questions, self._replacements = job, questions, replacements
        self._swaps, self._arrivals, self._decisions = swaps, arrivals, decisions
        self._brought: dict[int, AskAllWorkers] = {}  # by validator: that it has brought a checkpoint, or cannot
        self._late: set[int] = set()  # validators that have not said so of the checkpoint that was loaded last,
        self._loaded: AllWorkersAnswer | None = None  # and what all were answered then

    def ask(self, worker: int, message: AskAllWorkers) -> None:
        """A worker asks what all are to be asked; until they have it takes no part, so that nobody waits for it.

        A validator takes part in no question; but that which comes with a checkpoint waits for what it brings.

        Raises:
            PeerError: if it still waits for an answer, or is a validator, and it is another question.
        """
        if worker in self._job.validators:
            if message.question != LOADING:
                raise PeerError(f"Cannot ask the workers for {message.question!r} as rank {worker}, a validator.")
            self._brought[worker] = message
            self._answer_late()
            self.answer()
            return
        self._questions.ask(worker, message)
        for model, one in self._job.models.items():
            if one.runner.started and worker in one.runner.state.members:
                self._step_out(model, worker)
        self.answer()

    def answer(self) -> None:
        """Answer what all have asked, once all take part, or take part again."""
        self._replacements.look()
        if not all(one.runner.started for one in self._job.models.values()):
            return  # those who are not here, or not back, are to be asked, too
        for asked in self._questions.settle(self._job.asked, self._with_validators):
            questions = {ask.question for ask in asked.values()}
            if LEAVING in questions:
                self._swaps.left()
            if LOADING in questions:
                self._late, self._loaded = (self._job.validators & self._job.workers) - self._brought.keys(), None
            for worker, ask in sorted(asked.items()):
                self._step_in(worker, refresh=ask.refresh)
            self.answer_those_who_are_ready()

    def answer_those_who_are_ready(self) -> None:
        """Give their answers to those who have the parameters that go with them."""

        def has_parameters(worker: int) -> bool:
            return all(worker not in one.joining for one in self._job.models.values())

        for worker, answer in self._questions.take_ready(has_parameters):
            own = self._brought.pop(worker, None)  # validators count their questions by themselves
            if own is not None:
                self._loaded = answer
            number = answer.number if own is None else own.number
            self._job.out.send(worker, msgspec.structs.replace(answer, number=number))
        self._answer_late()

    def _answer_late(self) -> None:
        """Answer validators that nobody has waited for: of several the first one brings what all load."""
        if self._loaded is None:
            return
        for worker in sorted(self._late & self._brought.keys()):
            self._late.discard(worker)
            number = self._brought.pop(worker).number
            self._job.out.send(worker, msgspec.structs.replace(self._loaded, number=number))

    def _with_validators(self, asked: dict[int, AskAllWorkers]) -> dict[int, AskAllWorkers] | None:
        """Add what validators say to what all workers asked; None if that is waited for."""
        if not self._job.needs_validator or all(ask.question != LOADING for ask in asked.values()):
            return asked
        first = min(self._job.validators & self._job.workers, default=None)
        return {**asked, **self._brought} if first in self._brought else None

    def step_out_who_asked(self, model: int) -> None:
        """Let the workers that asked before the first decision wait for the others, not the others for them."""
        runner = self._job.models[model].runner
        for worker in sorted(self._questions.askers):
            if runner.started and worker in runner.state.members:
                self._step_out(model, worker)

    def leave(self, worker: int, *, returns: bool = False) -> None:
        """A worker is gone; what it alone was missing to is answered, unless it returns at once."""
        self._questions.leave(worker)
        self._brought.pop(worker, None)
        self._late.discard(worker)
        self._replacements.leave(worker)
        for one in self._job.models.values():
            one.left_at.pop(worker, None)
        if not returns:
            self.answer()

    def _step_in(self, worker: int, *, refresh: bool) -> None:
        job = self._job
        for model, one in job.models.items():
            if worker not in one.left_at:
                continue
            version = one.left_at.pop(worker)
            actions = one.runner.join(worker)
            job.out.decide(AdmitWorker(model, worker, one.runner.state.members[worker].step, job.entries[worker]))
            self._decisions.carry_out(model, actions)
            values, asked = refresh or version != one.runner.state.version, self._questions.next_number
            self._decisions.welcome(model, worker, values, asked=asked)

    def _step_out(self, model: int, worker: int) -> None:
        one = self._job.models[model]
        one.left_at[worker] = one.runner.state.version
        self._arrivals.stop(model, worker)
        self._decisions.carry_out(model, one.runner.leave(worker, returns=True))
