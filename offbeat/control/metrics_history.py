"""The past as a controller sees it: readings, swaps, and the pace under each policy."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from offbeat.control.controller import Metrics, Pace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.control.controller import Reading
    from offbeat.sync import Policy

_READINGS = 50  # in the time that a controller looks back
_SWAPS = 16  # are remembered


class MetricsHistory:
    """The past of one model; as much as a controller looks back to, however long training takes.

    Args:
        at_s: when the first policy began to decide.
    """

    def __init__(self, at_s: float = 0.0) -> None:
        self._readings: collections.deque[Reading] = collections.deque()
        self._swaps: collections.deque[float] = collections.deque(maxlen=_SWAPS)
        self._sync_s = at_s
        self._per_s = 0.0  # under the present policy; 0 if that is not known
        self._paces: dict[Policy, Pace] = {}  # of earlier ones

    def note(self, now: Reading, looks_back_s: float) -> None:
        """Keep this reading, unless one was kept just before.

        Args:
            looks_back_s: readings that are older are forgotten, but for one.
        """
        readings = self._readings
        while len(readings) > 1 and readings[1].at_s <= now.at_s - looks_back_s:
            readings.popleft()
        if not readings or now.at_s - readings[-1].at_s >= looks_back_s / _READINGS:
            readings.append(now)

    def begin_anew(self) -> None:
        """Forget the readings: the next ones are not to be compared with them."""
        self._readings.clear()

    def brought(self, per_s: float) -> None:
        """Each worker brings so many samples per second now, on average."""
        self._per_s = max(self._per_s, per_s)

    def swapped(self, before: Policy, at_s: float, *, by_controller: bool) -> None:
        """Another policy than `before` decides from now on."""
        if self._per_s > 0:
            self._paces[before] = Pace(at_s, self._per_s)
        self._per_s, self._sync_s = 0.0, at_s
        if by_controller:
            self._swaps.append(at_s)

    def metrics(
        self, sync: Policy, now: Reading, computing_s: Mapping[int, float], staleness: Mapping[int, float]
    ) -> Metrics:
        """The metrics, where `now` is the last reading.

        Args:
            sync: decides at present.
            computing_s, staleness: as of `Metrics`.
        """
        readings = list(self._readings)
        if readings and readings[-1].at_s >= now.at_s:
            readings.pop()
        paces = {**self._paces, **({sync: Pace(now.at_s, self._per_s)} if self._per_s > 0 else {})}
        return Metrics(sync, (*readings, now), self._sync_s, tuple(self._swaps), computing_s, staleness, paces)
