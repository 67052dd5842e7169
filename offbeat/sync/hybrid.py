"""Two policies in two levels: one within groups of workers, another between the groups.

Whoever sits behind one switch may go in step, while groups far apart do not wait for each other; or groups take turns
on the server's link, since turns of very many workers make gradients old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.float_sum import add_up
from offbeat.short_name import short_name
from offbeat.sync.actions import Apply, Drop, Evict, Grant, Release, Remember, Wake
from offbeat.sync.events import Left
from offbeat.sync.hybrid_group import HybridGroup, begun, blamed, inner_member, still_true, stuck_in, told, without
from offbeat.sync.policy import Policy, StepsLocally, TakesTurns, check_workers, settle
from offbeat.sync.state import State, changed, observe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from offbeat.sync.actions import Action, Push
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import Member


@dataclass(frozen=True)
class Hierarchy:
    """The memory of `Hybrid`: the groups as the members of an outer state, and each group's part."""

    outer: State = field(default_factory=State)
    parts: Mapping[int, HybridGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class Hybrid:
    """Two policies in one: `inner` within each group of workers, `outer` between the groups.

    The inner policy sees the workers of its group alone. What it would apply is one contribution of the group, and the
    outer policy sees each group as one worker that has computed it. When the outer policy applies contributions of
    groups, there is one update with all that is in them; when it releases a group, those go on that the inner policy
    has released. If the inner policy applies more while the group's last contribution is under way, that joins the
    next one. A worker pushes when the inner policy lets it; if the outer one is `gated`, not before the group's turn.

    What is promised: where the inner policy makes one update of each step (`BSP`, `LocalSGD`), the outer bound holds
    between any two workers, since a group's step is that of its slowest worker. With any other inner policy the outer
    one counts contributions of groups, and nothing is promised about steps. The rate of an update is the product of
    the inner and the outer one. Who hangs is evicted, and only that worker, if the policy that waits for it evicts: the
    inner one within a group, the outer one when other groups wait. A worker that may not push or pull yet, because the
    outer policy withholds it or another group's contribution is still on its way, is not late: the inner policy sees
    that it may from a time that has not come, infinity.

    Args:
        inner: within a group.
        outer: between groups; not `LocalSGD`, since groups that step by themselves need parameters of their own.
        groups: ranks of each group, or the size of groups of neighbouring ranks. A worker that is not listed, since it
            joined later, is a group of its own.

    Raises:
        PlanError: if a part is no policy, or the groups cannot be.

    >>> from offbeat.sync import BSP, SSP
    >>> Hybrid(BSP(), SSP(bound=2), groups=4).bound
    2
    """

    inner: Policy
    outer: Policy
    groups: int | tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for name in ("inner", "outer"):
            part = getattr(self, name)
            if isinstance(part, type) or not callable(getattr(part, "decide", None)):
                raise PlanError(
                    f"Cannot use {short_name(part)} as a policy. Use an object, such as BSP() - at `plan.sync.{name}`."
                )
        if isinstance(self.outer, StepsLocally):
            raise PlanError(
                "Cannot use LocalSGD between groups: groups that step by themselves need parameters of their own, and "
                "a server holds one set. Use LocalSGD() for all workers, or BSP() as outer - at `plan.sync.outer`."
            )
        if isinstance(self.groups, int):
            if type(self.groups) is bool or self.groups < 1:
                raise PlanError(
                    f"Cannot make groups of {self.groups!r} workers: choose a whole number from 1 "
                    "- at `plan.sync.groups`."
                )
            return
        if not isinstance(self.groups, tuple) or not all(isinstance(group, tuple) for group in self.groups):
            raise PlanError(
                f"Cannot use groups {self.groups!r}: write a size, or a tuple of tuples of ranks, such as "
                "((0, 1), (2, 3)) - at `plan.sync.groups`."
            )
        ranks = [rank for group in self.groups for rank in group]
        if not self.groups or not all(self.groups):
            raise PlanError(
                f"Cannot use groups {self.groups!r}: name at least one rank in each - at `plan.sync.groups`."
            )
        if any(type(rank) is not int for rank in ranks) or len(set(ranks)) < len(ranks) or min(ranks) < 0:
            raise PlanError(
                f"Cannot use groups {self.groups!r}: name each rank once, counting from 0 - at `plan.sync.groups`."
            )

    @property
    def replicated(self) -> bool:
        return False

    @property
    def bound(self) -> int | None:
        return self.outer.bound if self.inner.replicated else None

    @property
    def drops(self) -> bool:
        return self.inner.drops or self.outer.drops

    @property
    def gated(self) -> bool:
        return self.inner.gated or self.outer.gated

    def slots_over(self, hosts: int) -> int | None:
        """Ask the outer policy: a turn is one of a group."""
        return self.outer.slots_over(hosts) if isinstance(self.outer, TakesTurns) else None

    def check_workers(self, groups: Sequence[Sequence[int]], path: str, what: str) -> None:
        """Refuse groups that cannot be made of these workers, and what the two policies refuse."""
        there = max(map(len, groups))
        if isinstance(self.groups, int):
            if self.groups > there:
                raise PlanError(
                    f"Cannot make groups of {self.groups} with {there} {what}: not even one would be whole. Choose "
                    f"from 1 to {there}, or {short_name(self.inner)} alone - at `{path}.groups`."
                )
        elif missing := {rank for group in self.groups for rank in group}.difference(*groups):
            raise PlanError(
                f"Cannot use groups {self.groups!r} with {sum(map(len, groups))} {what}: there is no {min(missing)} "
                f"among them, counting from 0 - at `{path}.groups`."
            )
        within: list[list[int]] = []
        between: list[list[int]] = []
        for members in groups:
            own: dict[int, list[int]] = {}
            for rank in members:
                own.setdefault(self.group_of(rank), []).append(rank)
            within += own.values()
            between.append(list(own))
        check_workers(self.inner, within, f"{path}.inner", "workers in the largest group")
        check_workers(self.outer, between, f"{path}.outer", "groups")

    def contributes(self, step: int) -> Contributes:
        """Ask the inner policy."""
        return self.inner.contributes(step)

    def group_of(self, rank: int) -> int:
        """The group that a worker is in."""
        if isinstance(self.groups, int):
            return rank // self.groups
        return next((i for i, group in enumerate(self.groups) if rank in group), len(self.groups) + rank)

    def decide(self, state: State) -> Sequence[Action]:
        """Ask the inner policy about each group, and the outer one about the groups."""
        before = state.memory if isinstance(state.memory, Hierarchy) else Hierarchy()
        groups = self._members_of_groups(state)
        parts = {group: still_true(before.parts.get(group, HybridGroup()), state, groups[group]) for group in groups}
        pending = self._not_taken(parts, state)
        actions: list[Action] = []
        for group, members in groups.items():
            parts[group], said = self._inside(parts[group], state, members, pending[group], stuck_in(state, members))
            actions += said
        if any(isinstance(action, Evict) for action in actions):
            return [*actions, Remember(Hierarchy(before.outer, parts))]  # to be asked again without them
        outer, said = self._between(before.outer, parts, state, groups)
        actions += said
        if any(isinstance(action, Evict) for action in said):
            return [*actions, Remember(Hierarchy(outer, parts))]
        for part in parts.values():
            actions += [Release(worker) for worker in sorted(part.passed) if self._may_go(part, state, worker)]
        wakes_s = [outer.wake_s, *(part.wake_s for part in parts.values())]
        wake_s = min((wake_s for wake_s in wakes_s if wake_s is not None), default=float("inf"))
        if wake_s < (float("inf") if state.wake_s is None else state.wake_s):
            actions.append(Wake(wake_s))
        after = Hierarchy(outer, parts)
        return actions if after == before and state.memory is not None else [*actions, Remember(after)]

    def _members_of_groups(self, state: State) -> dict[int, dict[int, Member]]:
        """The members of each group that has members."""
        groups: dict[int, dict[int, Member]] = {}
        for worker, member in sorted(state.members.items()):
            groups.setdefault(self.group_of(worker), {})[worker] = member
        return groups

    def _away(self, state: State, groups: Mapping[int, object]) -> dict[int, float]:
        """Groups of which everyone has stepped out, with their weight: a round between groups keeps its size, too."""
        away: dict[int, float] = {}
        for worker, weight in state.away.items():
            group = self.group_of(worker)
            if group not in groups:
                away[group] = away.get(group, 0.0) + weight
        return away

    def _not_taken(self, parts: Mapping[int, HybridGroup], state: State) -> dict[int, dict[Push, float]]:
        """Pending contributions of each group that its inner policy has not decided about."""
        taken = {push for part in parts.values() for apply in (*part.forming, *part.sent) for push in apply.pushes}
        pending: dict[int, dict[Push, float]] = {group: {} for group in parts}
        for push, weight in state.pending.items():
            if push not in taken and parts:
                group = self.group_of(push[0])
                # What a group that is gone has left behind is brought by another.
                pending[group if group in parts else min(parts)][push] = weight
        return pending

    # -- within a group ------------------------------------------------------------------------------------------

    def _inside(
        self,
        part: HybridGroup,
        state: State,
        members: Mapping[int, Member],
        pending: Mapping[Push, float],
        stuck: frozenset[int],
    ) -> tuple[HybridGroup, list[Action]]:
        """Let the inner policy decide, and return the actions that take effect at once."""
        due = part.wake_s is not None and part.wake_s <= state.now_s
        if part.members == members and part.pending == pending and part.stuck == stuck and not due:
            return part, []  # it has nothing more to say
        if part.stuck - stuck:
            part = changed(part, freed_s=state.now_s)
        view, said = settle(
            self.inner,
            State(
                members={worker: inner_member(part, worker, member, stuck) for worker, member in members.items()},
                pending=pending,
                version=part.version,
                now_s=state.now_s,
                wake_s=None if due else part.wake_s,
                memory=part.memory,
                hosts=state.hosts,
            ),
        )
        actions: list[Action] = []
        asked, passed, forming = set(part.asked), set(part.passed), list(part.forming)
        for action in said:
            match action:
                case Grant(worker=worker) if self.outer.gated:
                    asked.add(worker)
                case Apply():
                    forming.append(action)
                case Release(worker=worker):
                    passed.add(worker)
                case Grant() | Drop() | Evict():
                    actions.append(action)
        here = view.members.keys()  # without those it evicts
        part = changed(
            part, asked=frozenset(asked & here), passed=frozenset(passed & here), forming=tuple(forming),
            version=view.version, bases={worker: member.base for worker, member in view.members.items()},
            wake_s=view.wake_s, memory=view.memory, members=members, pending=pending, stuck=stuck,
        )  # fmt: skip
        return part, actions

    def _may_go(self, part: HybridGroup, state: State, worker: int) -> bool:
        push = (worker, state.members[worker].step)
        if push in part.crew:
            if part.bare and self.bound is not None:
                # What others have brought, or it has, is not in the update that it waits for.
                return part.let_go and state.members[worker].pace + 1 - state.slowest_but(worker) <= self.bound
            return part.let_go
        # Who brought nothing now may go, but for the promise: that is between the groups.
        return not self.inner.replicated and not any(push in apply.pushes for apply in part.forming)

    # -- between the groups --------------------------------------------------------------------------------------

    def _between(
        self, outer: State, parts: dict[int, HybridGroup], state: State, groups: Mapping[int, Mapping[int, Member]]
    ) -> tuple[State, list[Action]]:
        """Let the outer policy decide, and return its actions on workers; `parts` is brought up to date."""
        due = outer.wake_s is not None and outer.wake_s <= state.now_s
        outer = changed(outer, now_s=state.now_s, wake_s=None if due else outer.wake_s)
        for group in outer.members.keys() - groups.keys():
            outer = without(observe(outer, Left(group, state.now_s)), group)
        outer = changed(outer, away=self._away(state, groups), hosts=state.hosts)
        for group, members in groups.items():
            if group not in outer.members:
                outer, parts[group] = begun(outer, group, parts[group], members)
            outer, parts[group] = told(outer, group, parts[group], state, members, steps=self.inner.replicated)
        before, weights = outer, outer.pending
        outer, said = settle(self.outer, outer)
        if late := [action.worker for action in said if isinstance(action, Evict)]:
            return _blame(before, late, parts, groups)
        actions: list[Action] = []
        for action in said:
            match action:
                case Grant(worker=group) if self.outer.gated:
                    part = parts[group]
                    sent = {push for apply in part.sent for push in apply.pushes}
                    go = [worker for worker in sorted(part.asked) if (worker, state.members[worker].step) in sent]
                    actions += map(Grant, go)
                    parts[group] = changed(part, asked=part.asked.difference(go))
                case Apply(pushes=pushes, rate=rate, in_order=in_order):
                    all_sent = [(weights[push], parts.get(push[0], HybridGroup()).sent) for push in pushes]
                    whole = tuple(sorted(push for _, sent in all_sent for apply in sent for push in apply.pushes))
                    if whole:
                        actions.append(Apply(whole, rate * _mean_rate(all_sent), in_order))
                    parts.update({push[0]: changed(parts[push[0]], sent=()) for push in pushes})
                case Drop(pushes=pushes):
                    gone = tuple(sorted(p for push in pushes for apply in parts[push[0]].sent for p in apply.pushes))
                    if gone:
                        actions.append(Drop(gone))
                    parts.update({push[0]: changed(parts[push[0]], sent=()) for push in pushes})
                case Release(worker=group):
                    parts[group] = changed(parts[group], let_go=True)
        return outer, actions


def _blame(
    outer: State, late: Iterable[int], parts: Mapping[int, HybridGroup], groups: Mapping[int, Mapping[int, Member]]
) -> tuple[State, list[Action]]:
    """Evict those whom late groups wait for, instead of whole groups; what else was decided is decided again then."""
    actions: list[Action] = []
    members = dict(outer.members)
    for group in late:
        actions += map(Evict, blamed(parts[group], groups[group]))
        released_s = None if members[group].released_s is None else outer.now_s
        members[group] = changed(members[group], since_s=outer.now_s, released_s=released_s)
    return changed(outer, members=members), actions


def _mean_rate(sent: Iterable[tuple[float, tuple[Apply, ...]]]) -> float:
    """The rate of several groups' contributions: each the sum of its inner updates' rates, weighted by samples."""
    rates = [(weight, add_up(apply.rate for apply in applies)) for weight, applies in sent if applies]
    total = add_up(weight for weight, _ in rates)
    return add_up(weight * rate for weight, rate in rates) / total if total else 1.0
