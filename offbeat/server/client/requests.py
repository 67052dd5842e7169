"""Requests that the training thread waits for while the event loop exchanges."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from datetime import timedelta

    from offbeat.errors import OffbeatError
    from offbeat.payload import Reply

T = TypeVar("T")


class EndOfTraining(SystemExit):
    """The end of a validator's script in good order, behind whatever it waits for: the workers are done."""


class PulledParameters(NamedTuple):
    """The newest parameters, as far as the server says something about them; they themselves are in the model.

    Args:
        life: of the server that gave them.
        versions: of them, by block.
        announced: numbers under which the contribution before them was announced; () if there was none.
        is_counted: whether that is said to be in the parameters.
        staleness: of it.
        fate: what became of it, if this worker had been left behind with it; "" if it had not.
    """

    life: int
    versions: tuple[int, ...]
    announced: tuple[int, ...] = ()
    is_counted: bool = False
    staleness: int = 0
    fate: str = ""


class ServerRequest(Generic[T]):
    """A request to the server, and its answer once that is there; waited for as any `Pending`.

    Args:
        sent_bytes: of the contribution that goes with it.

    Attributes:
        value: the answer; there once the request is done.
    """

    value: T

    def __init__(self, sent_bytes: int = 0) -> None:
        self.sent_bytes = sent_bytes
        self._error: OffbeatError | EndOfTraining | None = None
        self._over = threading.Event()

    def finish(self, value: T) -> None:
        """Finish the request with its answer; or once more, with a newer one."""
        self.value = value
        self._over.set()

    def fail(self, error: OffbeatError | EndOfTraining) -> None:
        """Finish the request without an answer, unless it has one."""
        if not self.is_over:
            self._error = error
            self._over.set()

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done (True) or `timeout` has passed (False).

        Raises:
            OffbeatError: what ended it: the server is gone, or refused.
            EndOfTraining: if the workers are done, and this is a validator.
        """
        over = self._over.wait(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return over

    def done(self) -> bool:
        return self.is_over and self._error is None

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return self._over.is_set()

    def result(self) -> Reply:
        return []
