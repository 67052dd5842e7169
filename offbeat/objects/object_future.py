"""The outcome of a call to a store, and how long one waits for it."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from offbeat.errors import ObjectError, ObjectTimeoutError, OffbeatError
from offbeat.pending import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")
_LOOK_S = 0.5


class CallDeadline:
    """The moment until which a call may take.

    Args:
        timeout: in seconds from now; None for as long as it takes.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._until_s = None if timeout is None else time.monotonic() + timeout

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; infinity without an end."""
        return math.inf if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether none is left."""
        return self.left_s == 0.0


class ObjectFuture(Completion, Generic[T]):
    """The outcome of a call to a store, once it is there; can be waited for, or awaited.

    A task that is cancelled while it awaits this withdraws the call, as `stop` does.

    Args:
        what: it does, for people, such as "get 'w'".
        withdraw: tells the store that nobody waits any more.
        provided: the outcome counts once this is over, and only if it is over well.

    Attributes:
        progress: the last that is known of it, for people; "" if nothing is.
    """

    value: T

    def __init__(
        self, what: str, withdraw: Callable[[], None] | None = None, provided: Completion | None = None
    ) -> None:
        super().__init__()
        self.what, self.progress = what, ""
        self._withdraw, self._provided = withdraw, provided
        if provided is not None:
            provided.add_done_callback(lambda: None if provided.error is None else self.end(provided.error))

    def finish(self, value: T) -> None:
        """End it with this outcome."""
        self.value = value
        if self._provided is None:
            self.end()
        else:
            self._provided.add_done_callback(self.end)

    def stop(self) -> None:
        """Withdraw the call, unless it is over; whoever still waits for it gets an error."""
        if not self.done():
            if self._withdraw is not None:
                self._withdraw()
            self.end(ObjectError(f"Cannot {self.what}: the call was withdrawn."))

    def outcome(self) -> T:
        """Return the outcome; once it is over.

        Raises:
            OffbeatError: what ended it.
        """
        if self.error is not None:
            raise self.error
        return self.value

    def get(self, timeout: CallDeadline | float | None = None) -> T:
        """Wait for the outcome; signals are handled meanwhile.

        Args:
            timeout: in seconds; None for as long as it takes.

        Raises:
            ObjectTimeoutError: if it has taken too long; says how far it is. It can be waited for again.
            OffbeatError: what ended it.
        """
        deadline = timeout if isinstance(timeout, CallDeadline) else CallDeadline(timeout)
        while not self.wait(timedelta(seconds=min(_LOOK_S, deadline.left_s))):
            if deadline.is_over:
                progress = self.progress or "nothing is known"
                raise ObjectTimeoutError(f"Cannot {self.what} within {deadline.timeout:g} s: {progress}.")
        return self.outcome()

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(over.set)

        self.add_done_callback(tell)
        try:
            yield from over.wait().__await__()
        except asyncio.CancelledError:
            self.stop()
            raise
        return self.outcome()


def finish(future: ObjectFuture[T], make: Callable[[], T]) -> None:
    """End a call with what is made of its answer, or with why that cannot be made."""
    try:
        future.finish(make())
    except OffbeatError as error:
        future.end(error)
