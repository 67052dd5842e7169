"""Local SGD: workers step by themselves and average now and then.

Stich, "Local SGD converges fast and communicates little" (ICLR 2019); Lin et al., "Don't use large mini-batches, use
local SGD" (ICLR 2020), begin with ordinary steps (post-local SGD); Douillard et al., "DiLoCo" (2023), apply the mean
change with an outer optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.sync.bsp import BSP
from offbeat.sync.outer_sgd import OuterSGD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import State


@dataclass(frozen=True)
class LocalSGD:
    """Local SGD: each worker steps by itself, and after each `every` steps all average how far they came.

    Communication falls to 1/every. Who steps by itself drifts: short runs, few samples per worker and unlike data ask
    for small `every`; begin with ordinary steps (`after`), while the learning rate is high. Momentum stays with each
    worker's own optimizer; after ordinary steps on a server it begins with the momentum that the server's copy of the
    optimizer has gathered, so that the result is the same with and without a server. What is contributed is waited for
    as in BSP; contributions, not steps, are counted.

    Args:
        every: steps between two averages.
        after: steps at the beginning after each of which gradients are averaged, as in BSP.
        outer: how the mean change is applied; None for a plain average.

    Raises:
        PlanError: if `every` is less than 1 or `after` negative.

    >>> policy = LocalSGD(every=2, after=1)
    >>> [policy.contributes(step) for step in range(5)]
    ['gradient', None, 'change', None, 'change']
    """

    every: int
    after: int = 0
    outer: OuterSGD | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise PlanError(
                f"Cannot average after each {self.every!r} steps: choose a whole number from 1 - at `plan.sync.every`."
            )
        if type(self.after) is not int or self.after < 0:
            raise PlanError(
                f"Cannot begin after {self.after!r} ordinary steps: choose a whole number from 0 "
                "- at `plan.sync.after`."
            )
        if self.outer is not None and not isinstance(self.outer, OuterSGD):
            raise PlanError(
                f"Cannot apply changes with {self.outer!r}: use OuterSGD(...) or None - at `plan.sync.outer`."
            )

    @property
    def replicated(self) -> bool:
        return True

    @property
    def bound(self) -> int | None:
        return 0

    @property
    def drops(self) -> bool:
        return False

    @property
    def gated(self) -> bool:
        return False

    def contributes(self, step: int) -> Contributes:
        """The gradient at the beginning; then the change since the last contribution, after each `every` steps."""
        if step < self.after:
            return "gradient"
        return "change" if (step - self.after + 1) % self.every == 0 else None

    def step_of(self, number: int) -> int:
        """The worker's own step in which its contribution `number`, from 0, begins.

        >>> [LocalSGD(every=2, after=1).step_of(number) for number in range(4)]
        [0, 1, 3, 5]
        """
        return number if number <= self.after else self.after + (number - self.after) * self.every

    def decide(self, state: State) -> Sequence[Action]:
        """Let all push at once; the update waits for all, and all wait for it, as with `BSP`."""
        return BSP().decide(state)
