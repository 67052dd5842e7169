"""Disturbances: for a while a process is stopped, a link is cut, or slow; or a link has another rate from then on.

A stopped worker computes, sends and takes nothing until it goes on. A slow link carries a part of its rate; a tenth of
a contribution that is on its way already arrives as fast as before (`parameter_server`).
"""

from __future__ import annotations

from dataclasses import dataclass

SERVER = -1
"""In place of a worker's rank: all shards of the server."""


@dataclass(frozen=True)
class Stopped:
    """A process stands still, as after SIGSTOP.

    Args:
        rank: of the worker, or `SERVER`.
        at_s: when it stops.
        for_s: until it goes on.
        sleeps: what it computes is slept away, as a replay's steps are: sleep goes on, and is over no earlier than the
            process goes on.
    """

    rank: int
    at_s: float
    for_s: float
    sleeps: bool = False


@dataclass(frozen=True)
class Cut:
    """A link is cut: nothing passes it, or nothing would follow what is not acknowledged; computing goes on.

    Args:
        rank: of the worker whose link it is, or `SERVER`.
        at_s: when that begins.
        for_s: until something is sent again.
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
class Rated:
    """A link has another rate from then on, until the next of these.

    Args:
        rank: of the worker, or `SERVER`.
        at_s: when that begins.
        to: the part of its first rate that it is; above 1 if it is higher.
    """

    rank: int
    at_s: float
    to: float


Trouble = Stopped | Cut | Slowed | Rated


@dataclass
class Disturbances:
    """All disturbances of a simulation.

    >>> troubles = Disturbances((Stopped(0, at_s=2.0, for_s=3.0), Slowed(1, at_s=0.0, for_s=1.0)))
    >>> troubles.done_s(0, 1.0, 1.5), troubles.done_s(1, 1.0, 1.5)
    (5.5, 2.5)
    >>> troubles.back_s(0, 4.0), troubles.part(1, 0.5), troubles.part(1, 1.5)
    (5.0, 0.1, 1.0)
    >>> troubles.add(Cut(1, at_s=1.0, for_s=4.0))
    >>> troubles.done_s(1, 1.0, 1.5), troubles.back_s(1, 2.5)
    (2.5, 5.0)
    >>> troubles.add(Rated(1, at_s=2.0, to=0.5), Rated(1, at_s=3.0, to=2.0))
    >>> troubles.part(1, 1.5), troubles.part(1, 2.5), troubles.part(1, 9.0)
    (1.0, 0.5, 2.0)
    """

    all: tuple[Trouble, ...] = ()

    def add(self, *more: Trouble) -> None:
        """Add disturbances."""
        self.all += more

    def done_s(self, rank: int, begun_s: float, takes_s: float) -> float:
        """The time when a process has computed for so long that began then."""
        if not self.all:
            return begun_s + takes_s
        end_s = begun_s + takes_s
        for stop in sorted((one for one in self._stops(rank)), key=lambda one: one.at_s):
            if stop.at_s <= end_s and begun_s < stop.at_s + stop.for_s:
                if stop.sleeps:
                    end_s = max(end_s, stop.at_s + stop.for_s)
                else:
                    end_s += stop.at_s + stop.for_s - max(begun_s, stop.at_s)
        return end_s

    def back_s(self, rank: int, now_s: float) -> float:
        """The time when something passes between a process that is stopped or cut off now and others; `now_s` if it is
        not.
        """
        if not self.all:
            return now_s
        ends_s = [
            one.at_s + one.for_s
            for one in self.all
            if isinstance(one, (Stopped, Cut)) and one.rank == rank and one.at_s <= now_s < one.at_s + one.for_s
        ]
        return max(ends_s, default=now_s)

    def whole_s(self, rank: int, now_s: float) -> float:
        """The time when a link is whole again that is cut now; `now_s` if it is not."""
        cuts = [one for one in self.all if isinstance(one, Cut) and one.rank == rank]
        return max([one.at_s + one.for_s for one in cuts if one.at_s <= now_s < one.at_s + one.for_s], default=now_s)

    def part(self, rank: int, now_s: float) -> float:
        """The part of its first rate that a link carries now."""
        if not self.all:
            return 1.0
        parts = [
            one.to
            for one in self.all
            if isinstance(one, Slowed) and one.rank == rank and one.at_s <= now_s < one.at_s + one.for_s
        ]
        rates = [one for one in self.all if isinstance(one, Rated) and one.rank == rank and one.at_s <= now_s]
        return min(parts, default=1.0) * (max(rates, key=lambda one: one.at_s).to if rates else 1.0)

    def _stops(self, rank: int) -> list[Stopped]:
        return [one for one in self.all if isinstance(one, Stopped) and one.rank == rank]
