"""A thread that carries blocks, and stops in the middle of a step, as on a worker that is about to be lost."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.engine.communication_thread import CommunicationThread, InFlight


def stall(thread: CommunicationThread, after: int) -> None:
    """Have it begin no more than so many things of the next step behind the buffers, which backward waits for."""
    issue, begun = thread.issue, itertools.count()

    def stop() -> None:
        thread._land(1)
        threading.Event().wait()

    def issue_some(one: InFlight) -> None:
        if next(begun) == 1 + after:
            thread._jobs.put(stop)
        issue(one)

    thread.issue = issue_some  # type: ignore[method-assign]
