"""Partial participation: an update is made as soon as k workers have contributed to it.

Chen et al., "Revisiting distributed synchronous SGD" (2016), call the others backup workers; Dutta et al., "Slow and
stale gradients can win the race" (AISTATS 2018), call the two ways to treat them K-sync and K-async.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.sync.actions import Apply, Drop, Release, Wake
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

    With `wait_s` the first k do not close an update at once: the others have so many seconds from then on to be in it,
    too. So `KSync(1, wait_s=2)` waits for all workers, as `BSP()` does, but 2 s at most; the mean is of those in it.

    A contribution without samples, such as that of a validator, is in the update, and does not count as one of the k.

    Learning rate and momentum: an update is a mean over k at the full learning rate, of fewer samples than one of BSP.
    Chen et al. scale the rate with k, and found about 4 % backup workers best.

    Args:
        k: contributions that make an update.
        late: what becomes of one that was computed on older parameters.
        wait_s: seconds for which an update of k waits for the other workers.

    Raises:
        PlanError: if `k` is less than 1, `late` unknown, or `wait_s` below 0.

    >>> KSync(k=7)
    KSync(k=7, late='drop', wait_s=0.0)
    """

    k: int
    late: Late = "drop"
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.k not in WholeNumbers(1):
            raise PlanError(
                f"Cannot make updates of {self.k!r} contributions: choose a whole number from 1 - at `plan.sync.k`."
            )
        if self.late not in get_args(Late):
            raise PlanError(
                f"Cannot treat late contributions with {self.late!r}: choose 'drop' or 'carry' - at `plan.sync.late`."
            )
        if self.wait_s not in RealNumbers(0, below=1e9):
            raise PlanError(
                f"Cannot wait {self.wait_s!r} s for late workers: choose a number of seconds from 0, or BSP() to wait "
                "for all - at `plan.sync.wait_s`."
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
        counted = [push for push in pushes if state.pending[push] > 0]
        expected = sum([m.held or not m.is_off(low) for m in members.values()]) + len(state.orphans)
        # Another policy may have applied a worker's contribution and held the worker.
        stays = [*grant_all(state), *(Release(worker) for worker, push in there.items() if push not in state.pending)]
        enough = min(self.k, expected - (len(pushes) - len(counted)))
        if not pushes or len(counted) < enough:
            return stays
        if len(pushes) < expected and state.now_s < (closes_s := self._closes_s(state, counted, enough)):
            return [*stays, Wake(closes_s)]
        return [*grant_all(state), Apply(pushes), *map(Release, there)]

    def _closes_s(self, state: State, counted: Sequence[Push], enough: int) -> float:
        """The time until which an update waits for more than these: `wait_s` after there were enough."""
        members = state.members
        ready_s = [members[w].ready_s for w, step in counted if w in members and members[w].step == step]
        known_s = sorted(at_s for at_s in ready_s if at_s is not None)
        first = enough - 1 - (len(counted) - len(known_s))  # those of workers that are gone were there before
        return known_s[first] + self.wait_s if 0 <= first < len(known_s) else state.now_s

    def _is_late(self, state: State, push: Push) -> bool:
        member = state.members[push[0]]
        return self.late == "drop" and push in state.pending and state.version - member.base > member.rests
