"""What goes wrong for a while: a process that is stopped, a link that is slow.

A stopped worker computes, sends and takes nothing until it goes on. A slow link carries a part of its rate; a tenth of
a contribution that is on its way already arrives as fast as before (`served`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stopped:
    """A worker's process stands still, as after SIGSTOP.

    Args:
        rank: of the worker.
        at_s: when it stops.
        for_s: until it goes on.
    """

    rank: int
    at_s: float
    for_s: float


@dataclass(frozen=True)
class Slowed:
    """A worker's link carries less.

    Args:
        rank: of the worker.
        at_s: when that begins.
        for_s: until it is as before.
        to: the part of its rate that is left.
    """

    rank: int
    at_s: float
    for_s: float
    to: float = 0.1


@dataclass(frozen=True)
class Troubles:
    """All that goes wrong in a play.

    >>> troubles = Troubles((Stopped(0, at_s=2.0, for_s=3.0), Slowed(1, at_s=0.0, for_s=1.0)))
    >>> troubles.done_s(0, 1.0, 1.5), troubles.done_s(1, 1.0, 1.5)
    (5.5, 2.5)
    >>> troubles.back_s(0, 4.0), troubles.part(1, 0.5), troubles.part(1, 1.5)
    (5.0, 0.1, 1.0)
    """

    all: tuple[Stopped | Slowed, ...] = ()

    def done_s(self, rank: int, begun_s: float, takes_s: float) -> float:
        """When a worker has computed for so long that began then."""
        end_s = begun_s + takes_s
        for stop in sorted((one for one in self._stops(rank)), key=lambda one: one.at_s):
            if stop.at_s < end_s and begun_s < stop.at_s + stop.for_s:
                end_s += stop.at_s + stop.for_s - max(begun_s, stop.at_s)
        return end_s

    def back_s(self, rank: int, now_s: float) -> float:
        """When a worker goes on that is stopped now; `now_s` if it is not."""
        ends_s = [stop.at_s + stop.for_s for stop in self._stops(rank) if stop.at_s <= now_s < stop.at_s + stop.for_s]
        return max(ends_s, default=now_s)

    def part(self, rank: int, now_s: float) -> float:
        """Which part of its rate a worker's link carries now."""
        parts = [
            one.to
            for one in self.all
            if isinstance(one, Slowed) and one.rank == rank and one.at_s <= now_s < one.at_s + one.for_s
        ]
        return min(parts, default=1.0)

    def _stops(self, rank: int) -> list[Stopped]:
        return [one for one in self.all if isinstance(one, Stopped) and one.rank == rank]
