"""Contributions of another kind that are still pending when a policy is swapped.

An update holds gradients or changes, never both. So what is of the other kind is in an update by itself: what is
pending when the policy is swapped (`take_over`), and what comes later from a worker that had not heard of the swap
(`bring`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from offbeat.sync.actions import Apply, Grant, Release
from offbeat.sync.events import Adopted, Ready
from offbeat.sync.policy import own_steps, settle
from offbeat.sync.state import changed, observe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.sync.actions import Action, Push
    from offbeat.sync.events import Event
    from offbeat.sync.policy import Contributes, Policy
    from offbeat.sync.state import State


@dataclass(frozen=True)
class DrainOldKind:
    """Some contributions are applied by themselves, as they come, and their workers go on; no others are.

    It decides for a moment, when workers go over from gradients to changes of their own or back: one update cannot hold
    both. Who brings one as the earlier policy wanted has not heard of the swap yet, or was held then.

    Args:
        rates: of these contributions, which part of a round each is.
    """

    rates: Mapping[Push, float]

    @property
    def replicated(self) -> bool:
        return False

    @property
    def bound(self) -> int | None:
        return None

    @property
    def drops(self) -> bool:
        return False

    @property
    def gated(self) -> bool:
        return False

    def contributes(self, step: int) -> Contributes:
        """Never asked: the contributions are there."""
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        """Decide as `ASP` does, for contributions of the old kind."""
        mine = {(worker, m.step): m for worker, m in sorted(state.members.items()) if (worker, m.step) in self.rates}
        held = {push: m for push, m in mine.items() if m.held}
        return [
            *[Grant(worker) for (worker, _), m in held.items() if m.granted_s is None],
            *[Apply((push,), rate, in_order=False) for push, rate in self.rates.items() if push in state.pending],
            *[Release(worker) for worker, _ in held],
        ]


class DecisionStage(NamedTuple):
    """Actions, and the state before them.

    Args:
        before: the state from which it was.
    """

    before: State
    actions: tuple[Action, ...]


def decide(
    policy: Policy,
    state: State,
    event: Event,
    *,
    former: Policy | None = None,
    change: bool = False,
    ends: bool = False,
) -> tuple[State, tuple[DecisionStage, ...]]:
    """Ask what is decided after any event, and return the state after that.

    Args:
        former: the policy that has decided until now, if another takes over by this event.
        change, ends: as of `bring`, if a worker has a contribution.
    """
    if isinstance(event, Adopted) and former is not None:
        return take_over(former, policy, state, event)
    if isinstance(event, Ready):
        return bring(policy, state, event, change=change, ends=ends)
    return _one(policy, observe(state, event))


def take_over(old: Policy, new: Policy, state: State, event: Adopted) -> tuple[State, tuple[DecisionStage, ...]]:
    """Decide as `new` takes over, and return the state after that; in two stages if contributions of the old kind are
    pending.
    """
    state = observe(state, event)
    if own_steps(old) == own_steps(new):
        return _one(new, state)
    after, drained = settle(DrainOldKind({push: state.share(push) for push in state.pending}), state)
    after = with_steps(after, max(1, own_steps(new)) / max(1, own_steps(old)))
    return _two(new, DecisionStage(state, drained), after)


def bring(
    policy: Policy, state: State, event: Ready, *, change: bool, ends: bool = False
) -> tuple[State, tuple[DecisionStage, ...]]:
    """Decide on a worker's new contribution, and return the state after that; in two stages if contributions of the old
    kind are pending.

    Args:
        change: it is a change of the worker's own, not a gradient.
        ends: it is the last change of the worker's own, of perhaps fewer steps than usual.
    """
    seen = observe(state, event)
    if change == (policy.contributes(event.clock) != "gradient") and not ends:
        return _one(policy, seen)
    # It weighs in a round what its worker does, though it may be of fewer steps than usual.
    weight, rate = weight_in(state, event.worker)
    after, drained = settle(DrainOldKind({(event.worker, event.clock): rate}), seen)
    return _two(policy, DecisionStage(seen, drained), with_weight(after, event.worker, weight))


def _one(policy: Policy, state: State) -> tuple[State, tuple[DecisionStage, ...]]:
    after, actions = settle(policy, state)
    return after, (DecisionStage(state, actions),)


def _two(policy: Policy, first: DecisionStage, state: State) -> tuple[State, tuple[DecisionStage, ...]]:
    after, actions = settle(policy, state)
    return after, (first, DecisionStage(state, actions))


def with_steps(state: State, more: float) -> State:
    """The state when each contribution has `more` times as many steps in it from now on, and samples.

    What the policy that is swapped out remembered of its rounds does not count any more.
    """
    members = {
        worker: changed(m, weight=None if m.weight is None else m.weight * more) for worker, m in state.members.items()
    }
    away = {worker: weight * more for worker, weight in state.away.items()}
    return changed(state, members=members, away=away, memory=None, wake_s=None)


def with_weight(state: State, worker: int, weight: float | None) -> State:
    """The state in which a worker weighs so much in a round, if it takes part."""
    if worker not in state.members:
        return state
    return changed(state, members={**state.members, worker: changed(state.members[worker], weight=weight)})


def with_past(state: State, worker: int, least: int) -> State:
    """The state in which the next contribution of a worker that is about to join has no lower number."""
    return changed(state, past={**state.past, worker: max(least, state.past.get(worker, 0))}) if least else state


def weight_in(state: State, worker: int) -> tuple[float | None, float]:
    """A member's weight, and which part of a round that is; an equal part if it is not known."""
    weight, whole = state.members[worker].weight, state.weight
    return weight, weight / whole if weight and whole else 1 / (len(state.members) + len(state.away))
