"""What the first worker brings in place of what the server has: a checkpoint, or where workers without a server were.

It is let do so when all others wait for it, in a question of `REPLACED_IN`. Until then, and so for ever if they train
on, it waits. If they wait for something else, or one of them cannot load what it brings, it is told so: what it asks
next they will never answer as it expects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from offbeat.errors import PeerError
from offbeat.protocol.checkpoints import REPLACED_IN

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from offbeat.coordinator.questions import CollectiveQuestions

_MOST_DUE = 1 << 9  # models and loaders are no more than 256 each


class _Due(NamedTuple):
    worker: int
    carry_out: Callable[[str], None]


class Replacements:
    """Those that wait for the other workers.

    Args:
        questions: that workers ask.
    """

    def __init__(self, questions: CollectiveQuestions) -> None:
        self._questions = questions
        self._due: list[_Due] = []

    def want(self, worker: int, first: int, what: str, carry_out: Callable[[str], None]) -> None:
        """A worker has something for all.

        Args:
            first: who may have.
            carry_out: called, in the order of wishes, when all others wait for it, with "", or with why they do not.

        Raises:
            PeerError: if it is another that brings this, or too much of it is due.
        """
        if worker != first:
            raise PeerError(f"Cannot take {what} from rank {worker}: rank {first} brings what one brings for all.")
        if len(self._due) >= _MOST_DUE:
            raise PeerError(f"Cannot take {what} from rank {worker}: too much waits for the others already.")
        self._due.append(_Due(worker, carry_out))

    def leave(self, worker: int) -> None:
        """It is gone, and brings nothing any more."""
        self._due = [due for due in self._due if due.worker != worker]

    def look(self, workers: Set[int]) -> None:
        """Carry out, or refuse, what no worker trains on beside.

        Args:
            workers: that take part.
        """
        while self._due and (others := workers - {self._due[0].worker}) <= self._questions.askers:
            lacking = sorted(others - self._questions.asking(REPLACED_IN))
            why = ""
            if lacking:
                those = ", ".join(map(str, lacking))
                why = f"Not all load a checkpoint: rank {those} waits for something else, or cannot load it."
            self._due.pop(0).carry_out(why)
