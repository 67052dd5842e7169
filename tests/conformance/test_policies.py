"""Every policy in thousands of interleavings, and proof that the check finds what it looks for."""

from __future__ import annotations

import cProfile
import gc
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, Policy, RoundRobin
from offbeat.testing import check_policy
from tests.conformance.broken_policies import ROGUES, ForgetsToWake, OneTooFar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

QUICK, STRICT = RoundRobin(warmup=2), RoundRobin(strict=True, warmup=2)

POLICIES: list[tuple[Policy, int]] = [
    (BSP(), 300),
    (ASP(), 150),
    (SSP(bound=0), 150),
    (SSP(bound=3), 150),
    (DSSP(low=1, high=4), 150),
    (KSync(k=2), 150),
    (KSync(k=3, late="carry"), 150),
    (KSync(k=2, wait_s=1.0), 60),
    (KSync(k=1, late="carry", wait_s=0.5), 60),
    (LocalSGD(every=4), 150),
    (LocalSGD(every=4, delay=1, fragments=2), 30),
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
    (Hybrid(KSync(k=1, wait_s=0.5), KSync(k=1, wait_s=1.0), groups=2), 20),
    (Hybrid(QUICK, QUICK, groups=2), 30),
    (Hybrid(Hybrid(BSP(), SSP(bound=1), groups=1), BSP(), groups=2), 10),
]


FOR_LONG = [(BSP(), 15_000), *((policy, 10 * interleavings) for policy, interleavings in POLICIES[1:])]


def evicts(policy: Policy, quantify: Callable[[Iterable[bool]], bool] = all) -> bool:
    """Whether no worker that hangs can hang the others; with `any`, whether some cannot."""
    if isinstance(policy, Hybrid):
        return quantify(evicts(one, quantify) for one in (policy.inner, policy.outer))
    return isinstance(policy, RoundRobin)


@pytest.mark.parametrize(("policy", "interleavings"), POLICIES, ids=lambda value: str(value))
def test_policies_keep_their_promises(policy: Policy, interleavings: int) -> None:
    played = check_policy(policy, interleavings=interleavings, evicts=evicts(policy))
    assert played["interleavings"] == interleavings
    assert (played["evictions"] > 0) == evicts(policy, any)
    assert min(played["swaps"], played["memory lost"], played["asked twice"], played["applied"]) > 0
    assert (played["granted early"] > 0) == isinstance(policy, RoundRobin)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "interleavings"), FOR_LONG, ids=lambda value: str(value))
def test_policies_keep_their_promises_for_long(policy: Policy, interleavings: int) -> None:
    check_policy(policy, interleavings=interleavings, seed=2_000_000, evicts=evicts(policy))


@pytest.mark.parametrize("policy", [policy for policy, _ in POLICIES], ids=str)
def test_any_policy_takes_over_from_any_other_and_gives_back(policy: Policy) -> None:
    others = [other for other, _ in POLICIES if not isinstance(other, Hybrid) or not isinstance(policy, Hybrid)]
    played = check_policy(policy, interleavings=40, seed=3_000_000, evicts=evicts(policy), others=others)
    assert played["swaps"] >= 20


@pytest.mark.parametrize("world", [1, 2, 9])
@pytest.mark.parametrize("policy", [BSP(), SSP(bound=1), KSync(k=2), QUICK, STRICT], ids=str)
def test_in_worlds_of_other_sizes(policy: Policy, world: int) -> None:
    check_policy(policy, world=world, interleavings=15, seed=1_000_000, evicts=evicts(policy))


@pytest.mark.slow
def test_every_fault_fires() -> None:
    """Where a policy lets a worker go on at once it is never in some phases; two policies together show all."""
    played = Counter(check_policy(BSP(), interleavings=300)) + Counter(check_policy(QUICK, interleavings=150))
    phases = ("computing", "held", "pushing", "pushed", "pulling")
    fired = {fault: played[fault] for fault in [f"crash while {phase}" for phase in phases]}
    fired |= {f"hang while {phase}": played[f"hang while {phase}"] for phase in ("computing", "pushing", "pulling")}
    fired |= {fate: played[fate] for fate in ("applied", "dropped", "lost", "pending", "joins", "evictions", "paced")}
    assert all(fired.values()), fired


@pytest.mark.parametrize(
    ("policy", "says"), ROGUES, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_the_check_finds(policy: Policy, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_policy(policy, interleavings=800)


def test_the_check_finds_who_hangs() -> None:
    with pytest.raises(AssertionError, match="hangs and is not evicted"):
        check_policy(SSP(bound=1), interleavings=200, evicts=True)


def test_a_profiler_keeps_its_place() -> None:
    profile = cProfile.Profile()
    profile.enable()
    check_policy(ASP(), interleavings=20)
    calls = sum(entry.callcount for entry in profile.getstats())
    profile.disable()
    assert calls > 10_000


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


def test_the_collectors_clock_is_not_taken_for_the_policys() -> None:
    """As Hypothesis times it, in any function it happens to run in."""
    often, timed = gc.get_threshold(), list[float]()

    def times(_phase: str, _info: object) -> None:
        timed.append(time.perf_counter())

    gc.callbacks.append(times)
    gc.set_threshold(1)
    try:
        check_policy(SSP(bound=2), interleavings=1)
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(times)
    assert timed
    assert gc.isenabled()
