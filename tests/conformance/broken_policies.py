"""Broken policies, and what `check_policy` says of each.

Each is right but for one thing. What a rogue says is what its author reads, so it has to name the mistake.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from offbeat.sync import (
    ASP,
    BSP,
    SSP,
    Action,
    Apply,
    Contributes,
    Drop,
    Evict,
    Grant,
    Member,
    Policy,
    Push,
    Release,
    Remember,
    State,
    Wake,
)
from offbeat.sync.bsp import grant_all

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Wrong:
    """ASP, but for what a subclass breaks."""

    bound: int | None = None
    replicated: bool = False
    drops: bool = False
    gated: bool = False

    def contributes(self, step: int) -> Contributes:
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        return ASP().decide(state)


@dataclass(frozen=True)
class Counts(Wrong):
    """Decides something else each time."""

    gated: bool = True
    calls: list[int] = field(default_factory=list)

    def decide(self, state: State) -> Sequence[Action]:
        self.calls.append(len(self.calls))
        return ASP().decide(state) if len(self.calls) % 2 else []


@dataclass(frozen=True)
class Mutates(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        actions = ASP().decide(state)
        for worker, member in state.members.items():
            state.members[worker] = replace(member, weight=1.0)  # type: ignore[index]
        return actions


@dataclass(frozen=True)
class Dreams(Wrong):
    """Knows something that is not in the state; asked again at once, it says the same."""

    def decide(self, state: State) -> Sequence[Action]:
        if state.now_s not in _DREAMT:
            _DREAMT.clear()
            _DREAMT[state.now_s] = next(_DREAMS)
        return [replace(a, rate=_DREAMT[state.now_s] / 7) if isinstance(a, Apply) else a for a in ASP().decide(state)]


_DREAMT: dict[float, int] = {}
_DREAMS = itertools.cycle(range(7))


@dataclass(frozen=True)
class NeedsMemory(Wrong):
    """Releases only whom it remembers to have seen."""

    gated: bool = True

    def decide(self, state: State) -> Sequence[Action]:
        seen = state.memory or frozenset()
        new = set(state.held) - seen
        if new:
            grants = [Grant(worker) for worker in new if state.members[worker].granted_s is None]
            return [*grants, Remember(seen | new)] if grants else []
        applies = [Apply((push,)) for push in sorted(state.pending) if push[0] in seen or push in state.orphans]
        return [*applies, *map(Release, state.held), *([Remember(frozenset())] if seen else [])]


@dataclass(frozen=True)
class Impatient(Wrong):
    """Applies what was not granted."""

    def decide(self, state: State) -> Sequence[Action]:
        return [Apply((push,)) for push in state.pending]


@dataclass(frozen=True)
class Twice(Wrong):
    """Uses a contribution two times."""

    def decide(self, state: State) -> Sequence[Action]:
        return [twin for a in ASP().decide(state) for twin in ([a, a] if isinstance(a, Apply) else [a])]


@dataclass(frozen=True)
class Loses(Wrong):
    """Lets a worker go on without its contribution."""

    def decide(self, state: State) -> Sequence[Action]:
        return [action for action in ASP().decide(state) if not isinstance(action, Apply)]


@dataclass(frozen=True)
class Endless(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return [*ASP().decide(state), Remember((state.memory or 0) + 1)]


@dataclass(frozen=True)
class DropsAll(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return [*(Drop((push,)) for push in state.pending), *map(Release, state.held)]


@dataclass(frozen=True)
class OneTooFar(Wrong):
    """SSP with a bound of 3 that promises 2."""

    bound: int | None = 2

    def decide(self, state: State) -> Sequence[Action]:
        return SSP(bound=3).decide(state)


@dataclass(frozen=True)
class TrustsWords(Wrong):
    """BSP that counts what is announced, but updates each block out of order and one by one."""

    bound: int | None = 0

    def decide(self, state: State) -> Sequence[Action]:
        out: list[Action] = []
        for action in BSP().decide(state):
            pushes = action.pushes if isinstance(action, Apply) else ()
            out += [Apply((push,), in_order=False) for push in pushes] or [action]
        return out


@dataclass(frozen=True)
class Starves(Wrong):
    """The one that has waited least is never served."""

    gated: bool = True

    def decide(self, state: State) -> Sequence[Action]:
        return [action for worker in state.held[:-1] for action in serve(state, worker)]


@dataclass(frozen=True)
class ForgetsToWake(Wrong):
    """Lets everyone wait for a second, but does not ask to be woken then."""

    gated: bool = True
    wakes: bool = False

    def decide(self, state: State) -> Sequence[Action]:
        due = {worker: (state.members[worker].ready_s or 0.0) + 1.0 for worker in state.held}
        actions = [a for worker, at_s in due.items() if state.now_s >= at_s for a in serve(state, worker)]
        later = [at_s for at_s in due.values() if state.now_s < at_s]
        return [*actions, *([Wake(min(later))] if later and self.wakes and not actions else [])]


@dataclass(frozen=True)
class NeverSleeps(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return ASP().decide(state) or [Wake(state.now_s + 0.001)]


@dataclass(frozen=True)
class WakesNever(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return ASP().decide(state) or [Wake(float("inf"))]


@dataclass(frozen=True)
class Fails(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return [Release(worker) for worker in state.memory["who"]]


@dataclass(frozen=True)
class Nonsense(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return ["release"] if state.held else []  # type: ignore[list-item]


@dataclass(frozen=True)
class Rates(Wrong):
    """Multiplies the learning rate by whatever it likes."""

    rate: float = -1.0

    def decide(self, state: State) -> Sequence[Action]:
        return [replace(a, rate=self.rate) if isinstance(a, Apply) else a for a in ASP().decide(state)]


@dataclass(frozen=True)
class TwiceAtOnce(Wrong):
    """Uses a contribution two times in one update."""

    def decide(self, state: State) -> Sequence[Action]:
        return [replace(a, pushes=a.pushes * 2) if isinstance(a, Apply) else a for a in ASP().decide(state)]


@dataclass(frozen=True)
class GrantsTwice(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return [twin for a in ASP().decide(state) for twin in ([a, a] if isinstance(a, Grant) else [a])]


@dataclass(frozen=True)
class ReleasesAll(Wrong):
    """BSP that also lets those go on that have brought nothing yet."""

    bound: int | None = 0

    def decide(self, state: State) -> Sequence[Action]:
        actions = BSP().decide(state)
        applied = any(isinstance(action, Apply) for action in actions)
        return (
            [*(a for a in actions if not isinstance(a, Release)), *map(Release, state.members)] if applied else actions
        )


@dataclass(frozen=True)
class ReleasesTooEarly(Wrong):
    """BSP that lets each worker go on once its own contribution is applied."""

    bound: int | None = 0

    def decide(self, state: State) -> Sequence[Action]:
        return ASP().decide(state)


@dataclass(frozen=True)
class BoundForTheFirst(Wrong):
    """SSP that does not see who joins later."""

    bound: int | None = 2

    def decide(self, state: State) -> Sequence[Action]:
        first = {worker: m for worker, m in state.members.items() if worker < 3 and m.steps_here == m.step}
        actions = ASP().decide(state)
        return [a for a in actions if not isinstance(a, Release) or self._may_go(state, first, a.worker)]

    def _may_go(self, state: State, first: dict[int, Member], worker: int) -> bool:
        brought = [m.brought for other, m in first.items() if other != worker]
        return state.members[worker].pace + 1 - min(brought, default=10**6) <= 2


@dataclass(frozen=True)
class BoundUntilSwapped(Wrong):
    """SSP that lets everyone go on who is held when it takes over."""

    bound: int | None = 1

    def decide(self, state: State) -> Sequence[Action]:
        rule = SSP(bound=1) if state.memory else ASP()
        return [*rule.decide(state), *([] if state.memory else [Remember(("it has begun", len(state.members)))])]


@dataclass(frozen=True)
class Replicates(Wrong):
    """Waits as BSP does, but makes an update of each contribution: a fabric that sums over all cannot do that."""

    bound: int | None = 0
    replicated: bool = True

    def decide(self, state: State) -> Sequence[Action]:
        return SSP(bound=0).decide(state)


@dataclass(frozen=True)
class ForgetsOrphans(Wrong):
    """Whatever is pending when it takes over, of workers that are gone, stays so."""

    def decide(self, state: State) -> Sequence[Action]:
        orphans = state.orphans
        return [a for a in ASP().decide(state) if not isinstance(a, Apply) or a.pushes[0] not in orphans]


@dataclass(frozen=True)
class DropsWhenAdopted(Wrong):
    """Begins by clearing the table."""

    def decide(self, state: State) -> Sequence[Action]:
        if state.memory is None:
            return [*([Drop(tuple(sorted(state.pending)))] if state.pending else []), Remember("cleared")]
        return ASP().decide(state)


@dataclass(frozen=True)
class ForgetsWhenAdopted(Wrong):
    """Serves those only that have come since it decides."""

    def decide(self, state: State) -> Sequence[Action]:
        if state.memory is None:
            return [Remember(frozenset(state.pending))]
        new = [
            action
            for action in ASP().decide(state)
            if not (isinstance(action, Apply) and set(action.pushes) & state.memory)
        ]
        return [
            a for a in new if not (isinstance(a, Release) and (a.worker, state.members[a.worker].step) in state.memory)
        ]


@dataclass(frozen=True)
class KeepsBooks(Wrong):
    """Halves the rate of the first eight contributions, which it counts by itself."""

    seen: set[Push] = field(default_factory=set, compare=False)

    def decide(self, state: State) -> Sequence[Action]:
        self.seen.update(state.pending)
        rate = 0.5 if len(self.seen) <= 8 else 1.0
        return [replace(a, rate=rate) if isinstance(a, Apply) else a for a in ASP().decide(state)]


@dataclass(frozen=True)
class ReadsTheClock(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return ASP().decide(state) if monotonic() > 0 else []


@dataclass(frozen=True)
class ReadsTheCalendar(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return ASP().decide(state) if datetime.now(UTC).year > 2000 else []


@dataclass(frozen=True)
class FirstComesFirst(Wrong):
    """Serves whoever stands first in the dictionary."""

    def decide(self, state: State) -> Sequence[Action]:
        applies = [Apply((push,), in_order=False) for push in state.pending]
        return [*grant_all(state), *applies, *map(Release, state.held)]


@dataclass(frozen=True)
class Scribbles(Wrong):
    """Remembers a list, and goes on writing into it."""

    def decide(self, state: State) -> Sequence[Action]:
        if state.memory is None:
            return [Remember([0])]
        state.memory[0] += 1
        return ASP().decide(state)


@dataclass(frozen=True)
class WakesInThePast(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return ASP().decide(state) or ([Wake(state.now_s - 1.0)] if state.wake_s is None else [])


@dataclass(frozen=True)
class EvictsWhoIsDone(Wrong):
    """Once half have brought what they have, evicts one of them instead of who is late."""

    bound: int | None = 0

    def decide(self, state: State) -> Sequence[Action]:
        done = [worker for worker in state.held if state.members[worker].arrived]
        return [Evict(done[0])] if len(done) >= 2 else BSP().decide(state)


@dataclass(frozen=True)
class EvictsWhoMayNotPush(Wrong):
    """Grants the first, and evicts the last of the queue because it has not pushed."""

    gated: bool = True

    def decide(self, state: State) -> Sequence[Action]:
        queue = [worker for worker in state.held if state.members[worker].granted_s is None]
        if len(queue) > 1:
            return [Evict(queue[-1])]
        return ASP().decide(state) if not any(m.is_pushing for m in state.members.values()) else []


@dataclass(frozen=True)
class EvictsWhoPulls(Wrong):
    """Takes a pull that waits for another's contribution for one that takes too long."""

    bound: int | None = 0

    def decide(self, state: State) -> Sequence[Action]:
        members = state.members.items()
        pulling = [worker for worker, m in members if m.released_s is not None and m.brought == m.pace]
        still = [worker for worker, m in members if m.released_s is not None and m.brought < m.pace]
        return [Evict(pulling[0])] if pulling and still else BSP().decide(state)


@dataclass(frozen=True)
class EvictsForNothing(Wrong):
    """Has no place for a fourth worker."""

    def decide(self, state: State) -> Sequence[Action]:
        fourth = [worker for worker, m in sorted(state.members.items()) if not m.held][3:4]
        return [*map(Evict, fourth)] or ASP().decide(state)


@dataclass(frozen=True)
class Contributing(Wrong):
    """Has workers contribute what it likes."""

    what: Any = None

    def contributes(self, step: int) -> Contributes:
        return self.what  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Undecided(Wrong):
    """Says something else each time it is asked what a worker contributes."""

    says: Any = field(default_factory=lambda: [None])

    def contributes(self, step: int) -> Contributes:
        if step:
            self.says.append("gradient" if self.says[-1] is None else None)
        return self.says[-1] if step else "gradient"


def serve(state: State, worker: int) -> list[Action]:
    member, push = state.members[worker], (worker, state.members[worker].step)
    grants: list[Action] = [Grant(worker)] if member.granted_s is None else []
    applies: list[Action] = [Apply((push,))] if push in state.pending else []
    return [*grants, *applies, Release(worker)]


ROGUES: list[tuple[Policy, str]] = [
    (Counts(), "is not pure"),
    (Mutates(), "changed the state"),
    (Dreams(), "knows more than the state"),
    (NeedsMemory(), "waits for ever: nothing is under way"),
    (Impatient(), "may not push"),
    (Twice(), "is not pending"),
    (Loses(), "is still pending"),
    (Endless(), "finds no end"),
    (DropsAll(), "does not say that it drops any"),
    (OneTooFar(), "breaks the bound of 2"),
    (TrustsWords(), "breaks the bound of 0"),
    (Starves(), "waits for ever: nothing is under way"),
    (ForgetsToWake(), "waits for ever: nothing is under way"),
    (ForgetsToWake(wakes=True, gated=False), "the policy is not gated"),
    (NeverSleeps(), "woke 100 times in a row"),
    (WakesNever(), "asked again at inf"),
    (Fails(), "it raised TypeError"),
    (Nonsense(), "'release' is no action"),
    (Rates(rate=float("nan")), "no sensible rate"),
    (Rates(rate=-0.5), "no sensible rate"),
    (Rates(rate=float("inf")), "no sensible rate"),
    (Rates(rate=1.5), "no sensible rate: each contribution is at most a whole round"),
    (TwiceAtOnce(), r"\(\d, \d\) is in it twice"),
    (GrantsTwice(), "it may push already"),
    (ReleasesAll(), "it is not held"),
    (ReleasesTooEarly(), "breaks the bound of 0"),
    (BoundForTheFirst(), "breaks the bound of 2"),
    (BoundUntilSwapped(), "breaks the bound of 1"),
    (Replicates(), "is made without worker"),
    (Wrong(replicated=True), "it is `replicated`, where every update holds one contribution of every worker"),
    (ForgetsOrphans(), "arrived whole before its worker left, but is still pending"),
    (DropsWhenAdopted(), "does not say that it drops any"),
    (ForgetsWhenAdopted(), "waits for ever: nothing is under way"),
    (KeepsBooks(), "it keeps something to itself"),
    (ReadsTheClock(), r"it asks time\.monotonic\(\) for the time"),
    (ReadsTheCalendar(), r"it asks datetime\.now\(\) for the time"),
    (FirstComesFirst(), "depends on the order of a dictionary"),
    (Scribbles(), "changed the state"),
    (WakesInThePast(), "it wants to be asked again at"),
    (EvictsWhoIsDone(), r"was pending, and it waits to be released"),
    (EvictsWhoMayNotPush(), "it waits until it may push"),
    (EvictsWhoPulls(), "it pulls, and the update it waits for waits for contribution"),
    (EvictsForNothing(), "nobody waits for it"),
    (Contributing(what="weights"), "contribute 'weights', which is none of"),
    (Contributing(what=None), "never has a worker contribute anything"),
    (Undecided(), "asked twice what a worker contributes"),
    (Wrong(bound=-1), "`bound` is -1, and has to be a whole number"),
    (Wrong(bound=True), "`bound` is True"),
    (Wrong(drops=None), "`drops` is None"),  # type: ignore[arg-type]
]
