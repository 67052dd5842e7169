"""The questions that all workers are asked together, at one of them; lives on the event loop."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from offbeat.errors import DisagreementError, OffbeatError
from offbeat.protocol.training import AllWorkersAnswer, Answered, AskAllWorkers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.server.client.connections import ShardConnections
    from offbeat.server.client.requests import EndOfTraining, ServerRequest

_MOST_ANSWERED = 16


class QuestionClient:
    """The questions of one worker. They are numbered alike on all workers.

    Args:
        connections: to all shards.

    Attributes:
        answered: the last answers, for a server that was set back to before them.
    """

    def __init__(self, connections: ShardConnections) -> None:
        self._connections = connections
        self._count = 0
        self._open: dict[int, tuple[AskAllWorkers, ServerRequest[AllWorkersAnswer]]] = {}  # by number
        self.answered: collections.deque[Answered] = collections.deque(maxlen=_MOST_ANSWERED)

    @property
    def is_asking(self) -> bool:
        """Whether there is a question without an answer."""
        return bool(self._open)

    def begin_at(self, number: int) -> None:
        """Number the next question like this: a worker that has just joined was not asked what came before."""
        self._count = max(self._count, number)

    def add(
        self,
        request: ServerRequest[AllWorkersAnswer],
        question: str,
        numbers: Sequence[float],
        *,
        refresh: bool,
        refusal: str,
    ) -> AskAllWorkers:
        """Number a question; it is not asked yet."""
        number, self._count = self._count, self._count + 1
        ask = AskAllWorkers(number, question, refresh, tuple(numbers), refusal)
        self._open[number] = (ask, request)
        return ask

    def ask_again(self) -> None:
        """Ask what was not answered, now that all models are open again."""
        for ask, _ in self._open.values():
            self._connections.say(ask)

    def answer(self, answer: AllWorkersAnswer) -> None:
        """Handle an answer."""
        _, request = self._open.pop(answer.number, (None, None))
        if request is None:
            return
        if answer.disagreement:
            request.fail(_apart(answer.disagreement))
            return
        self.answered.append(Answered(answer.number, answer.numbers, answer.workers))
        request.finish(answer)

    def fail(self, error: OffbeatError | EndOfTraining) -> None:
        """Fail all questions: they will not be answered."""
        for _, request in self._open.values():
            request.fail(error)


def _apart(questions: str) -> DisagreementError:
    return DisagreementError(
        f"The workers disagree about where they are: they ask for {questions} at the same time. Let every worker call "
        "run.mean equally often and in the same order."
    )
