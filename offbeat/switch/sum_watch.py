"""The sums of a job that wait for late workers, as control sees them: which of them have waited for long enough.

A switch has no timers in its path of packets. Control asks it now and then which exchanges a quorum has begun and the
others have not, and closes those that have waited so for `Strategy.wait_s`. No worker asks for that, or can hurry it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOOKS = 8  # while an exchange waits


class SumWatch:
    """The sums of one job.

    Attributes:
        left_out: by rank, exchanges that were closed without the worker.
    """

    def __init__(self) -> None:
        self.left_out: dict[int, int] = {}
        self._waited_s: dict[int, float] = {}  # by exchange
        self._looked_s = 0.0

    def is_due(self, wait_s: float, now_s: float) -> bool:
        """Whether it is time for a look; never where nothing waits."""
        return wait_s > 0 and now_s - self._looked_s >= wait_s / _LOOKS

    def look(self, unsettled: Iterable[int], wait_s: float, now_s: float) -> list[int]:
        """Find the exchanges to close, those first that have waited longest.

        Args:
            unsettled: that a quorum has begun.
            wait_s: for the others.
        """
        # Of a time in which nobody looked little counts: the switch itself stood still, and packets wait at its port.
        past_s, self._looked_s = min(now_s - self._looked_s, 2 * wait_s / _LOOKS), now_s
        before = self._waited_s
        self._waited_s = {clock: before[clock] + past_s if clock in before else 0.0 for clock in unsettled}
        over = [clock for clock, waited_s in self._waited_s.items() if waited_s >= wait_s]
        return sorted(over, key=lambda clock: -self._waited_s[clock])

    def closed(self, without: Iterable[int]) -> None:
        """Count an exchange that was closed without these workers."""
        for worker in without:
            self.left_out[worker] = self.left_out.get(worker, 0) + 1
