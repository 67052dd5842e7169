"""The time after which an unanswered packet is sent again.

It is what answers took of late, and four times as much as they vary (Jacobson, "Congestion avoidance and control",
1988), and is doubled whenever one comes too late, until answers come again.
"""

from __future__ import annotations

_LONGEST = 64  # times the shortest
_LOOKS = 8  # in a round trip, when much is under way


class ResendTimer:
    """One worker's timer.

    Args:
        least_s: the shortest time, and the one it begins with.

    Attributes:
        rto_s: seconds after which an unanswered packet is sent again.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = self.rto_s = least_s
        self._rtt_s, self._deviation_s = 0.0, least_s / 4

    @property
    def pause_s(self) -> float:
        """Seconds in which to let answers gather when much is under way: to take in each by itself costs far more."""
        return self._rtt_s / _LOOKS

    def measure(self, took_s: float) -> None:
        """Learn how long an answer took to a packet that was sent once."""
        self._deviation_s += (abs(took_s - self._rtt_s) - self._deviation_s) / 4
        self._rtt_s += (took_s - self._rtt_s) / 8
        self.restart()

    def expired(self) -> None:
        """Wait twice as long: an answer came too late."""
        self.rto_s = min(2 * self.rto_s, _LONGEST * self._least_s)

    def restart(self) -> None:
        """Wait as long as answers take, as if none had been late."""
        self.rto_s = min(max(self._least_s, self._rtt_s + 4 * self._deviation_s), _LONGEST * self._least_s)
