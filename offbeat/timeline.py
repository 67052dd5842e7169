"""The timeline: appointments in virtual time, kept in order."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Timeline:
    """Virtual seconds from 0. What is due at the same time happens in the order in which it was asked for.

    >>> timeline, happened = Timeline(), []
    >>> timeline.at(2.0, lambda: happened.append("late"))
    >>> timeline.at(1.0, lambda: timeline.after(0.5, lambda: happened.append("early")))
    >>> timeline.run()
    >>> happened, timeline.now_s
    (['early', 'late'], 2.0)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Call `happen` at that time, or now if it has passed."""
        heapq.heappush(self._due, (max(time_s, self.now_s), next(self._count), happen))

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        """Call `happen` that much later."""
        self.at(self.now_s + delay_s, happen)

    def run(self) -> None:
        """Go on until nothing is due any more."""
        while self._due:
            self.now_s, _, happen = heapq.heappop(self._due)
            happen()
