"""Exchanges and other things that are under way, and how one hears that they are over."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from offbeat.payload import Reply


class Pending(Protocol):
    """An exchange under way."""

    @property
    def sent_bytes(self) -> int:
        """Bytes this worker puts on the network for it, by the algorithm's count."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done (True) or `timeout` has passed (False); the exchange goes on either way.

        Raises:
            NetworkError: if the connection to another worker broke.
        """

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def result(self) -> Reply:
        """The reply; only after `wait` returned True."""


class Completion:
    """The state of something on another thread: under way, or over, well or not; and who is to be told.

    Attributes:
        error: that it ended with; None if it is under way, or ended well.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._over, self._ending = threading.Event(), threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it is over; whether it is."""
        return self._over.wait(timeout.total_seconds())

    def done(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have something called when it is over: on the thread on which it ends, or at once."""
        with self._ending:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def end(self, error: Exception | None = None) -> None:
        """Note that it is over; only the first time counts."""
        with self._ending:
            if self._over.is_set():
                return
            self.error = error
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
