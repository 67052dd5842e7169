"""Every policy in thousands of interleavings, and proof that the check finds what it looks for."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.sync import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Action,
    Apply,
    Contributes,
    Drop,
    Grant,
    Hybrid,
    KSync,
    LocalSGD,
    Policy,
    Release,
    Remember,
    RoundRobin,
    State,
    Wake,
)
from offbeat.testing import check_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

QUICK, STRICT = RoundRobin(warmup=2), RoundRobin(strict=True, warmup=2)

POLICIES: list[tuple[Policy, int]] = [
    (BSP(), 1500),
    (ASP(), 150),
    (SSP(bound=0), 150),
    (SSP(bound=3), 150),
    (DSSP(low=1, high=4), 150),
    (KSync(k=2), 150),
    (KSync(k=3, late="carry"), 150),
    (LocalSGD(every=4), 150),
    (QUICK, 150),
    (STRICT, 150),
    (RoundRobin(slots=2, warmup=1, lead=0, grace=0.0), 150),
    (RoundRobin(slots=3, strict=True), 150),
    (Hybrid(BSP(), BSP(), groups=2), 30),
    (Hybrid(BSP(), SSP(bound=1), groups=2), 30),
    (Hybrid(BSP(), DSSP(low=0, high=2), groups=((0, 3), (1, 2))), 30),
    (Hybrid(BSP(), SSP(bound=0), groups=((0, 1, 2), (3,))), 30),
    (Hybrid(BSP(), STRICT, groups=2), 30),
    (Hybrid(SSP(bound=1), ASP(), groups=2), 30),
    (Hybrid(KSync(k=1), KSync(k=1), groups=2), 30),
    (Hybrid(QUICK, QUICK, groups=2), 30),
    (Hybrid(Hybrid(BSP(), SSP(bound=1), groups=1), BSP(), groups=2), 10),
]


def evicts(policy: Policy) -> bool:
    """Whether no worker that hangs can hang the others."""
    if isinstance(policy, Hybrid):
        return evicts(policy.inner) and evicts(policy.outer)
    return isinstance(policy, RoundRobin)


@pytest.mark.parametrize(("policy", "interleavings"), POLICIES, ids=lambda value: str(value))
def test_policies_keep_their_promises(policy: Policy, interleavings: int) -> None:
    played = check_policy(policy, interleavings=interleavings, evicts=evicts(policy))
    assert played["interleavings"] == interleavings
    assert (played["evictions"] > 0) >= evicts(policy)
    assert min(played["swaps"], played["memory lost"], played["asked twice"], played["applied"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "interleavings"), POLICIES, ids=lambda value: str(value))
def test_policies_keep_their_promises_for_long(policy: Policy, interleavings: int) -> None:
    check_policy(policy, interleavings=10 * interleavings, seed=2_000_000, evicts=evicts(policy))


@pytest.mark.parametrize("policy", [policy for policy, _ in POLICIES], ids=str)
def test_any_policy_takes_over_from_any_other_and_gives_back(policy: Policy) -> None:
    others = [other for other, _ in POLICIES if not isinstance(other, Hybrid) or not isinstance(policy, Hybrid)]
    played = check_policy(policy, interleavings=40, seed=3_000_000, evicts=evicts(policy), others=others)
    assert played["swaps"] >= 20


@pytest.mark.parametrize("world", [1, 2, 9])
@pytest.mark.parametrize("policy", [BSP(), SSP(bound=1), KSync(k=2), QUICK, STRICT], ids=str)
def test_in_worlds_of_other_sizes(policy: Policy, world: int) -> None:
    check_policy(policy, world=world, interleavings=15, seed=1_000_000, evicts=evicts(policy))


def test_every_fault_fires() -> None:
    """Where a policy lets a worker go on at once it is never in some phases; two policies together show all."""
    played = Counter(check_policy(BSP(), interleavings=300)) + Counter(check_policy(QUICK, interleavings=150))
    phases = ("computing", "held", "pushing", "pushed", "pulling")
    fired = {fault: played[fault] for fault in [f"crash while {phase}" for phase in phases]}
    fired |= {f"hang while {phase}": played[f"hang while {phase}"] for phase in ("computing", "pushing", "pulling")}
    fired |= {fate: played[fate] for fate in ("applied", "dropped", "lost", "pending", "joins", "evictions", "paced")}
    assert all(fired.values()), fired


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

    said: dict[float, int] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.cycle(range(7)))

    def decide(self, state: State) -> Sequence[Action]:
        if state.now_s not in self.said:
            self.said.clear()
            self.said[state.now_s] = next(self.numbers)
        return [replace(a, rate=self.said[state.now_s] / 7) if isinstance(a, Apply) else a for a in ASP().decide(state)]


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
        applies = [Apply((push,)) for push in state.pending if push[0] in seen]
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
        return ASP().decide(state) or [Wake(state.now_s)]


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
class NoRate(Wrong):
    def decide(self, state: State) -> Sequence[Action]:
        return [replace(a, rate=float("nan")) if isinstance(a, Apply) else a for a in ASP().decide(state)]


def serve(state: State, worker: int) -> list[Action]:
    member, push = state.members[worker], (worker, state.members[worker].step)
    grants: list[Action] = [Grant(worker)] if member.granted_s is None else []
    applies: list[Action] = [Apply((push,))] if push in state.pending else []
    return [*grants, *applies, Release(worker)]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
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
        (NoRate(), "no sensible rate"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_check_finds(policy: Policy, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_policy(policy, interleavings=800)


def test_the_check_finds_who_hangs() -> None:
    with pytest.raises(AssertionError, match="hangs and is not evicted"):
        check_policy(SSP(bound=1), interleavings=200, evicts=True)


def test_waiting_for_a_second_is_no_fault() -> None:
    check_policy(ForgetsToWake(wakes=True), interleavings=100)


def test_a_failure_tells_the_story_and_how_to_play_it_again() -> None:
    with pytest.raises(AssertionError) as caught:
        check_policy(OneTooFar(), interleavings=200)
    first, second, *story = str(caught.value).splitlines()
    assert "is released for step" in first
    assert story[-1].startswith("  Pushed(") or story[-1].startswith("  Ready("), story
    seed = int(second.partition("seed=")[2].partition(")")[0])
    with pytest.raises(AssertionError) as again:
        check_policy(OneTooFar(), interleavings=1, seed=seed)
    assert str(again.value) == str(caught.value)
