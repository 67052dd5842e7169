"""A synchronization policy is a rule for when a worker may go on; it does no I/O and reads no clock.

The rule looks at the `State` alone, not at what just happened: it is asked again after every event, and after every
decision of its own, until it has nothing more to say. So it cannot miss anything, and can take over from another rule
at any moment.

>>> from offbeat.sync import ASP, Joined, Pushed, Ready, State
>>> state, _ = on(ASP(), State(), Joined(worker=0, at_s=0.0))
>>> on(ASP(), state, Ready(worker=0, clock=0, at_s=1.0, weight=32))[1]
(Grant(worker=0), Apply(pushes=((0, 0),), rate=1.0, in_order=False), Release(worker=0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from offbeat.sync.actions import Wake
from offbeat.sync.events import Adopted
from offbeat.sync.state import InvalidDecision, State, enact, observe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.events import Event
    from offbeat.sync.outer_sgd import OuterSGD


# "gradient": of this step. "change": of the parameters since the last contribution; the worker steps by itself in
# between. None: nothing.
Contributes = Literal["gradient", "change"] | None

# What the steps of a worker are computed on, and so what becomes of the loss. "local": on parameters that were the same
# on all workers at the last average. "delayed": on parameters that no two workers ever have in common, since averages
# are applied when they have moved on, or part by part; they are the same behind `Run.settle` alone.
LossClass = Literal["local", "delayed"]


class Policy(Protocol):
    """The Protocol of a synchronization policy."""

    @property
    def replicated(self) -> bool:
        """Whether it can run where every worker holds the parameters and applies the same update."""

    @property
    def bound(self) -> int | None:
        """The number of steps that a worker may be ahead of the slowest one that takes part; None if any number.

        When a worker is released for step s, each other member has brought at least s - bound contributions. One that
        is in the update the worker waits for counts, and one in any earlier update if that update is made in order:
        the worker is given no block before they are in it.
        """

    @property
    def drops(self) -> bool:
        """Whether it may leave a contribution unused."""

    @property
    def gated(self) -> bool:
        """Whether a worker that is ready may have to wait for its `Grant`; else it may begin to push at once."""

    def contributes(self, step: int) -> Contributes:
        """The kind of contribution that a worker pushes after its own step number `step`, from 0."""

    def decide(self, state: State) -> Sequence[Action]:
        """Decide what to do now; empty if nothing. Pure."""


@runtime_checkable
class CountsWorkers(Protocol):
    """A policy that works only with enough workers, or with certain ones."""

    def check_workers(self, groups: Sequence[Sequence[int]], path: str, what: str) -> None:
        """Refuse workers with which it would never make an update; see the function `check_workers`."""


@runtime_checkable
class TakesTurns(Protocol):
    """A policy in which only some workers push at a time."""

    def slots_over(self, hosts: int) -> int | None:
        """Count the workers that may push at once over parameters on so many hosts; None if any number."""


@runtime_checkable
class StepsLocally(Protocol):
    """A policy with which workers step by themselves, and contribute how far they came: local SGD."""

    @property
    def interval(self) -> int:
        """The number of a worker's own steps from one contribution to the next, once it makes any."""

    @property
    def outer(self) -> OuterSGD | None:
        """The optimizer that applies the mean change; None for a plain average."""

    @property
    def delay(self) -> int:
        """The number of intervals, 0 or 1, after which an average that was begun is applied."""

    @property
    def fragments(self) -> int:
        """The number of parts of the model of which each contribution is one."""

    @property
    def loss_class(self) -> LossClass:
        """The class of the loss: "local" if replicas are the same behind a contribution, else "delayed"."""

    def fragment(self, step: int) -> int:
        """The part of the model of the contribution that is made behind this step, or next."""

    def step_of(self, number: int) -> int:
        """The worker's own step in which its contribution `number`, from 0, begins."""


def check_workers(policy: Policy, groups: Sequence[Sequence[int]], path: str, what: str = "workers") -> None:
    """Check that a policy does not count on more workers than there are.

    Args:
        groups: ranks that it decides about together; several if it is one within groups.
        path: where the policy is in the plan.
        what: it decides about: workers, or groups of them.

    Raises:
        PlanError: with the path of the number that is too large.
    """
    if isinstance(policy, CountsWorkers):
        policy.check_workers(groups, path, what)


def adoption(old: Policy, new: Policy, at_s: float) -> Adopted:
    """The event with which `new` takes over from `old`: workers are levelled if only the new one has a bound.

    >>> from offbeat.sync import ASP, BSP, SSP
    >>> adoption(ASP(), SSP(bound=4), 1.0)
    Adopted(at_s=1.0, level=True)
    >>> adoption(SSP(bound=4), BSP(), 1.0)  # nobody is ahead by more than 4 steps
    Adopted(at_s=1.0, level=False)

    Where steps of a worker's own begin or end, a contribution is not what it was, and neither is a lead.
    """
    return Adopted(at_s, level=(old.bound is None and new.bound is not None) or own_steps(old) != own_steps(new))


def own_steps(policy: Policy) -> int:
    """Count a worker's own steps from one contribution to the next, once it makes any; 0 if it makes none.

    >>> from offbeat.sync import BSP, LocalSGD
    >>> own_steps(LocalSGD(every=8, after=100)), own_steps(BSP())
    (8, 0)
    """
    return policy.interval if isinstance(policy, StepsLocally) else 0


def on(policy: Policy, state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Observe `event`, let `policy` decide, and return the state after that.

    Raises:
        InvalidDecision: if the policy decided something impossible, or finds no end.
    """
    return settle(policy, observe(state, event))


def settle(policy: Policy, state: State) -> tuple[State, tuple[Action, ...]]:
    """Let `policy` decide until it has no more actions, and return the state after that.

    Raises:
        InvalidDecision: if the policy decided something impossible, or finds no end.
    """
    decided: list[Action] = []
    most = 16 + 8 * len(state.members)
    while actions := [action for action in policy.decide(state) if not _is_set(state, action)]:
        for action in actions:
            state = enact(state, action)
        decided += actions
        if len(decided) > most:
            raise InvalidDecision(f"{policy!r} finds no end: {', '.join(map(repr, decided[-8:]))}")
    return state, tuple(decided)


def _is_set(state: State, action: Action) -> bool:
    return isinstance(action, Wake) and state.wake_s == action.at_s
