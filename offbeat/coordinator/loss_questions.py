"""The losses on trusted samples by which updates are judged: who finds them out, and who does if that one is lost.

The first validator that takes part is asked about an update, once all shards have measured it. If it is gone before it
has answered, the next one is asked the same under another number; if there is none, whichever comes first. Until then
the update waits, and with it who waits for the update.

An answer to a question that is not asked any more is void, and nothing comes of it: its sender may have been away. What
is no answer to what was asked is an error of its sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import PeerError
from offbeat.protocol.loss_scores import ScoreContributions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.coordinator.job_record import JobRecord
    from offbeat.protocol.loss_scores import ContributionsScored
    from offbeat.sync import Push


@dataclass
class LossQuestion:
    """A question about one update.

    Args:
        pushes: the contributions, each of which is finite.
        change, rate: as of `ScoreContributions`.
        answered: called with the losses.
        validator: who was asked last; None for nobody.
        number: under which.
    """

    pushes: tuple[Push, ...]
    change: bool
    rate: float
    answered: Callable[[Sequence[float]], None]
    validator: int | None = None
    number: int = 0


class LossQuestions:
    """The questions of one job that are not answered."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._open: dict[tuple[int, int], LossQuestion] = {}  # by model and version
        self._number = 0  # of the last one that was asked

    def add(self, model: int, version: int, question: LossQuestion) -> None:
        """Ask about one more update, as soon as there is somebody to be asked."""
        self._open[(model, version)] = question
        self.ask_all()

    def ask_all(self) -> None:
        """Ask what nobody is being asked who takes part."""
        for (model, version), question in sorted(self._open.items()):
            here = self._validators(model)
            if question.validator not in here:
                question.validator = here[0] if here else None
                if question.validator is not None:
                    self._ask(question.validator, model, version, question)

    def hear(self, validator: int, message: ContributionsScored) -> None:
        """A validator has found out the losses.

        Raises:
            PeerError: if this is no answer to what it was asked.
        """
        question = self._open.get((message.model, message.version))
        if message.number > self._number:
            raise PeerError(f"Cannot take losses from rank {validator}: question {message.number} was never asked.")
        if question is None or question.number != message.number:
            return  # it was asked before it was away, and somebody else has been since
        if question.validator != validator:
            raise PeerError(f"Cannot take losses from rank {validator}: rank {question.validator} is asked for them.")
        if len(message.losses) != 1 + len(question.pushes):
            raise PeerError(
                f"Cannot take {len(message.losses)} losses from rank {validator}: update {message.version} has "
                f"{len(question.pushes)} contributions to be judged, and there is one more without any."
            )
        del self._open[(message.model, message.version)]
        question.answered(message.losses)

    def _ask(self, validator: int, model: int, version: int, question: LossQuestion) -> None:
        self._number += 1
        question.number = self._number
        about = ScoreContributions(model, version, self._number, question.pushes, question.change, question.rate)
        self._job.out.send(validator, about)

    def _validators(self, model: int) -> list[int]:
        one = self._job.models.get(model)
        return sorted(self._job.validators.intersection(() if one is None else one.runner.state.members))
