"""The faults of a scenario in a simulation: which strike when, and what each of them is in virtual time.

A fault strikes when the named worker has computed the gradient of the named step, and before it brings it, as
`offbeat.testing.faults` has it; an exception in the forward pass, or the data, strikes before that.

* stopped, the GIL held: `Stopped`. Slow: stopped again and again, for moments as long as the
  program `process_faults_main.py` has them.
* a link on which nothing passes, in both directions or one: `Cut`, until a connection finds out that it is whole. One
  direction is as bad as both: without acknowledgements nothing more is sent.
* `slow-link`: `Slowed`. `rate`: `Rated`.
* whoever is silent for too long is missed meanwhile, and comes back; whoever has ended is missed, and does not.
* `join`: another worker comes, when it is started.
* a server that is killed, or told to stop: the next life begins when it is started again.

`UNTIMED` kinds take no time that could be seen among steps of tenths of a second: what they do is done to numbers, to
files, or to one connection that is replaced at once; they are played as if nothing happened. `lossy` is refused: what
TCP makes of a link that loses frames depends on which, and that is not modelled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, get_args

from offbeat.errors import ScenarioError
from offbeat.fault_spec import PASSING, Fault, Stranger
from offbeat.sim.detection_times import JOIN_S, START_S, TIMEOUT_S, gone_s, silent_s, through_s
from offbeat.sim.disturbances import SERVER, Cut, Rated, Slowed, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.sim.disturbances import Disturbances, Trouble

UNTIMED = frozenset({"disk", "clock", "nan", "inf", "huge", "stale", *PASSING, *get_args(Stranger)})
"""Kinds that are played as if nothing happened."""
BLOCKED = frozenset({"partition", "deaf", "mute"})
"""Kinds after which nothing passes a link."""
_EARLY = frozenset({"forward", "loader"})  # before the step is computed
_MOMENT_S = 0.02  # in which a slow process runs (`offbeat.testing.faults.process_faults_main`)


class Cluster(Protocol):
    """The operations on workers and a server in virtual time."""

    @property
    def now_s(self) -> float:
        """Virtual seconds."""

    def end(self, rank: int, missed_s: float | None) -> None:
        """A worker computes nothing any more; it is missed so much later, or says good-bye if that is None."""

    def miss(self, rank: int, after_s: float, until_s: float) -> None:
        """Give up a worker so much later, which comes back at `until_s`; all of them if it is `SERVER`."""

    def join(self, host: int, after_s: float) -> None:
        """Let another worker join so much later, beside this one."""

    def throttle(self, at_s: float) -> None:
        """The troubles of the server change then, and with them what passes it."""

    def restart(self, after_s: float) -> None:
        """The server is gone; its next life begins so much later."""


class Faults:
    """The faults that strike one row.

    Args:
        faults: in any order.
        sleeps: steps are not computed, but slept away.
        there_and_back_s: of a message, where links are busy.
        part_of: the part of its first rate that each link has which a fault gives another one, by rank or `SERVER`.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        sleeps: bool = False,
        there_and_back_s: float = 0.0,
        part_of: Callable[[Fault], Mapping[int, float]] = lambda _: {},
    ) -> None:
        for fault in faults:
            check(fault)
        self.all = tuple(faults)
        self._sleeps, self.there_and_back_s, self._part_of = sleeps, there_and_back_s, part_of

    def due(self, rank: int, step: int, *, computed: bool) -> list[Fault]:
        """List the faults that strike at a worker's step: before it is `computed`, or when it is."""
        if not self.all:
            return []
        at = [fault for fault in self.all if (fault.worker, fault.step) == (rank, step)]
        return [fault for fault in at if (fault.kind in _EARLY) != computed and fault.kind not in UNTIMED]

    def strike(self, fault: Fault, cluster: Cluster, troubles: Disturbances, unheard_s: float) -> None:
        """Do to a server's job what this fault does.

        Args:
            unheard_s: for how long its worker has had nothing to say.
        """
        now_s, rank, kind = cluster.now_s, SERVER if fault.target != "worker" else fault.worker, fault.kind
        until_s = now_s + fault.seconds
        if fault.ends:
            cluster.end(rank, None if kind == "leave" else gone_s())
        elif kind in ("sigkill", "sigterm"):
            troubles.add(Cut(SERVER, now_s, START_S))
            cluster.restart(START_S)
        elif kind == "join":
            cluster.join(fault.worker, JOIN_S)
        else:
            lasting = self.lasting(fault, now_s)
            if kind in BLOCKED:
                until_s = through_s(now_s, until_s, unheard_s, self.there_and_back_s)
                lasting = [Cut(rank, now_s, until_s - now_s)]
            troubles.add(*lasting)
            for one in lasting if rank == SERVER else ():
                cluster.throttle(one.at_s)
                if not isinstance(one, Rated):
                    cluster.throttle(one.at_s + one.for_s)
            if kind not in ("slow", "slow-link", "rate") and fault.seconds > (after_s := silent_s(unheard_s)):
                cluster.miss(rank, after_s, until_s)

    def lasting(self, fault: Fault, now_s: float) -> list[Trouble]:
        """List the disturbances of a fault that strikes now; links are as the network has them."""
        rank = SERVER if fault.target != "worker" else fault.worker
        if fault.stays:
            return [Rated(rank, now_s, part) for rank, part in self._part_of(fault).items()]
        if fault.kind in BLOCKED:
            return [Cut(rank, now_s, fault.seconds)]
        if fault.kind == "slow-link":
            return [Slowed(rank, now_s, fault.seconds, 1 / fault.factor)]
        if fault.kind != "slow":
            return [Stopped(rank, now_s, fault.seconds, self._sleeps)]
        stopped_s = _MOMENT_S * (fault.factor - 1)
        count = math.ceil(fault.seconds / (stopped_s + _MOMENT_S))
        moments = [now_s + index * (stopped_s + _MOMENT_S) for index in range(count)]
        return [Stopped(rank, at_s, stopped_s, self._sleeps) for at_s in moments]


def check(fault: Fault, *, elastic: bool = False) -> None:
    """Refuse a fault that cannot be played.

    Args:
        elastic: it strikes all-reduce that goes on.

    Raises:
        ScenarioError: if it is one.
    """
    if fault.kind == "lossy":
        raise ScenarioError(
            f"Cannot simulate {fault.words}: what TCP makes of lost frames is not modelled. Leave it out, choose "
            "slow-link, or use `offbeat lab run` (fault.kind)."
        )
    if elastic and fault.kind in BLOCKED and fault.seconds > TIMEOUT_S:
        raise ScenarioError(
            f"Cannot simulate {fault.words} with Elastic: it is longer than the timeout of {TIMEOUT_S:g} s, so the "
            "others continue, and that worker ends with an error. Choose fewer seconds (fault.seconds)."
        )
