"""Flows: data on its way, as fluids that share links fairly.

Flows of one class (`max_min_fair.FlowPath`) all move at the same speed, so the class keeps one count of the bytes that
each of its flows has moved since the beginning of time, and a flow is done when that count has grown by its size.
Starting and ending a flow therefore costs a logarithm, however many there are, and speeds are worked out once per
moment, for all that begins and ends in it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.sim.max_min_fair import shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.sim.max_min_fair import FlowPath
    from offbeat.timeline import Timeline

_EPSILON = 1e-6  # bytes


@dataclass(eq=False)
class Flow:
    """A number of bytes on their way."""

    way: FlowPath
    done: Callable[[], None]
    stopped: bool = False


@dataclass
class _Class:
    moved: float = 0.0  # bytes, of each flow
    speed: float = 0.0
    count: int = 0
    ends: list[tuple[float, int, Flow]] = field(default_factory=list)

    def drop_stopped(self) -> None:
        while self.ends and self.ends[0][2].stopped:
            heapq.heappop(self.ends)


class Flows:
    """All flows over some links.

    Args:
        timeline: in which they move.
        rates: of the links, by name, in bytes per second.
    """

    def __init__(self, timeline: Timeline, rates: Mapping[str, float]) -> None:
        self._timeline, self._rates = timeline, dict(rates)
        self._classes: dict[FlowPath, _Class] = {}
        self._number = itertools.count()
        self._since_s = 0.0
        self._version = 0  # of what is due next
        self._is_settling = False

    def start(self, way: FlowPath, size_bytes: float, done: Callable[[], None]) -> Flow:
        """Send so many bytes; `done` is called when they are there."""
        flow = Flow(way, done)
        self._move()
        of_class = self._classes.setdefault(way, _Class())
        of_class.count += 1
        heapq.heappush(of_class.ends, (of_class.moved + size_bytes, next(self._number), flow))
        self._settle_soon()
        return flow

    def stop(self, flow: Flow) -> None:
        """Send no more of it; `done` is not called. Nothing happens if it has been."""
        if not flow.stopped:
            flow.stopped = True
            self._move()
            self._classes[flow.way].count -= 1
            self._settle_soon()

    def limit(self, rates: Mapping[str, float]) -> None:
        """Limit these links to so many bytes per second from now on; 0 for nothing."""
        self._rates |= rates
        self._settle_soon()

    def on(self, link: str) -> int:
        """Count the flows that are on their way over that link."""
        return sum(one.count for way, one in self._classes.items() if link in way.links)

    def _move(self) -> None:
        """Let all flows get to where they are now."""
        passed_s, self._since_s = self._timeline.now_s - self._since_s, self._timeline.now_s
        if passed_s > 0:
            for of_class in self._classes.values():
                of_class.moved += of_class.speed * passed_s

    def _settle_soon(self) -> None:
        if not self._is_settling:
            self._is_settling = True
            self._timeline.after(0.0, self._settle)

    def _settle(self) -> None:
        """Work out how fast all flows are from now on, and when the next one ends."""
        self._is_settling = False
        self._move()
        active = {way: one for way, one in self._classes.items() if one.count}
        speeds = shares({way: one.count for way, one in active.items()}, self._rates)
        next_s = math.inf
        for way, one in self._classes.items():
            one.speed = speeds.get(way, 0.0)
            one.drop_stopped()
            if one.ends and one.speed:
                next_s = min(next_s, (one.ends[0][0] - one.moved) / one.speed)
        self._version += 1
        if next_s < math.inf:
            version = self._version
            self._timeline.after(max(next_s, 0.0), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:  # speeds have changed since
            return
        self._move()
        ended: list[tuple[int, Flow]] = []
        shortest_s = 2 * math.ulp(self._timeline.now_s)  # what takes less than the clock can tell would never end
        for one in self._classes.values():
            nothing = max(_EPSILON, 1e-12 * one.moved, one.speed * shortest_s)
            while one.ends and one.ends[0][0] <= one.moved + nothing:
                _, number, flow = heapq.heappop(one.ends)
                if not flow.stopped:
                    flow.stopped = True
                    one.count -= 1
                    ended.append((number, flow))
        self._settle_soon()
        for _, flow in sorted(ended, key=lambda it: it[0]):
            flow.done()
