"""Requests that the training thread waits for while the event loop exchanges."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from offbeat.errors import OffbeatError
    from offbeat.payload import Reply
    from offbeat.protocol.status import ModelStatus
    from offbeat.server.optimizer_checkpoint import Portion


class ServerRequest:
    """A contribution on its way out and parameters on their way in; waited for as any `Pending`.

    Args:
        sent_bytes: of the contribution.
    """

    def __init__(self, sent_bytes: int = 0) -> None:
        self.sent_bytes = sent_bytes
        self.step = -1  # that this worker was released for
        self.staleness = 0  # of the contribution
        self.error: OffbeatError | None = None
        self.numbers: tuple[float, ...] = ()
        self.refused = ""  # why what all were to do, or a swap, cannot be, and who says so
        self.model_statuses: tuple[ModelStatus, ...] = ()
        self.portions: list[Portion] = []
        self.place = b""  # in the data
        self.left = 0  # shards that are not done
        self.fate = ""  # what became of the contribution, if this worker had been left behind with it
        self.announced: tuple[int, ...] = ()  # numbers under which the contribution was announced
        self.life = 0  # of the server that gave the parameters
        self.versions: tuple[int, ...] = ()  # of them, by block
        self.is_counted = False  # whether the contribution is said to be in the parameters
        self._done = threading.Event()

    def finish(self, error: OffbeatError | None = None) -> None:
        """Finish the request, with `error` if it will never be answered."""
        self.error = self.error or error
        self._done.set()

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done (True) or `timeout` has passed (False).

        Raises:
            OffbeatError: what ended it: the server is gone, or refused.
        """
        done = self._done.wait(timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return done

    def done(self) -> bool:
        return self._done.is_set() and self.error is None

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return self._done.is_set()

    def result(self) -> Reply:
        return []
