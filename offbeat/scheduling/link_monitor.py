"""The latency and bandwidth of the link while a job trains: recursive least squares over exchanges that are done.

    seconds = latency + bytes / bandwidth       of an exchange that finds the link idle
    seconds = bytes / bandwidth                 of one that is issued while another is under way, since that one's end

Each exchange counts by how far it is from what was expected, relatively, and weighs less the older it is. One that is
far from the others (beyond three times the median absolute deviation of the last ones) does not count; where most of
the last ones are like it, it is the link that has changed, and it does.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection

_FORGETTING = 0.95
_FAR = 3.0  # median absolute deviations
_STEADY = 0.03  # of what is usual: no deviation is taken to be less
_LAST = 15  # exchanges that say what is usual
_FEW = 5  # with fewer, nothing is known to be far from the others
_MOST_UNSURE = 10.0  # where exchanges say nothing about one of the two for long, the next one may not throw it over
_LEAST = 1e-6  # of the bandwidth at first, and of its inverse
_LEAST_S = 1e-9

_Exchange: TypeAlias = tuple[float, float, float]  # the latency and the transfer, as at first, and the seconds it took


class LinkMonitor:
    """A link's latency, bandwidth and gap, as the exchanges say that were seen.

    Args:
        latency_s, bandwidth, gap_s: as a `BackwardProfile` has them, measured before.

    >>> link = LinkMonitor(latency_s=0.0, bandwidth=1e6, gap_s=0.0)
    >>> for _ in range(100):
    ...     _ = link.observe(1 << 20, 2 * (1 << 20) / 1e6, was_idle=False)
    >>> round(link.bandwidth / 1e3)
    500
    """

    def __init__(self, latency_s: float, bandwidth: float, gap_s: float) -> None:
        self._latency_s, self._bandwidth = max(latency_s, _LEAST_S), bandwidth
        self.gap_s = gap_s
        # Both in units of what they were at first: 1.0 is as it was.
        self._latency, self._slowness = 1.0 if latency_s > 0 else 0.0, 1.0
        self._unsure = [[1.0, 0.0], [0.0, 1.0]]  # the covariance
        # Of those that found the link idle, and of the others: each is judged among its like.
        self._last: dict[bool, deque[_Exchange]] = {kind: deque(maxlen=_LAST) for kind in (False, True)}
        self._small_s: deque[float] = deque(maxlen=_LAST)

    @property
    def latency_s(self) -> float:
        return self._latency * self._latency_s

    @property
    def bandwidth(self) -> float:
        """Bytes in a second."""
        return self._bandwidth / self._slowness

    def observe(self, size_bytes: int, seconds: float, *, was_idle: bool) -> bool:
        """Take an exchange into account, unless it is far from the others, or cannot be.

        Args:
            size_bytes: that were exchanged.
            seconds: since it was issued, or since the end of the one before, if that was later.
            was_idle: whether nothing else was under way when it was issued.

        Returns:
            Whether it counts.
        """
        if not math.isfinite(seconds) or seconds <= 0 or size_bytes <= 0:
            return False  # the clock has been set, or has not moved
        at_first_s = size_bytes / self._bandwidth
        if at_first_s * self._slowness < self.gap_s:
            return self._observe_small(seconds, was_idle=was_idle)
        one = (self._latency_s if was_idle else 0.0, at_first_s, seconds)
        self._last[was_idle].append(one)
        if self._is_far(one, self._last[was_idle]):
            return False
        self._update(*one)
        return True

    def _observe_small(self, seconds: float, *, was_idle: bool) -> bool:
        """Have the gap be what small exchanges take, of which only the number counts."""
        if was_idle:
            return False
        self._small_s.append(seconds)
        if len(self._small_s) >= _FEW:
            self.gap_s = statistics.median(self._small_s)
        return True

    def _is_far(self, one: _Exchange, last: Collection[_Exchange]) -> bool:
        """Whether one is far from the last ones, by how far each is from what is expected now."""
        if len(last) < _FEW:
            return False
        ratios = [self._ratio(*other) for other in last]
        usual = statistics.median(ratios)
        deviation = statistics.median(abs(ratio - usual) for ratio in ratios)
        return abs(self._ratio(*one) - usual) > _FAR * max(deviation, _STEADY * usual)

    def _ratio(self, latency_s: float, transfer_s: float, seconds: float) -> float:
        return seconds / max(_LEAST_S, self._latency * latency_s + self._slowness * transfer_s)

    def _update(self, latency_s: float, transfer_s: float, seconds: float) -> None:
        """One step of recursive least squares, all divided by the seconds that it would have taken at first."""
        at_first_s = latency_s + transfer_s
        x, y = latency_s / at_first_s, transfer_s / at_first_s
        error = seconds / at_first_s - (self._latency * x + self._slowness * y)
        (a, b), (_, d) = self._unsure
        along_x, along_y = a * x + b * y, b * x + d * y
        scale = _FORGETTING + x * along_x + y * along_y
        gain_x, gain_y = along_x / scale, along_y / scale
        self._latency = max(0.0, self._latency + gain_x * error)
        self._slowness = min(max(_LEAST, self._slowness + gain_y * error), 1 / _LEAST)
        a, b, d = (one / _FORGETTING for one in (a - gain_x * along_x, b - gain_x * along_y, d - gain_y * along_y))
        less_x, less_y = (math.sqrt(min(1.0, _MOST_UNSURE / one)) if one > 0 else 1.0 for one in (a, d))
        self._unsure = [[a * less_x**2, b * less_x * less_y], [b * less_x * less_y, d * less_y**2]]
