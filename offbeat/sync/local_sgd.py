"""Local SGD: workers step by themselves and average now and then.

Stich, "Local SGD converges fast and communicates little" (ICLR 2019); Lin et al., "Don't use large mini-batches, use
local SGD" (ICLR 2020), begin with ordinary steps (post-local SGD); Douillard et al., "DiLoCo" (2023), apply the mean
change with an outer optimizer.

So that nobody has to wait for a thin link, an average may travel while the next steps compute (`delay`), as in the
asynchronous DiLoCo of Keiblinger et al., "Prime Collective Communications Library" (arXiv 2505.14065, 2025); and the
model may be averaged part by part (`fragments`), as in Douillard et al., "Streaming DiLoCo with overlapping
communication" (arXiv 2501.18512, 2025), which spreads the bytes evenly over time. Their rules, for each fragment:

    anchor       what the last average that was applied has made of the parameters; the same on all workers
    sent         this worker's parameters where it last sent how far it had come, anchor - parameters
    when the mean is there, an interval later:
    anchor      -= outer(mean);   parameters += anchor - sent

A worker goes on at once from its own parameters, and the last line keeps what it has done since: that is sent next. So
what each worker's own steps have added up to is in one mean, once, as without a delay. (Streaming DiLoCo mixes its own
parameters with the common ones instead, and so gives up a part of either.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.short_name import short_name
from offbeat.sync.bsp import BSP
from offbeat.sync.outer_sgd import OuterSGD
from offbeat.sync.policy import Policy, StepsLocally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.policy import Contributes, LossClass
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
        delay: 1 to apply an average one interval after it was begun, so that it travels while workers compute: no link
            stops a worker that carries the model once in `every` steps. 0 to wait for it.
        fragments: parts of the model, of whole parameters in the order of the model and as equal in bytes as that
            allows, of which one after the other is averaged, each every `every` steps. An interval, from one average
            to the next, is then `every / fragments` steps; so is a delay, which is as fresh as a fragment can be.
        policy: that decides about contributions where a server takes them; None for BSP, in which all wait for all.
            With ASP() or SSP(...) each worker has its change applied, and goes on, at its own pace.

    Raises:
        PlanError: if `every` is less than 1 or no multiple of `fragments`, `after` is negative, `delay` neither 0 nor
            1, or `policy` one with which not every worker contributes alike.

    >>> policy = LocalSGD(every=2, after=1)
    >>> [policy.contributes(step) for step in range(5)]
    ['gradient', None, 'change', None, 'change']
    >>> policy = LocalSGD(every=8, delay=1, fragments=4)
    >>> [policy.fragment(step) for step in range(10) if policy.contributes(step)]
    [0, 1, 2, 3, 0]
    """

    every: int
    after: int = 0
    outer: OuterSGD | None = None
    delay: int = 0
    fragments: int = 1
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if self.every not in WholeNumbers(1):
            raise PlanError(
                f"Cannot average after each {self.every!r} steps: choose a whole number from 1 - at `plan.sync.every`."
            )
        if self.after not in WholeNumbers():
            raise PlanError(
                f"Cannot begin after {self.after!r} ordinary steps: choose a whole number from 0 "
                "- at `plan.sync.after`."
            )
        if self.outer is not None and not isinstance(self.outer, OuterSGD):
            raise PlanError(
                f"Cannot apply changes with {short_name(self.outer)}: use OuterSGD(...) or None - at `plan.sync.outer`."
            )
        if self.delay not in WholeNumbers(0, 1):
            raise PlanError(
                f"Cannot apply averages {self.delay!r} intervals after they were begun: choose 0 or 1 "
                "- at `plan.sync.delay`."
            )
        if self.fragments not in WholeNumbers(1):
            raise PlanError(
                f"Cannot average {self.fragments!r} fragments of a model: choose a whole number from 1 "
                "- at `plan.sync.fragments`."
            )
        if self.policy is not None and not self._can_decide(self.policy):
            raise PlanError(
                f"Cannot have {short_name(self.policy)} decide about changes: not every worker contributes alike with "
                "it. Use ASP(), SSP(...), or None for BSP() - at `plan.sync.policy`."
            )
        if self.every % self.fragments:
            fewer = next(number for number in range(min(self.fragments, self.every), 0, -1) if not self.every % number)
            raise PlanError(
                f"Cannot average {self.fragments!r} fragments at equal distances within {self.every} steps, which is "
                f"no multiple. Use fragments={fewer}, or every={-(-self.every // self.fragments) * self.fragments} "
                "- at `plan.sync.fragments`."
            )

    @property
    def replicated(self) -> bool:
        return self._decider.replicated

    @property
    def bound(self) -> int | None:
        return self._decider.bound

    @property
    def drops(self) -> bool:
        return self._decider.drops

    @property
    def gated(self) -> bool:
        return self._decider.gated

    @property
    def _decider(self) -> Policy:
        return self.policy or BSP()

    @staticmethod
    def _can_decide(policy: Policy) -> bool:
        plain = not isinstance(policy, type) and hasattr(policy, "decide") and not isinstance(policy, StepsLocally)
        return plain and not (policy.drops or policy.gated) and policy.contributes(0) == "gradient"

    @property
    def interval(self) -> int:
        """The number of steps from one average to the next, of whichever fragment."""
        return self.every // self.fragments

    @property
    def loss_class(self) -> LossClass:
        """The class of the loss: "local" if replicas are the same behind an average, else "delayed"."""
        return "delayed" if self.delay or self.fragments > 1 else "local"

    def fragment(self, step: int) -> int:
        """The fragment that is averaged next, behind this step or a later one."""
        return (step - self.after) // self.interval % self.fragments

    def contributes(self, step: int) -> Contributes:
        """The gradient at the beginning; then the change since the last contribution, after each interval."""
        if step < self.after:
            return "gradient"
        return "change" if (step - self.after + 1) % self.interval == 0 else None

    def step_of(self, number: int) -> int:
        """The worker's own step in which its contribution `number`, from 0, begins.

        >>> [LocalSGD(every=2, after=1).step_of(number) for number in range(4)]
        [0, 1, 3, 5]
        """
        return number if number <= self.after else self.after + (number - self.after) * self.interval

    def decide(self, state: State) -> Sequence[Action]:
        """Decide about contributions as `policy` does: with `BSP` the update waits for all, and all wait for it.

        It is a server that asks, where no average is delayed.
        """
        return self._decider.decide(state)
