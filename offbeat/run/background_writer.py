"""Work on files that goes on while the training does: one piece at a time, on a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


class BackgroundWriter:
    """A thread that carries out one piece of work at a time. The end of the process waits for it.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(1, name)
        self._work: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Have this done, once what was begun before is; raises what that has raised."""
        self.wait()
        self._work = self._threads.submit(work)

    def wait(self) -> None:
        """Wait until nothing is under way; raises what has been raised there."""
        work, self._work = self._work, None
        if work is not None:
            work.result()
