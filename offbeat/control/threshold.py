"""Looser while workers wait for each other, tighter again when they would not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.control.controller import Keep, Swap
from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.short_name import short_name
from offbeat.sync import ASP, BSP, Policy

if TYPE_CHECKING:
    from offbeat.control.controller import Decision, Metrics

_MOST_DOUBLINGS = 3


@dataclass(frozen=True)
class WaitThreshold:
    """A controller that has `loose` decide while workers would wait too much for each other under `tight`.

    Under `tight` it looks at the share of their time that workers have spent waiting for others, with what they wait
    now: a worker that is stopped is noticed while it is. Under `loose` hardly anybody waits, so there it looks at how
    long each worker is at work for a contribution, and works out which share would be waited if all waited for all.

    Waiting for others is not all that `tight` may cost: if all push at the same time, they crowd the server's link. So
    what either policy brought is compared, in samples per second while nobody was late: `tight` does not decide where
    it is known to bring less by more than the `price`; after a while it is tried again. What `loose` brings is not
    known before somebody was late, unless `explore` has it tried.

    It does not flap: it goes back only where less than `below` would be waited, for twice `window_s`, and no policy
    decides for less than `least_s`. Each time that it had to turn back lately, it stays with `loose` twice as long
    before it tries `tight` again, up to 8 times `least_s`.

    Args:
        tight: decides when nobody is late.
        loose: decides while somebody is.
        above: share of the time that is spent waiting, from which on it goes to `loose`.
        below: share that would be, under which it goes back; with 0 it never does.
        window_s: over which shares are taken.
        least_s: of each policy.
        price: part of the pace that it may cost, where nobody is late, to have `tight` decide.
        explore: have `loose` decide, for `least_s`, also where nobody was late for twice that and it is not known what
            it brings: one that brings more by more than the `price` then goes on. Choose it where the links may be what
            limits training, and gradients of `loose` do no harm.

    Raises:
        PlanError: if a value cannot be.

    >>> WaitThreshold(above=0.4)
    WaitThreshold(tight=BSP(), loose=ASP(), above=0.4, below=0.15, window_s=2.0, least_s=4.0, price=0.1, explore=False)
    """

    tight: Policy = field(default_factory=BSP)
    loose: Policy = field(default_factory=ASP)
    above: float = 0.3
    below: float = 0.15
    window_s: float = 2.0
    least_s: float = 4.0
    price: float = 0.1
    explore: bool = False

    def __post_init__(self) -> None:
        for name in ("tight", "loose"):
            part = getattr(self, name)
            if isinstance(part, type) or not callable(getattr(part, "decide", None)):
                raise PlanError(
                    f"Cannot swap to {short_name(part)}: it is no policy. Use an object, such as BSP() "
                    f"- at `plan.controller.{name}`."
                )
        if self.tight == self.loose:
            raise PlanError(
                f"Cannot swap between {self.tight!r} and itself. Choose a policy with which workers wait less, such as "
                "ASP() - at `plan.controller.loose`."
            )
        if self.above not in RealNumbers(above=0, below=1):
            raise PlanError(
                f"Cannot swap above {self.above!r}: it is a share of the time, above 0 and below 1 "
                "- at `plan.controller.above`."
            )
        if self.below not in RealNumbers(0, below=self.above):
            raise PlanError(
                f"Cannot go back below {self.below!r}: it is a share of the time, from 0 (never) and below "
                f"{self.above:g}; between `below` and `above` nothing is swapped - at `plan.controller.below`."
            )
        for name in ("window_s", "least_s"):
            value = getattr(self, name)
            if value not in RealNumbers(above=0):
                raise PlanError(f"Cannot look at {value!r} seconds: choose above 0 - at `plan.controller.{name}`.")
        if self.price not in RealNumbers(0, below=1):
            raise PlanError(
                f"Cannot pay {self.price!r} for {self.tight!r}: it is a part of the pace, from 0 and below 1 "
                "- at `plan.controller.price`."
            )
        if type(self.explore) is not bool:
            raise PlanError(f"Cannot explore {self.explore!r}: choose True or False - at `plan.controller.explore`.")

    @property
    def policies(self) -> tuple[Policy, ...]:
        return (self.tight, self.loose)

    @property
    def looks_back_s(self) -> float:
        return 2 * self.window_s

    def decide(self, metrics: Metrics) -> Decision:
        """Look at what was waited under `tight`, and at what would be under `loose`; and at what either brought."""
        if metrics.sync == self.tight:
            share = metrics.waiting(self.window_s)
            if share is None or metrics.held_s < self.least_s:
                return Keep()
            if share > self.above:
                return Swap(
                    self.loose,
                    f"{share:.0%} of the last {self.window_s:g} s were spent waiting for others, above "
                    f"{self.above:.0%}",
                )
            reason = self._dear(metrics) or self._unknown(metrics)
            return Swap(self.loose, reason) if reason else Keep()
        if metrics.sync == self.loose:
            share = metrics.imbalance(2 * self.window_s)
            if share is None or share >= self.below or metrics.held_s < self._patience_s(metrics):
                return Keep()
            if self._dear(metrics) or (self.explore and self._pace(metrics, self.loose) is None):
                return Keep()
            return Swap(
                self.tight,
                f"{share:.0%} of the last {2 * self.window_s:g} s would have been spent waiting for others, below "
                f"{self.below:.0%}",
            )
        return Keep()  # somebody else has chosen that

    def _dear(self, metrics: Metrics) -> str:
        """Say why `tight` costs too much though nobody is late; "" if it does not, or nothing is known of that."""
        tight, loose = self._pace(metrics, self.tight), self._pace(metrics, self.loose)
        if tight is None or loose is None or tight >= (1 - self.price) * loose:
            return ""
        return (
            f"each worker had {tight:.4g} samples/s at best, and {loose:.4g} under {self.loose!r}: more than "
            f"{self.price:.0%} less"
        )

    def _unknown(self, metrics: Metrics) -> str:
        """Say why `loose` is to be tried though nobody is late; "" if it is not."""
        tight = self._pace(metrics, self.tight)
        known = self._pace(metrics, self.loose) is not None
        if not self.explore or tight is None or known or metrics.held_s < 2 * self.least_s:
            return ""
        return f"each worker had {tight:.4g} samples/s at best, and what it has under {self.loose!r} is not known"

    def _pace(self, metrics: Metrics, policy: Policy) -> float | None:
        return metrics.pace(policy, self._memory_s)

    @property
    def _memory_s(self) -> float:
        return 8 * self.least_s * float(2**_MOST_DOUBLINGS)

    def _patience_s(self, metrics: Metrics) -> float:
        """Seconds that `loose` decides at least: longer where going back did not last."""
        back = (len([at_s for at_s in metrics.swaps if at_s > metrics.now_s - self._memory_s]) - 1) // 2
        return self.least_s * float(2 ** max(0, min(back, _MOST_DOUBLINGS)))
