"""An event loop that looks again for a moment before it goes to sleep.

To be woken takes a processor that has gone idle some 50 to 100 us, longer than many an answer takes; and what runs next
finds its caches cold. Where answers tend to come at once, it is quicker, and no more work, to keep looking. Where they
do not, looking is given up for the next 1, 2, 4 ... `_MOST_SKIPPED` waits, so that it costs next to nothing.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

_LOOK_S = 100e-6
_MOST_SKIPPED = 256


class EagerSelector(selectors.EpollSelector):
    """A selector that polls for a moment before it blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._skip = self._skipped = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the files that are ready, as in `selectors`; waits `timeout` seconds for them, None for ever."""
        if timeout is not None and timeout <= _LOOK_S:
            return super().select(timeout)
        if self._skipped < self._skip:
            self._skipped += 1
            return super().select(timeout)
        until_s = time.perf_counter() + _LOOK_S
        while time.perf_counter() < until_s:
            if ready := super().select(0):
                self._skip = self._skipped = 0
                return ready
        self._skip, self._skipped = min(2 * self._skip + 1, _MOST_SKIPPED), 0
        return super().select(timeout)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """One for links, not yet running. With one processor there is nothing to look for: who answers needs it."""
    alone = len(os.sched_getaffinity(0)) == 1
    return asyncio.SelectorEventLoop(selectors.EpollSelector() if alone else EagerSelector())


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on such a loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
