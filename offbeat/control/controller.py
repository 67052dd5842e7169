"""A controller decides that another policy decides: from what is measured, and from nothing else.

It is asked again and again, after what happens to workers and while nothing does, and keeps nothing to itself: what it
has to remember, such as when it has swapped, is in the metrics. So it can be replayed, simulated, and handed over to a
server that is started again.

>>> from offbeat.control import ByProgress
>>> from offbeat.sync import ASP, BSP
>>> controller = ByProgress((BSP(), ASP()), at=(0.25,), steps=100)
>>> controller.decide(Metrics(BSP(), (Reading(9.0, steps={0: 24, 1: 25}),)))
Keep()
>>> controller.decide(Metrics(BSP(), (Reading(9.1, steps={0: 25, 1: 25}),)))
Swap(sync=ASP(), reason='25 of 100 steps are done')
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from offbeat.float_sum import add_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.sync import Policy


@dataclass(frozen=True)
class Reading:
    """The measurements of one time, of the workers that took part then, by rank.

    Args:
        at_s: when.
        steps: contributions that each has computed.
        waited_s: time that each has spent waiting for others, with what it waits now.
        would_s: time that each would have spent so by now if all had waited for all in every step; empty where that is
            not known step by step.
        brought, left_out: contributions that each has brought, and how many of them are not in the update that they
            were for, since they came too late; empty where that is not known.
    """

    at_s: float
    steps: Mapping[int, int] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)
    would_s: Mapping[int, float] = field(default_factory=dict)
    brought: Mapping[int, int] = field(default_factory=dict)
    left_out: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pace:
    """The speed of training under a policy.

    Args:
        at_s: when that policy decided last.
        per_s: samples per second of each worker, on average.
    """

    at_s: float
    per_s: float


@dataclass(frozen=True)
class Metrics:
    """The measurements that a controller decides from.

    Args:
        sync: decides at present.
        readings: the last ones, in order; the last is of now. There is at least one.
        since_s: when `sync` began to decide.
        swaps: when the last swaps were that controllers decided, in order.
        computing_s: moving average of each worker's time from having parameters to having a contribution.
        staleness: of each worker's contributions, the mean of updates between their parameters and their own.
        paces: of each policy that has decided for so long that it shows, the fastest pace of the last time it did:
            while nobody was late, if that ever was so.
    """

    sync: Policy
    readings: tuple[Reading, ...]
    since_s: float = 0.0
    swaps: tuple[float, ...] = ()
    computing_s: Mapping[int, float] = field(default_factory=dict)
    staleness: Mapping[int, float] = field(default_factory=dict)
    paces: Mapping[Policy, Pace] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        """Monotonic seconds."""
        return self.readings[-1].at_s

    @property
    def held_s(self) -> float:
        """Seconds since the present policy was adopted."""
        return self.now_s - self.since_s

    @property
    def steps(self) -> float:
        """Contributions of each worker, on average."""
        steps = self.readings[-1].steps.values()
        return add_up(steps) / len(steps) if steps else 0.0

    def pace(self, policy: Policy, last_s: float) -> float | None:
        """Samples per second of each worker under a policy, going by `paces` of the last seconds; None if unknown."""
        pace = self.paces.get(policy)
        return None if pace is None or pace.at_s < self.now_s - last_s else pace.per_s

    def waiting(self, last_s: float) -> float | None:
        """The part of the last seconds that workers spent waiting for others; None if not so much is known."""
        then, now = self._at(last_s), self.readings[-1]
        here = [] if then is None else sorted(now.waited_s.keys() & then.waited_s.keys())
        if then is None or not here:
            return None
        waited_s = add_up(now.waited_s[worker] - then.waited_s[worker] for worker in here)
        return waited_s / (len(here) * (now.at_s - then.at_s))

    def left_out(self, last_s: float) -> dict[int, float]:
        """The part of each worker's contributions in the last seconds that came too late for its update; of those that
        brought one, and empty if not so much is known.
        """
        then, now = self._at(last_s), self.readings[-1]
        if then is None:
            return {}
        counts = {
            worker: (
                now.brought[worker] - then.brought[worker],
                now.left_out.get(worker, 0) - then.left_out.get(worker, 0),
            )
            for worker in sorted(now.brought.keys() & then.brought.keys())
        }
        return {worker: left / brought for worker, (brought, left) in counts.items() if brought}

    def imbalance(self, last_s: float) -> float | None:
        """The part of their time that workers would spend waiting if all waited for all, going by how long each was at
        work for a contribution in the last seconds; None if not so much is known.

        Who is in the middle of one, perhaps for long, counts as if it were done. Of one that has hardly done anything
        but wait nothing is known, and nothing of one that is alone. Where it is known step by step, that tells: over
        several steps a worker that is late now and then is not late.
        """
        then, now = self._at(last_s), self.readings[-1]
        if then is None:
            return None
        if here := now.would_s.keys() & then.would_s.keys():
            would_s = add_up(now.would_s[worker] - then.would_s[worker] for worker in sorted(here))
            waited_s = add_up(now.waited_s[worker] - then.waited_s[worker] for worker in sorted(here))
            whole_s = len(here) * (now.at_s - then.at_s) - waited_s + would_s
            return would_s / whole_s if len(here) > 1 and whole_s > 0 else None
        each_s = []
        for worker in sorted(now.waited_s.keys() & then.waited_s.keys()):
            steps = now.steps[worker] - then.steps[worker]
            busy_s = now.at_s - then.at_s - (now.waited_s[worker] - then.waited_s[worker])
            if not steps and busy_s < last_s / 2:
                return None
            each_s.append(busy_s / max(1, steps))
        longest_s = max(each_s, default=0.0)
        return 1 - add_up(each_s) / len(each_s) / longest_s if len(each_s) > 1 and longest_s > 0 else None

    def _at(self, last_s: float) -> Reading | None:
        """The last reading that is at least so old; None if there is none."""
        old = [reading for reading in self.readings if reading.at_s <= self.now_s - last_s + 1e-9]
        return old[-1] if old and old[-1].at_s < self.now_s else None


@dataclass(frozen=True)
class Keep:
    """The present policy goes on."""


@dataclass(frozen=True)
class Swap:
    """Another policy is to decide.

    Args:
        sync: that policy, one of the controller's `policies`.
        reason: with figures, for people; no full stop.
    """

    sync: Policy
    reason: str


Decision = Keep | Swap


class Controller(Protocol):
    """The Protocol of a controller; frozen, and printed as the code that makes it."""

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies that it may choose. Whoever takes part in the job has agreed to them."""

    @property
    def looks_back_s(self) -> float:
        """The greatest age of the readings that it asks about."""

    def decide(self, metrics: Metrics) -> Decision:
        """Decide whether another policy is to take over. Pure."""
