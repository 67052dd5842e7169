"""Fewer contributions make an update while workers wait for each other, more again when too many come too late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.control.controller import Keep, Swap
from offbeat.errors import PlanError
from offbeat.float_sum import add_up
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.sync import KSync
from offbeat.sync.ksync import Late  # noqa: TC001 - read when a plan is

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.control.controller import Decision, Metrics
    from offbeat.sync import Policy

_MOST_DOUBLINGS = 3


@dataclass(frozen=True)
class AdaptQuorum:
    """A controller that chooses how many contributions make an update, `KSync(k)` with `k` from `least` to `most`.

    It goes one down where workers spend more than `above` of their time waiting for others, unless more than `too_late`
    of all contributions would come too late for their update then. It goes one up where more than that do; and where,
    going by how long each computes, less than `below` would be waited, and nobody is always late: that is a trial.

    It does not flap: between `below` and `above` it leaves `k` as it is, and no `k` decides for less than `least_s`,
    nor for less than twice that before a trial. With every second swap lately it takes twice as long, up to 8 times.

    Args:
        least, most: contributions that make an update; `most` is what training begins with.
        late: what becomes of one that comes too late, as of `KSync`.
        above, below: shares of the time that is spent waiting.
        too_late: share of contributions; with one worker of N left out of each update it is 1/N.
        window_s: over which shares are taken.
        least_s: of each `k`.

    Raises:
        PlanError: if a value cannot be.

    >>> AdaptQuorum(2, 4)
    AdaptQuorum(least=2, most=4, late='drop', above=0.3, below=0.1, too_late=0.3, window_s=2.0, least_s=4.0)
    """

    least: int
    most: int
    late: Late = "drop"
    above: float = 0.3
    below: float = 0.1
    too_late: float = 0.3
    window_s: float = 2.0
    least_s: float = 4.0

    def __post_init__(self) -> None:
        if self.least not in WholeNumbers(1) or self.most not in WholeNumbers(self.least + 1):
            raise PlanError(
                f"Cannot choose among updates of {self.least!r} to {self.most!r} contributions: write two whole "
                "numbers from 1, the second one larger, such as the workers that there are - at `plan.controller.most`."
            )
        try:
            KSync(self.least, self.late)
        except PlanError as error:
            raise PlanError(str(error).replace("`plan.sync.", "`plan.controller.")) from error
        for name, least, most in (("above", 0.0, 1.0), ("below", 0.0, self.above), ("too_late", 0.0, 1.0)):
            value = getattr(self, name)
            if value not in RealNumbers(above=least, below=most):
                raise PlanError(
                    f"Cannot go by {name}={value!r}: it is a share, above {least:g} and below {most:g} "
                    f"- at `plan.controller.{name}`."
                )
        for name in ("window_s", "least_s"):
            value = getattr(self, name)
            if value not in RealNumbers(above=0):
                raise PlanError(f"Cannot look at {value!r} seconds: choose above 0 - at `plan.controller.{name}`.")

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(KSync(k, self.late) for k in range(self.most, self.least - 1, -1))

    @property
    def looks_back_s(self) -> float:
        return 2 * self.window_s

    def decide(self, metrics: Metrics) -> Decision:
        """Look at what was waited, and at who came too late."""
        sync = metrics.sync
        if not isinstance(sync, KSync) or sync not in self.policies or metrics.held_s < self._patience_s(metrics):
            return Keep()
        waiting, shares = metrics.waiting(self.window_s), metrics.left_out(self.window_s)
        left_out = add_up(shares.values()) / len(shares) if shares else 0.0
        last = f"of the last {self.window_s:g} s"
        if sync.k < self.most and left_out > self.too_late:
            return self._swap(
                sync.k + 1, f"{left_out:.0%} of the contributions {last} came too late, above {self.too_late:.0%}"
            )
        if waiting is None:
            return Keep()
        would = left_out + 1 / max(1, len(metrics.readings[-1].steps))
        if sync.k > self.least and waiting > self.above and would <= self.too_late:
            return self._swap(sync.k - 1, f"{waiting:.0%} {last} were spent waiting for others, above {self.above:.0%}")
        if sync.k < self.most and self._is_quiet(metrics, sync.k, waiting, shares):
            return self._swap(sync.k + 1, f"less than {self.below:.0%} {last} would have been spent waiting for others")
        return Keep()

    def _swap(self, k: int, reason: str) -> Swap:
        return Swap(KSync(k, self.late), reason)

    def _is_quiet(self, metrics: Metrics, k: int, waiting: float, shares: Mapping[int, float]) -> bool:
        """Whether nobody is late, and so for long enough."""
        imbalance = metrics.imbalance(self.looks_back_s)
        if max(waiting, imbalance or 0.0) >= self.below or metrics.held_s < 2 * self._patience_s(metrics):
            return False
        # Where all are alike, each is left out as often as the others.
        even = 1 - min(1.0, k / max(1, len(shares)))
        return max(shares.values(), default=0.0) < (1 + even) / 2

    def _patience_s(self, metrics: Metrics) -> float:
        """Seconds that the present `k` decides at least: longer where those before did not last."""
        memory_s = 8 * self.least_s * float(2**_MOST_DOUBLINGS)
        lately = len([at_s for at_s in metrics.swaps if at_s > metrics.now_s - memory_s])
        return self.least_s * float(2 ** min(lately // 2, _MOST_DOUBLINGS))
