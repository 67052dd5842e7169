"""One policy after the other as training goes on (Li et al., "Sync-Switch: hybrid parameter synchronization for
distributed deep learning", ICDCS 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from offbeat.control.controller import Keep, Swap
from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.short_name import short_name
from offbeat.sync import Policy  # noqa: TC001 - read when a plan is

if TYPE_CHECKING:
    from offbeat.control.controller import Decision, Metrics


@dataclass(frozen=True)
class ByProgress:
    """A controller that goes from one policy to the next as training goes on (Sync-Switch), at parts of `steps`.

    Early gradients tolerate little staleness, later ones more: begin with `BSP`, and go on with `ASP` after a quarter
    or a half. It never goes back to an earlier policy.

    Without a server it swaps at the same step in every run.

    Args:
        policies: in their order.
        at: from which part of `steps` on each but the first decides.
        steps: of each worker in all, on average; on a server contributions, where `LocalSGD` has one for several steps.

    Raises:
        PlanError: if a value cannot be.

    >>> from offbeat.sync import ASP, BSP
    >>> ByProgress((BSP(), ASP()), at=(0.25,), steps=1000)
    ByProgress(policies=(BSP(), ASP()), at=(0.25,), steps=1000)
    """

    policies: tuple[Policy, ...]
    at: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.policies, tuple) or len(self.policies) < 2:
            raise PlanError(
                f"Cannot go from policy to policy with {self.policies!r}: write a tuple of at least two, such as "
                "(BSP(), ASP()) - at `plan.controller.policies`."
            )
        for part in self.policies:
            if isinstance(part, type) or not callable(getattr(part, "decide", None)):
                raise PlanError(
                    f"Cannot swap to {short_name(part)}: it is no policy. Use an object, such as BSP() "
                    "- at `plan.controller.policies`."
                )
        if any(here == there for here, there in pairwise(self.policies)):
            raise PlanError(
                f"Cannot swap between a policy and itself, as in {self.policies!r}. Leave one of the two out "
                "- at `plan.controller.policies`."
            )
        if not isinstance(self.at, tuple) or any(part not in RealNumbers() for part in self.at):
            raise PlanError(f"Cannot swap at {self.at!r}: write a tuple of parts - at `plan.controller.at`.")
        rising = all(here < there for here, there in pairwise((0.0, *self.at, 1.0)))
        if len(self.at) != len(self.policies) - 1 or not rising:
            raise PlanError(
                f"Cannot swap at {self.at!r} between {len(self.policies)} policies: write {len(self.policies) - 1} "
                "parts, rising, between 0 and 1 - at `plan.controller.at`."
            )
        if self.steps not in WholeNumbers(1):
            raise PlanError(
                f"Cannot go by {self.steps!r} steps: say how many there will be, from 1 - at `plan.controller.steps`."
            )

    @property
    def looks_back_s(self) -> float:
        return 1.0

    def decide(self, metrics: Metrics) -> Decision:
        """Go on to the policy of this part, if the present one is an earlier of these."""
        due = sum(metrics.steps >= part * self.steps for part in self.at)
        if metrics.sync not in self.policies[: due + 1] or metrics.sync == self.policies[due]:
            return Keep()
        return Swap(self.policies[due], f"{metrics.steps:.0f} of {self.steps} steps are done")
