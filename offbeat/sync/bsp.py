"""Bulk-synchronous parallel (Valiant, "A bridging model for parallel computation", CACM 1990).

Every worker contributes to every step, and no worker starts the next one before it has the sum of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.sync.actions import Apply, Grant, Release

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import State


@dataclass(frozen=True)
class BSP:
    """Bulk-synchronous training: all workers wait for all in every step, so a step takes as long as its slowest worker.

    It is exact mini-batch training.

    Workers that another policy let go ahead wait until the others are there; until then an update counts for the part
    of a round that it is made from.

    >>> BSP()
    BSP()
    """

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
        """The gradient of every step."""
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        """Let all push at once; the update waits for all, and all wait for it."""
        if grants := grant_all(state):
            return grants
        low, members = state.low, state.members
        if not members or any(m.ready_s is None and m.pace == low for m in members.values()):
            return []
        last = {worker: (worker, m.step) for worker, m in members.items() if m.pace == low}
        ahead = {(worker, m.step) for worker, m in members.items() if worker not in last}
        pushes = tuple(sorted(push for push in state.pending if push not in ahead))
        if pushes:
            go = [worker for worker, push in sorted(last.items()) if push in state.pending]
            # A whole round is applied as it is, to the bit, whatever the weights are.
            off = sum([m.is_off(low) for m in members.values()])
            rate = 1.0 if len(go) + off == len(members) else state.share(*pushes)
            return [Apply(pushes, rate), *map(Release, go)]
        # What they brought was applied before, by another policy, and may still be on its way.
        return [Release(worker) for worker in sorted(last) if state.slowest_but(worker) > low]


def grant_all(state: State) -> list[Action]:
    """Let everyone push who has something to push."""
    members = state.members.items()
    return [*map(Grant, sorted([worker for worker, m in members if m.ready_s is not None and m.granted_s is None]))]
