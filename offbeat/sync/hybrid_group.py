"""One group of a `Hybrid`: as the inner policy sees its workers, and as the outer policy sees the group.

Between the two stands its `HybridGroup`: what the inner policy has decided and the outer has not confirmed. The inner
policy sees each worker further than it is, as if all that it decided had happened. The outer policy sees the group as
one member: it is ready once the inner policy would apply something (where the group goes in step, once all would go
on), it has pushed once all contributions are there, and pulled once nobody of it pulls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.sync.actions import Apply
from offbeat.sync.events import Joined, Pulled, Pushed, Ready
from offbeat.sync.state import State, changed, observe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat.sync.actions import Push
    from offbeat.sync.state import Member

_NOT_YET_S = float("inf")  # since when a worker may do what the outer policy withholds


@dataclass(frozen=True)
class HybridGroup:
    """One group: what the inner policy has decided and the outer has not confirmed.

    Args:
        version: updates that the inner policy has decided.
        bases: the inner version that each worker computes on.
        asked: workers that may push as far as the inner policy goes.
        passed: workers that may go on as far as the inner policy goes.
        forming: inner updates that will make the group's next contribution.
        sent: those of the contribution that the outer policy knows of, until it is applied or dropped.
        crew: the workers' contributions whose turn it is, until they have pulled.
        bare: those of them that are not in it: another policy has applied them before.
        number: of the group's contribution that `crew` makes.
        whole: whether all of `crew` has arrived.
        let_go: whether the outer policy has released `crew`.
        freed_s: when a worker stopped waiting for what another group was to bring; its pull counts from then on.
        wake_s, memory: the inner policy's.
        members, pending, stuck: what the inner policy was asked about last.
    """

    version: int = 0
    bases: Mapping[int, int] = field(default_factory=dict)
    asked: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()
    forming: tuple[Apply, ...] = ()
    sent: tuple[Apply, ...] = ()
    crew: tuple[Push, ...] = ()
    bare: frozenset[Push] = frozenset()
    number: int = 0
    whole: bool = False
    let_go: bool = False
    freed_s: float = 0.0
    wake_s: float | None = None
    memory: object = None
    members: Mapping[int, Member] = field(default_factory=dict, repr=False)
    pending: Mapping[Push, float] = field(default_factory=dict, repr=False)
    stuck: frozenset[int] = field(default=frozenset(), repr=False)


def told(
    outer: State, group: int, part: HybridGroup, state: State, members: Mapping[int, Member], *, steps: bool
) -> tuple[State, HybridGroup]:
    """The outer state with what has happened to one group.

    Args:
        steps: whether the group goes in step, so that its step is that of its slowest worker.
    """
    now_s = outer.now_s
    if part.crew and not part.whole and all(_has_arrived(push, members) for push in part.crew):
        part = changed(part, whole=True)
        outer = observe(outer, Pushed(group, part.number, now_s))
    if part.whole and part.let_go and not any(_is_on_its_way(push, part, members) for push in part.crew):
        part = changed(part, crew=(), whole=False, let_go=False)
        outer = observe(outer, Pulled(group, now_s))
    outer = _pulling(outer, group, part, members)
    if steps:
        outer, part = _in_step(outer, group, part, state, members)
    member = outer.members[group]
    if part.crew:
        return outer, part
    crew = {push for apply in part.forming for push in apply.pushes}
    if steps:
        last = {worker: m for worker, m in members.items() if m.pace == member.pace}
        done = all(_has_brought(worker, part, state) for worker in last)
        crew = {(worker, m.step) for worker, m in last.items() if done and worker in part.passed}
    if crew:
        bare = frozenset(crew - {push for apply in part.forming for push in apply.pushes})
        part = changed(part, crew=tuple(sorted(crew)), bare=bare, number=member.step, sent=part.forming, forming=())
        outer = observe(outer, Ready(group, member.step, now_s, State(members).weight))
    return outer, part


def begun(outer: State, group: int, part: HybridGroup, members: Mapping[int, Member]) -> tuple[State, HybridGroup]:
    """The outer state with a new group, some of which may be pulling because another policy has released them."""
    outer = observe(outer, Joined(group, outer.now_s))
    pulling = tuple((worker, m.step - 1) for worker, m in members.items() if m.released_s is not None)
    if not pulling:
        return outer, part
    member = changed(outer.members[group], released_s=outer.now_s)
    part = changed(part, crew=pulling, number=member.step - 1, let_go=True)
    return changed(outer, members={**outer.members, group: member}), part


def _has_brought(worker: int, part: HybridGroup, state: State) -> bool:
    """Whether the inner policy waits for nothing more from this worker than that it arrives."""
    member = state.members[worker]
    return worker in part.passed or (member.held and (worker, member.step) not in state.pending)


def _in_step(
    outer: State, group: int, part: HybridGroup, state: State, members: Mapping[int, Member]
) -> tuple[State, HybridGroup]:
    """Compare a group with others by its slowest worker.

    If somebody has joined who is as far behind as those that wait for the outer policy, the group is not ready yet.
    """
    member = outer.members[group]
    if member.held and not all(
        _has_brought(worker, part, state)
        for worker, m in members.items()
        if m.pace <= member.pace and (worker, m.step) not in part.crew
    ):
        part = changed(part, forming=(*part.sent, *part.forming), sent=(), crew=(), whole=False)
        # Its contribution gets another number when it comes, so that no number is ever used twice.
        outer = without(outer, group)
        member = changed(member, step=member.step + 1, ready_s=None, granted_s=None, arrived=False)
    ahead = member.ahead if member.held else member.step - min(m.pace for m in members.values())
    # A group leaves out what all of its workers leave out.
    rests = max(0, member.step - ahead - max(m.pace - m.rests for m in members.values()))
    member = changed(member, ahead=ahead, rests=rests, clock=min(m.brought for m in members.values()) + ahead)
    return changed(outer, members={**outer.members, group: member}), part


def _pulling(outer: State, group: int, part: HybridGroup, members: Mapping[int, Member]) -> State:
    """Note the time since when a released group pulls: a group of another level may withhold it."""
    member = outer.members[group]
    if member.released_s is None:
        return outer
    withheld = any(worker in members and members[worker].released_s == _NOT_YET_S for worker, _ in part.crew)
    if withheld == (member.released_s == _NOT_YET_S):
        return outer
    member = changed(member, released_s=_NOT_YET_S if withheld else outer.now_s)
    return changed(outer, members={**outer.members, group: member})


def still_true(part: HybridGroup, state: State, members: Mapping[int, Member]) -> HybridGroup:
    """Remove what workers that are gone, or have come back, had a part in."""
    if not (part.asked or part.passed or part.forming or part.sent):
        return part
    held = {worker: member for worker, member in members.items() if member.held}
    return changed(
        part, asked=frozenset(worker for worker in part.asked & held.keys() if held[worker].granted_s is None),
        passed=part.passed & held.keys(), forming=_still_pending(part.forming, state),
        sent=_still_pending(part.sent, state),
    )  # fmt: skip


def _still_pending(applies: Iterable[Apply], state: State) -> tuple[Apply, ...]:
    left = []
    for apply in applies:
        pushes = tuple(push for push in apply.pushes if push in state.pending)
        if pushes:
            left.append(apply if pushes == apply.pushes else Apply(pushes, apply.rate, apply.in_order))
    return tuple(left)


def inner_member(part: HybridGroup, worker: int, member: Member, stuck: frozenset[int]) -> Member:
    """A worker as the inner policy sees it: it knows nothing of what the outer one withholds, but that it may last."""
    base = part.bases.get(worker, part.version)
    if worker in part.passed:
        return member.released(_NOT_YET_S, base)
    granted_s = _NOT_YET_S if member.granted_s is None and worker in part.asked else member.granted_s
    released_s = member.released_s
    if released_s is not None:
        released_s = _NOT_YET_S if worker in stuck else max(released_s, part.freed_s)
    # Whose turn it is within a group may not push before the group's.
    return changed(member, granted_s=granted_s, released_s=released_s, base=base, pushes_early=False)


def stuck_in(state: State, members: Mapping[int, Member]) -> frozenset[int]:
    """Workers of a group that pull, and may wait for what other groups are still to bring."""
    late_s = [m.released_s for worker, m in state.members.items() if worker not in members and m.owes]
    first_s = min((at_s for at_s in late_s if at_s is not None), default=_NOT_YET_S)
    return frozenset(
        worker for worker, m in members.items() if m.released_s is not None and not m.owes and first_s <= m.released_s
    )


def _has_arrived(push: Push, members: Mapping[int, Member]) -> bool:
    return push[0] not in members or members[push[0]].clock > push[1]


def _is_on_its_way(push: Push, part: HybridGroup, members: Mapping[int, Member]) -> bool:
    """Whether the worker of this contribution is pulling, or about to."""
    member = members.get(push[0])
    if member is None or member.step > push[1] + 1:
        return False
    return push[0] in part.passed if member.step == push[1] else member.released_s is not None


def blamed(part: HybridGroup, members: Mapping[int, Member]) -> list[int]:
    """List the workers that a group which takes too long waits for."""
    crew = [push for push in part.crew if push[0] in members]
    late = [worker for worker, clock in crew if members[worker].clock <= clock]
    late = late or [worker for worker, _ in crew if members[worker].released_s is not None]
    return late or [worker for worker, member in members.items() if not member.held or member.owes]


def without(outer: State, group: int) -> State:
    """No contribution of a group outlives it: the workers' own are still pending, and are brought again."""
    return changed(outer, pending={push: weight for push, weight in outer.pending.items() if push[0] != group})
