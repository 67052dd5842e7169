"""What a policy that has been swapped out had workers bring, where the present one has them bring something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.sync.actions import Apply, Grant, Release
from offbeat.sync.state import changed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.sync.actions import Action, Push
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import State


@dataclass(frozen=True)
class Apart:
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
        """Not asked: they are there."""
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        """As `ASP`, for these."""
        mine = {(worker, m.step): m for worker, m in sorted(state.members.items()) if (worker, m.step) in self.rates}
        held = {push: m for push, m in mine.items() if m.held}
        return [
            *[Grant(worker) for (worker, _), m in held.items() if m.granted_s is None],
            *[Apply((push,), rate, in_order=False) for push, rate in self.rates.items() if push in state.pending],
            *[Release(worker) for worker, _ in held],
        ]


def with_steps(state: State, more: float) -> State:
    """The state when each contribution has `more` times as many steps in it from now on, and samples.

    What the policy that is swapped out remembered of its rounds does not count any more.
    """
    members = {
        worker: changed(m, weight=None if m.weight is None else m.weight * more) for worker, m in state.members.items()
    }
    away = {worker: weight * more for worker, weight in state.away.items()}
    return changed(state, members=members, away=away, memory=None, wake_s=None)


def weight_in(state: State, worker: int) -> tuple[float | None, float]:
    """A member's weight, and which part of a round that is; an equal part if it is not known."""
    weight, whole = state.members[worker].weight, state.weight
    return weight, weight / whole if weight and whole else 1 / (len(state.members) + len(state.away))
