"""The time of a job, which stands still while its server is away.

Policies and controllers measure workers by the time between two events. While the server is stopped, or hears no worker
because it is cut off, no worker can do anything about it: none is evicted for that, and no measurement counts it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOKS = 40  # per patience, which is two timeouts
_JUST = 10  # intervals for which it counts that the server was away
_MOST = 3  # intervals between two looks: with more, this process did not run


class JobClock:
    """The clock of one shard's job.

    Args:
        patience_s: for how long a worker that was lost may come back; the clock never stands still if 0.
        is_away: whether the server can hear no worker, or one of its shards is not heard.
        looked: called after each look with what that found.
    """

    def __init__(self, patience_s: float, is_away: Callable[[], bool], looked: Callable[[bool], None]) -> None:
        self._interval_s, self._is_away, self._looked = patience_s / _LOOKS, is_away, looked
        self._away_s, self._seen_s, self._back_s = 0.0, float("inf"), float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on."""
        if self._interval_s and self._timer is None:
            loop = asyncio.get_running_loop()
            self._seen_s = loop.time()
            self._timer = loop.call_later(self._interval_s, self._look)

    def stop(self) -> None:
        """Look no more; the clock does not stand still any more, either."""
        self._interval_s, self._seen_s = 0.0, float("inf")
        if self._timer is not None:
            self._timer.cancel()

    def job_s(self, at_s: float) -> float:
        """The job's time at a time of the event loop, which is not before the last one that was asked for."""
        most_s = _MOST * self._interval_s
        if at_s > self._seen_s + most_s:  # this process was stopped
            self._away_s += at_s - self._seen_s - most_s
            self._back_s = at_s
        self._seen_s = max(self._seen_s, at_s)
        return at_s - self._away_s

    @property
    def was_just_away(self) -> bool:
        """Whether the clock has stood still a moment ago."""
        return self._seen_s < self._back_s + _JUST * self._interval_s

    def loop_s(self, job_s: float) -> float:
        """The event loop's time at a time of the job, if the server is not away before."""
        return job_s + self._away_s

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        before_s = self._seen_s - self._away_s
        after_s = self.job_s(loop.time())
        is_away = self._is_away()
        if is_away:
            self._away_s += after_s - before_s
            self._back_s = self._seen_s
        self._timer = loop.call_later(self._interval_s, self._look)
        self._looked(is_away)
