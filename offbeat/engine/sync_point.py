"""The place in its script where a worker leaves the server: one that no worker had passed when all agreed to leave.

Workers with a server go through the same script, each at its own pace. So they can meet only where all still come to,
and each can tell that place by counting: beginnings of loops over data that is dealt out to whoever asks, since those
loops differ in length; else steps.

    event loop's thread     `freeze` when a plan is proposed that has no server; `resume` when that is decided
    training thread         `reached` at each place: waits while it is frozen, for as long as all take to agree
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from offbeat.diagnosis.wait import WaitContext

if TYPE_CHECKING:
    from datetime import timedelta

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.payload import Reply

_HOLDING = WaitContext("all workers to agree where they leave the server", through_server=True)


class SyncPoint:
    """The sync point of one worker."""

    sent_bytes = 0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = self._pushed = 0
        self._is_frozen = False
        self._at: int | None = None

    def freeze(self) -> tuple[int, int]:
        """Pass no place until `resume`; how many were passed before, and the contributions at the last of them."""
        with self._changed:
            self._is_frozen = True
            return self._passed, self._pushed

    def resume(self, at: int | None = None) -> None:
        """Go on.

        Args:
            at: how many places are passed before all meet; None if they do not, or it was said before.
        """
        with self._changed:
            self._is_frozen, self._at = False, self._at if at is None else at
            self._changed.notify_all()

    def reached(self, waiter: BlockingWait, pushed: int = 0) -> bool:
        """A place is about to be passed; whether all meet here.

        Args:
            pushed: contributions of this worker so far.

        Raises:
            NetworkError: if the server is gone.
        """
        while True:
            waiter.wait(self, _HOLDING)
            with self._changed:
                if self._is_frozen:
                    continue
                reached = self._at == self._passed
                self._passed, self._pushed = self._passed + 1, pushed
                if reached:
                    self._at = None
                return reached

    # -- something to wait for -----------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether places may be passed."""
        with self._changed:
            return not self._is_frozen

    def wait(self, timeout: timedelta) -> bool:
        """Wait until they may be."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_frozen, timeout.total_seconds())

    def result(self) -> Reply:
        """No payloads."""
        return []
