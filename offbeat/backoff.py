"""Pauses before something is begun anew, so that what fails at once is not tried as fast as the machine can."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from offbeat.clock import WallClock

if TYPE_CHECKING:
    from offbeat.clock import Clock

_LEAST_SHARE = 0.5  # of a pause that jitter leaves


class Backoff:
    """The pause before each try: none before the first, then twice as long each time, with jitter.

    >>> from offbeat.clock import VirtualClock
    >>> clock = VirtualClock()
    >>> backoff = Backoff(0.1, 0.4, holds_s=10, clock=clock)
    >>> pauses = [backoff.next_s() for _ in range(5)]
    >>> [least / 2 <= pause <= least for least, pause in zip([0, 0.1, 0.2, 0.4, 0.4], pauses, strict=True)]
    [True, True, True, True, True]
    >>> clock.sleep(11)  # the last try has held
    >>> backoff.next_s()
    0.0

    Args:
        first_s: the pause before the second try, at most.
        longest_s: no pause is longer.
        holds_s: a try that has held for so long was good, and the next one is a first one again.
        seed: of the jitter; different ones for those that would else try at the same moments.
        clock: the source of time.
    """

    def __init__(
        self, first_s: float, longest_s: float, *, holds_s: float = math.inf, seed: str = "", clock: Clock | None = None
    ) -> None:
        self._first_s, self._longest_s, self._holds_s = first_s, longest_s, holds_s
        self._clock, self._random = clock or WallClock(), random.Random(seed)
        self._pause_s, self._begun_s = 0.0, self._clock.now_s()

    def next_s(self) -> float:
        """Seconds to wait before the try that is about to be made."""
        now_s = self._clock.now_s()
        if now_s - self._begun_s > self._holds_s:
            self.reset()
        pause_s = self._pause_s * self._random.uniform(_LEAST_SHARE, 1.0)
        self._pause_s = min(max(2 * self._pause_s, self._first_s), self._longest_s)
        self._begun_s = now_s + pause_s
        return pause_s

    def reset(self) -> None:
        """Count the next try as a first one: the last was good for something."""
        self._pause_s = 0.0
