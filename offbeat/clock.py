"""What trains, schedules or decides gets its time from a `Clock`.

Around it, processes that only ever live in real time (the sentinel, the launcher, the lab) read the machine's directly.

`WallClock` is the machine's. `VirtualClock` stands still until somebody sleeps or advances it, so that thousands of
interleavings can be tested in milliseconds and the simulator can run a day in a second.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

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
