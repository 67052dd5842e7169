"""Questions that all workers are asked beside the data: what each said, and what each is to be told.

A question is answered when all who are connected have asked it. The last answers are remembered, for workers that were
away when the others were answered, and for a server that was restarted since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PeerError
from offbeat.float_sum import add_up
from offbeat.protocol.training import AllWorkersAnswer, Answered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Set

    from offbeat.protocol.training import AskAllWorkers

_REMEMBERED = 64


class CollectiveQuestions:
    """The collective questions of one job. Call order, for each: `ask` by all workers, `settle`, `take_ready`."""

    def __init__(self) -> None:
        self._asked: dict[int, dict[int, AskAllWorkers]] = {}  # by number and worker
        self._answers: dict[int, AllWorkersAnswer] = {}  # by worker, until it has the parameters that go with it
        self._answered: dict[int, Answered] = {}  # the last ones, by number

    def ask(self, worker: int, question: AskAllWorkers) -> None:
        """A worker asks.

        Raises:
            PeerError: if it still waits for an answer.
        """
        if worker in self._answers or worker in self.askers:
            raise PeerError(f"Rank {worker} asks {question.question!r} before its last question is answered.")
        self._asked.setdefault(question.number, {})[worker] = question

    @property
    def next_number(self) -> int:
        """The number of a new worker's first question: the one that others wait with, or the next."""
        return min(self._asked, default=max(self._answered, default=-1) + 1)

    @property
    def askers(self) -> set[int]:
        """Workers that wait for the others to ask."""
        return {worker for asked in self._asked.values() for worker in asked}

    def asking(self, questions: Set[str]) -> set[int]:
        """Workers that wait for the others to ask one of these, and refuse nothing."""
        return {
            worker
            for asked in self._asked.values()
            for worker, ask in asked.items()
            if ask.question in questions and not ask.refusal
        }

    def leave(self, worker: int) -> None:
        """A worker is gone."""
        self._answers.pop(worker, None)
        for number, asked in list(self._asked.items()):
            asked.pop(worker, None)
            if not asked:  # whoever asks it next is the first again, if anybody does
                del self._asked[number]

    def remember(self, answered: Iterable[Answered]) -> None:
        """Restore what was answered before, by the server that this one follows."""
        for one in answered:
            if one.number not in self._answered:
                self._note(one)

    def settle(
        self,
        workers: Set[int],
        complete: Callable[[dict[int, AskAllWorkers]], dict[int, AskAllWorkers] | None] = lambda asked: asked,
    ) -> Iterator[dict[int, AskAllWorkers]]:
        """One question after the other that can be answered now, by worker; its answers are ready from then on.

        Args:
            workers: that are connected.
            complete: adds what others say to what all of them ask; None if that is waited for.
        """
        for number, asked in list(self._asked.items()):
            if self._answered and number <= max(self._answered):
                del self._asked[number]
                self._answer_as_before(number, asked)
            elif not workers - set(asked) and (whole := complete(asked)) is not None:
                del self._asked[number]
                self._answer(number, whole)
            else:
                continue
            yield asked

    def take_ready(self, is_ready: Callable[[int], bool]) -> Iterator[tuple[int, AllWorkersAnswer]]:
        """Answers for the workers that are ready for them."""
        for worker in [worker for worker in self._answers if is_ready(worker)]:
            yield worker, self._answers.pop(worker)

    def _answer(self, number: int, asked: dict[int, AskAllWorkers]) -> None:
        questions = {ask.question for ask in asked.values()}
        width = max(len(ask.numbers) for ask in asked.values())
        sums = tuple(
            add_up(ask.numbers[i] if i < len(ask.numbers) else 0.0 for _, ask in sorted(asked.items()))
            for i in range(width)
        )
        refused = next((f"Rank {worker}: {ask.refusal}" for worker, ask in sorted(asked.items()) if ask.refusal), "")
        disagreement = "" if len(questions) == 1 else ", ".join(sorted(questions))
        self._note(Answered(number, sums, len(asked)))
        for worker in sorted(asked):
            self._answers[worker] = AllWorkersAnswer(number, sums, len(asked), disagreement, refused)

    def _answer_as_before(self, number: int, asked: dict[int, AskAllWorkers]) -> None:
        """The others were answered without these workers, or before the server was restarted."""
        known = self._answered.get(number)
        for worker, ask in sorted(asked.items()):
            if known is None:
                self._answers[worker] = AllWorkersAnswer(number, (), 0, f"{ask.question} (long after the others did)")
            else:
                self._answers[worker] = AllWorkersAnswer(number, known.numbers, known.workers)

    def _note(self, answered: Answered) -> None:
        self._answered[answered.number] = answered
        if len(self._answered) > _REMEMBERED:
            del self._answered[min(self._answered)]
