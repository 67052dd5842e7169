"""The sessions that this process has open, for whoever starts, stops or ends the process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from offbeat.run.step_check import StepCheck


class OpenSession(Protocol):
    """The part of a `WorkerSession` that is used here.

    Attributes:
        pid: of the process that it is of.
        drains: whether this worker leaves behind its next step.
        has_left: whether it has left the others in order.
    """

    pid: int
    drains: bool
    has_left: bool

    @property
    def can_drain(self) -> bool:
        """Whether the others go on if this worker leaves behind a step."""

    def make_way(self) -> None:
        """Close it, since another one is to begin in this process."""

    def say_last_words(self, error: BaseException) -> None:
        """Let the other workers know what this one dies of."""

    def end_metrics(self, error: BaseException | None) -> None:
        """Write the last records of metrics and history."""


_open: set[OpenSession] = set()
_leaving: list[OpenSession] = []  # told to leave
_checks: list[StepCheck] = []  # of this process's sessions with several workers


def opened(session: OpenSession) -> None:
    """One more is open."""
    _open.add(session)


def closed(session: OpenSession) -> None:
    """Note that a session is closed."""
    _open.discard(session)


def has_others(check: StepCheck) -> None:
    """A session with several workers has begun, in which steps of models that were not prepared are counted."""
    _checks.append(check)


def of_this_process() -> list[OpenSession]:
    """List the open sessions; a forked child is not the worker, and has none."""
    return [one for one in _open if one.pid == os.getpid()]


def say_last_words(error: BaseException) -> None:
    """Write down what this process dies of; for whoever ends it without closing its runs."""
    for session in of_this_process():
        session.say_last_words(error)
        session.end_metrics(error)


def drain() -> bool:
    """Have this process leave its job behind its next step; whether it is in one whose others go on then."""
    asked = False
    for session in of_this_process():
        if session.can_drain:
            session.drains = asked = True
            _leaving.append(session)
    return asked


def is_leaving(session: OpenSession) -> bool:
    """Whether it was asked to leave."""
    return session in _leaving


def has_left() -> bool:
    """Whether all sessions that `drain` was for have left in order; what this process still does concerns no other."""
    return bool(_leaving) and all(session.has_left for session in _leaving)


def trained_unprepared() -> bool:
    """Whether this process has trained beside other workers, and never prepared a model."""
    return any(check.is_apart for check in _checks)
