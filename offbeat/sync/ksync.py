"""Partial participation: an update is made as soon as k workers have contributed to it.

Chen et al., "Revisiting distributed synchronous SGD" (2016), call the others backup workers; Dutta et al., "Slow and
stale gradients can win the race" (AISTATS 2018), call the two ways to treat them K-sync and K-async.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.sync.actions import Apply, Drop, Release
from offbeat.sync.bsp import grant_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync.actions import Action, Push
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import State

Late = Literal["drop", "carry"]


@dataclass(frozen=True)
class KSync:
    """Synchronous training with backup workers: the first `k` contributions make an update, their mean.

    With b backup workers among N, k = N - b.

    A step takes about as long as its k-th fastest worker instead of its slowest. If fewer than k workers are left, all
    of them make the update; a job that begins with fewer is refused.

    late="drop" (K-sync): every contribution in an update was computed on the version before it. One that comes after
    its update was made is dropped before it is pushed; its worker, which nobody interrupts while it computes, goes on
    at once with the new parameters. No contribution that is on the link is ever in vain: whoever computed on the
    current version may push at once, since all that are ready are in the update. Only right after a change from another
    policy may a push under way be dropped. What slow workers compute is lost: if the same ones are always slow, what
    only they have seen is never learnt. Let loaders shuffle over all workers, or use "carry". What takes part in every
    m-th round only (`TakesEveryNth`) is late once it is older than the m - 1 updates of the rounds between.

    late="carry" (K-async): a late contribution counts towards the update under way, so that nothing is lost, and
    staleness has no bound.

    A contribution without samples, such as that of a validator, is in the update, and does not count as one of the k.

    Learning rate and momentum: an update is a mean over k at the full learning rate, of fewer samples than one of BSP.
    Chen et al. scale the rate with k, and found about 4 % backup workers best.

    Args:
        k: contributions that make an update.
        late: what becomes of one that was computed on older parameters.

    Raises:
        PlanError: if `k` is less than 1, or `late` unknown.

    >>> KSync(k=7)
    KSync(k=7, late='drop')
    """

    k: int
    late: Late = "drop"

    def __post_init__(self) -> None:
        if self.k not in WholeNumbers(1):
            raise PlanError(
                f"Cannot make updates of {self.k!r} contributions: choose a whole number from 1 - at `plan.sync.k`."
            )
        if self.late not in get_args(Late):
            raise PlanError(
                f"Cannot treat late contributions with {self.late!r}: choose 'drop' or 'carry' - at `plan.sync.late`."
            )

    @property
    def replicated(self) -> bool:
        return False

    @property
    def bound(self) -> int | None:
        return None

    @property
    def drops(self) -> bool:
        return self.late == "drop"

    @property
    def gated(self) -> bool:
        return self.late == "drop"

    def check_workers(self, groups: Sequence[Sequence[int]], path: str, what: str) -> None:
        """Refuse an update of more contributions than any of these groups has members."""
        there = max(map(len, groups))
        if self.k > there:
            raise PlanError(
                f"Cannot make updates of {self.k} contributions with {there} {what}: there would never be so many. "
                f"Choose from 1 to {there}, or BSP() to wait for all - at `{path}.k`."
            )

    def contributes(self, step: int) -> Contributes:
        """The gradient of every step."""
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        """Drop late contributions; make the update once enough have contributed, and let them go on."""
        members = state.members
        there = {worker: (worker, members[worker].step) for worker in state.held}
        late = [worker for worker, push in there.items() if self._is_late(state, push)]
        if late:
            return [Drop(tuple(sorted(there[worker] for worker in late))), *map(Release, late)]
        pushes = tuple(sorted([push for push in there.values() if push in state.pending] + list(state.orphans)))
        low = state.low
        counted = sum(state.pending[push] > 0 for push in pushes)
        expected = sum([m.held or not m.is_off(low) for m in members.values()]) + len(state.orphans)
        if pushes and counted >= min(self.k, expected - (len(pushes) - counted)):
            return [*grant_all(state), Apply(pushes), *map(Release, there)]
        # Another policy may have applied a worker's contribution and held the worker.
        return [*grant_all(state), *(Release(worker) for worker, push in there.items() if push not in state.pending)]

    def _is_late(self, state: State, push: Push) -> bool:
        member = state.members[push[0]]
        return self.late == "drop" and push in state.pending and state.version - member.base > member.rests
