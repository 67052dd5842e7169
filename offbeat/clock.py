"""The clock: whatever trains, schedules or decides gets its time from one.

Around it, processes that only ever live in real time (the sentinel, the launcher, the lab) read the machine's directly.

`WallClock` is the machine's. `VirtualClock` stands still until somebody sleeps or advances it, so that thousands of
interleavings can be tested in milliseconds and the simulator can run a day in a second.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

from offbeat.errors import PlanError


class Clock(Protocol):
    """The source of time."""

    def now_s(self) -> float:
        """Monotonic seconds since an arbitrary origin."""

    def unix_s(self) -> float:
        """Seconds since 1970, comparable between machines as far as their clocks agree."""

    def sleep(self, seconds: float) -> None:
        """Return after `seconds` on this clock."""


class WallClock:
    """The machine's monotonic clock.

    `unix_s` is the monotonic clock plus an offset taken once, so that a step of the system clock (NTP, an operator)
    never bends a measurement.

    >>> clock = WallClock()
    >>> clock.now_s() <= clock.now_s()
    True
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.monotonic() + self._offset_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """A clock that only moves when told to.

    >>> clock = VirtualClock()
    >>> clock.sleep(2.5)
    >>> clock.now_s()
    2.5
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"Cannot sleep {seconds} s: time does not run backwards.")
        self._now_s += seconds


def to_timedelta(timeout: float | timedelta, cannot: str) -> timedelta:
    """Convert a timeout, a number of seconds or a timedelta, into a timedelta above 0.

    >>> to_timedelta(2.5, "Cannot wait")
    datetime.timedelta(seconds=2, microseconds=500000)

    Args:
        timeout: as the user gave it.
        cannot: how an error begins, such as "Cannot explain waits".

    Raises:
        PlanError: if it is neither, not finite, or not above 0.
    """
    if isinstance(timeout, timedelta):
        span = timeout
    else:
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise PlanError(
                f"{cannot} after {timeout!r}: give a number of seconds, or a datetime.timedelta, such as 5 or "
                "timedelta(seconds=5)."
            )
        try:
            span = timedelta(seconds=timeout)
        except (OverflowError, ValueError) as error:  # infinite or huge; nan
            shown = f"{timeout:g}" if isinstance(timeout, float) else "so many"
            raise PlanError(f"{cannot} after {shown} s: give a finite number of seconds, such as 3600.") from error
    if span <= timedelta(0):
        raise PlanError(f"{cannot} after {span.total_seconds():g} s: the timeout must be above 0.")
    return span
