"""Stale synchronous parallel (Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
server", NIPS 2013): workers run on their own, and the fastest waits when the slowest is too far behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.sync.actions import Release
from offbeat.sync.asp import apply_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import State


@dataclass(frozen=True)
class SSP:
    """Stale-synchronous training: a worker waits only where it is more than `bound` steps ahead of the slowest.

    A worker that has brought c contributions goes on while every other one has brought c - `bound`.

    Each contribution is applied by itself at once, at its share of a round's learning rate. The parameters for step s
    hold all contributions of the steps before s - bound, the worker's own, and perhaps newer ones. `SSP(0)` waits as
    `BSP` does, but updates the parameters N times a step.

    What to know:

    * Most of the gain over BSP comes early: where workers straggle at random, a bound of 2 gives about four fifths of
      what any bound can give, 4 nine tenths. A worker that is always slower holds up all others in the end, whatever
      the bound is.
    * The price of slack grows with its root: regret is of order sqrt((bound + 1) N T).
    * Momentum and adaptive optimizers: as for `ASP`, within the bound.

    Args:
        bound: steps that the fastest worker may be ahead of the slowest.

    Raises:
        PlanError: if `bound` is negative.

    >>> SSP(bound=4)
    SSP(bound=4)
    """

    bound: int

    def __post_init__(self) -> None:
        if self.bound not in WholeNumbers():
            raise PlanError(
                f"Cannot let workers be {self.bound!r} steps ahead: choose a whole number from 0; 4 is a good start "
                "- at `plan.sync.bound`."
            )

    @property
    def replicated(self) -> bool:
        return False

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
        """Apply contributions as they come; let a worker go on if the others' have arrived up to the bound."""
        return [*apply_each(state), *(Release(worker) for worker in state.held if self._may_go_on(state, worker))]

    def _may_go_on(self, state: State, worker: int) -> bool:
        return state.members[worker].pace + 1 - state.slowest_but(worker) <= self.bound
