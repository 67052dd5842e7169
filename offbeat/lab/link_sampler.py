"""How busy is a link, and how evenly? Its byte counters, read at a fixed interval while a row runs.

They are read at the switch's port, by the lab: some 0.1 ms in every 50 ms, none of it in a measured process. A port's
counters come after the shaping of either direction, so they count what the link carried, not what waited for it.

On a busy machine a reading is late now and then. Each has its own time, and what passed in exact intervals is
interpolated between readings.

* variation: the standard deviation of the bytes per interval within a window of one round, divided by their mean; mean
  over the windows. A link that carries the same at all times has 0, one that is full half of the time and idle for the
  other half has 1. Within a round, since from round to round every policy carries the same.
* idle share: of the intervals, those in which less than a tenth of what the link can carry passed.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from offbeat.lab.namespace import inside

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import FileIO

INTERVAL_S = 0.05
IDLE = 0.1
"""Of what a link can carry: less than this in an interval, and it was idle."""
_FIELDS_RECEIVED, _FIELDS_SENT = 0, 8


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host received and sent, per interval, while any worker was in its measured steps."""

    host: str
    interval_s: float
    received_bytes: list[int]
    sent_bytes: list[int]


class Port:
    """The switch's end of a host's link.

    Args:
        namespace: the switch's.
        interface: the port's name in it.

    Raises:
        NetworkError: if there is no such namespace.
    """

    def __init__(self, namespace: str, interface: str) -> None:
        self._interface = interface
        # Opened inside, the file shows that namespace for ever, whoever reads it.
        self._file: FileIO = inside(namespace, lambda: open("/proc/thread-self/net/dev", "rb", buffering=0))  # noqa: SIM115 - closed by close()

    def counters(self) -> tuple[int, int]:
        """Bytes that the host has received and sent so far."""
        self._file.seek(0)
        for line in self._file.read().decode().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == self._interface:
                values = fields.split()
                # What the switch sends is what the host receives.
                return int(values[_FIELDS_SENT]), int(values[_FIELDS_RECEIVED])
        return 0, 0

    def close(self) -> None:
        """Let go of the namespace."""
        self._file.close()


class Sampler:
    """A thread that reads the counters of one link at an interval, until its `with` block ends.

    Args:
        host: whose link it is.
        namespace: the switch's.
        interface: the switch's end of the link.
        interval_s: between two readings.

    Raises:
        NetworkError: if there is no such namespace.
    """

    def __init__(self, host: str, namespace: str, interface: str, *, interval_s: float = INTERVAL_S) -> None:
        self._host, self._interval_s = host, interval_s
        self._port = Port(namespace, interface)
        self._readings: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sampler of {host}", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._port.close()

    def between(self, begin_s: float, end_s: float) -> Traffic:
        """The traffic of each whole interval from `begin_s` to `end_s`, in seconds of `time.perf_counter`."""
        return traffic(self._host, self._readings, begin_s=begin_s, end_s=end_s, interval_s=self._interval_s)

    def _run(self) -> None:
        due_s = time.perf_counter()
        while not self._ended.wait(max(0.0, due_s - time.perf_counter())):
            self._read()
            due_s = max(due_s + self._interval_s, time.perf_counter())
        self._read()

    def _read(self) -> None:
        received, sent = self._port.counters()
        self._readings.append((time.perf_counter(), received, sent))


def whole_time(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The times when the first worker's measured steps began and the last one's ended.

    Where machines are unequal, the fast ones may be done before the slow ones are measured: the time in which all of
    them are may be a moment, or none.

    Args:
        spans: when each worker's began and ended.
    """
    return min(begin_s for begin_s, _ in spans), max(end_s for _, end_s in spans)


def traffic(
    host: str, readings: Sequence[tuple[float, int, int]], *, begin_s: float, end_s: float, interval_s: float
) -> Traffic:
    """Bytes per interval between two moments.

    Args:
        readings: (seconds, bytes received so far, bytes sent so far), in order.
    """
    count = max(0, int((end_s - begin_s) / interval_s))
    if not count or not readings:
        return Traffic(host, interval_s, [], [])
    grid_s = begin_s + interval_s * numpy.arange(count + 1)
    times_s, *counters = (numpy.array(column, dtype=float) for column in zip(*readings, strict=True))
    received, sent = (numpy.diff(numpy.interp(grid_s, times_s, counter)) for counter in counters)
    return Traffic(host, interval_s, [round(b) for b in received.tolist()], [round(b) for b in sent.tolist()])


def figures(link: Traffic, *, rate_mbps: float, round_s: float) -> tuple[float, float, float]:
    """Three figures of a link's traffic: share of the rate in the busier direction, variation, idle share (means of
    both directions).

    Args:
        rate_mbps: of the link, in each direction.
        round_s: how long a round takes.
    """
    capacity_bytes = rate_mbps * 1e6 / 8 * link.interval_s
    window = round(round_s / link.interval_s)
    both = (link.received_bytes, link.sent_bytes)
    share = max(statistics.fmean(series) for series in both) / capacity_bytes
    idle = statistics.fmean(idle_share(series, capacity_bytes=capacity_bytes) for series in both)
    return share, statistics.fmean(variation(series, window=window) for series in both), idle


def variation(series: Sequence[int], *, window: int) -> float:
    """The coefficient of variation of one round's bytes over its intervals.

    Args:
        series: bytes per interval.
        window: intervals of one round; at least 2 are looked at together.
    """
    window = max(2, window)
    rounds = [series[start : start + window] for start in range(0, len(series) - window + 1, window)]
    spreads = [statistics.pstdev(part) / mean for part in rounds if (mean := statistics.fmean(part)) > 0]
    return statistics.fmean(spreads) if spreads else 0.0


def idle_share(series: Sequence[int], *, capacity_bytes: float) -> float:
    """Share of the intervals in which less than a tenth of `capacity_bytes` passed."""
    return sum(amount < IDLE * capacity_bytes for amount in series) / len(series) if series else 0.0
