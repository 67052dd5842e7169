"""Dynamic stale synchronous parallel (Zhao et al., "Dynamic stale synchronous parallel distributed training for deep
learning", ICDCS 2019): SSP whose bound lies in a range, and is chosen anew whenever a worker would have to wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.sync.actions import Release, Remember
from offbeat.sync.asp import apply_each

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import State


class TimedWorker(Protocol):
    """A worker whose contributions can be foreseen, such as a `Member`."""

    @property
    def pace(self) -> int:
        """The step it is at, as workers are compared."""

    @property
    def brought(self) -> int:
        """The number of contributions it has pushed, as workers are compared."""

    @property
    def last_ready_s(self) -> float | None:
        """The time of its last contribution."""

    @property
    def interval_s(self) -> float | None:
        """The time between its last two."""


@dataclass(frozen=True)
class Allowance:
    """Up to which step workers may go that are further ahead than `DSSP.low`.

    Args:
        until: pairs of worker and step; a step the worker has reached means that it waits.
    """

    until: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class DSSP:
    """Stale-synchronous training with a bound that changes: `low`, and up to `high` where that shortens the wait.

    When the fastest worker would have to wait at `low`, its next contributions and those of the slowest worker are
    foreseen from their last two. It is given the number of steps, at most `high - low`, after which the slowest will
    bring its next contribution soonest; then it waits until it is within `low` again. Slower workers than the fastest
    get no extra steps. Regret is that of `SSP(high)`; what is said there about momentum holds here.

    Where workers straggle at random this gains little over `SSP(low)`, a few per cent where one is slow for a while:
    what two contributions foretell is soon wrong. If you can afford `high`, `SSP(high)` waits less.

    Args:
        low: steps that any worker may be ahead of the slowest.
        high: steps that the fastest may be ahead; this is what is promised.

    Raises:
        PlanError: if they are not 0 <= low <= high.

    >>> DSSP(low=2, high=8).bound
    8
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low not in WholeNumbers():
            raise PlanError(
                f"Cannot let workers be {self.low!r} steps ahead: choose a whole number from 0 - at `plan.sync.low`."
            )
        if self.high not in WholeNumbers(self.low):
            raise PlanError(
                f"Cannot choose a bound between {self.low} and {self.high!r}: high is a whole number from low on "
                "- at `plan.sync.high`."
            )

    @property
    def replicated(self) -> bool:
        return False

    @property
    def bound(self) -> int | None:
        return self.high

    @property
    def drops(self) -> bool:
        return False

    @property
    def gated(self) -> bool:
        return False

    def contributes(self, step: int) -> Contributes:
        """The gradient of every step."""
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        """Apply contributions as they come; let workers go on within `low`, or as far as they were allowed."""
        before = state.memory if isinstance(state.memory, Allowance) else Allowance()
        until = {worker: step for worker, step in before.until if worker in state.members}
        actions = apply_each(state)
        for worker in state.held:
            next_step = state.members[worker].pace + 1
            lead = next_step - state.slowest_but(worker)
            if lead <= self.low:
                until.pop(worker, None)
                actions.append(Release(worker))
            elif lead <= self.high:
                if worker not in until and (extra := self.extra(state.members, worker)) is not None:
                    until[worker] = next_step - 1 + extra
                if until.get(worker, 0) >= next_step:
                    actions.append(Release(worker))
        after = Allowance(tuple(sorted(until.items())))
        return actions if after == before else [*actions, Remember(after)]

    def extra(self, workers: Mapping[int, TimedWorker], worker: int) -> int | None:
        """Count the steps from now after which the fastest worker, which would wait at `low`, waits least.

        Args:
            workers: all that take part.
            worker: which one is to go on.

        Returns:
            At most `high` - `low`; None if that cannot be known, or it is not the fastest.
        """
        fast, others = workers[worker], [m for w, m in sorted(workers.items()) if w != worker]
        if not others:
            return None
        slow = min(others, key=lambda m: m.brought)
        if any(other.pace > fast.pace for other in others):
            return None
        if fast.last_ready_s is None or slow.last_ready_s is None or not fast.interval_s or not slow.interval_s:
            return None
        waits_s = []
        for extra in range(self.high - self.low + 1):
            ready_s = fast.last_ready_s + extra * fast.interval_s
            steps = max(1, math.ceil((ready_s - slow.last_ready_s) / slow.interval_s))
            waits_s.append(slow.last_ready_s + steps * slow.interval_s - ready_s)
        return waits_s.index(min(waits_s))
