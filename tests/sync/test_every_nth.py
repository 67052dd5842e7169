"""A worker that is too slow for every round takes part in every m-th one, and nobody waits for it between."""

from __future__ import annotations

import pytest

from offbeat.sync import BSP, DSSP, SSP, Apply, Drop, Hybrid, KSync, Member, Policy, RoundRobin, State, TakesEveryNth
from offbeat.sync.state import observe
from tests.sync.simulated_link import Server

EVERY, WORLD, ROUNDS = 4, 4, 100
POLICIES: list[Policy] = [
    BSP(),
    SSP(bound=0),
    DSSP(low=0, high=0),
    KSync(k=WORLD, late="carry"),
    KSync(k=WORLD),
    RoundRobin(warmup=2),
    RoundRobin(strict=True, warmup=2),
    Hybrid(BSP(), BSP(), groups=2),
    Hybrid(BSP(), SSP(bound=0), groups=((0, 1, 2), (3,))),
]


def last_is_slow(worker: int, step: int) -> float:
    return EVERY - 0.2 if worker == WORLD - 1 else 1.0


def played(policy: Policy, every: int) -> Server:
    server = Server(policy, last_is_slow, WORLD, 0.001)
    server.run(0)
    server.pace(WORLD - 1, every)
    return server.run(ROUNDS * (WORLD - 1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_nobody_waits_for_it_between(policy: Policy) -> None:
    slow, paced = played(policy, 1), played(policy, EVERY)
    seconds = paced.now_s / paced.state.members[0].step
    assert seconds == pytest.approx(1.0, abs=0.15), "a round takes as long as the others do"
    if not isinstance(policy, RoundRobin) or policy.strict:
        assert slow.now_s / slow.state.members[0].step > 3, "and would take as long as the slow one"
    brought = paced.state.members[WORLD - 1].clock
    assert brought == pytest.approx(paced.state.members[0].clock / EVERY, abs=2)


@pytest.mark.parametrize(
    "policy", [BSP(), RoundRobin(strict=True), Hybrid(BSP(), BSP(), groups=((0, 1, 2), (3,)))], ids=str
)
def test_each_round_is_whole(policy: Policy) -> None:
    """Its weight counts in its own rounds only, so that the others' learning rate does not shrink between."""
    server = played(policy, EVERY)
    rates = [a.rate for _, actions in server.log[20 * WORLD :] for a in actions if isinstance(a, Apply)]
    shares = {1 / 3, 1 / 4} if isinstance(policy, RoundRobin) else {1.0}
    assert set(rates) == shares


def test_a_round_without_it_is_applied_as_it_is_to_the_bit() -> None:
    weights = (0.1, 1.1, 0.3)
    members = {w: Member(weight=weight, ready_s=0.0, granted_s=0.0, arrived=True) for w, weight in enumerate(weights)}
    state = State({**members, 3: Member(ahead=-2, rests=2)}, {(w, 0): weight for w, weight in enumerate(weights)})
    assert state.share(*state.pending) < 1, "by rounding"
    assert BSP().decide(state)[0] == Apply(((0, 0), (1, 0), (2, 0)), rate=1.0)


def test_who_takes_part_seldom_is_not_late_for_it() -> None:
    """Others make updates in the rounds that it leaves out. If dropped, it would be ahead, and be waited for."""
    server = played(KSync(k=WORLD), EVERY)
    dropped = [push for _, actions in server.log for a in actions if isinstance(a, Drop) for push in a.pushes]
    applied = [push for _, actions in server.log for a in actions if isinstance(a, Apply) for push in a.pushes]
    assert not dropped
    assert sum(worker == WORLD - 1 for worker, _ in applied) >= ROUNDS // EVERY - 3
    hasty = Server(KSync(k=2), last_is_slow, WORLD, 0.001).run(ROUNDS)
    assert any(Drop(((WORLD - 1, 0),)) in actions for _, actions in hasty.log), "who is just slow is"


def test_who_is_off_and_who_is_not() -> None:
    state = State({0: Member(step=5, clock=5), 1: Member(step=3, clock=3, ahead=-4, rests=3)})
    assert [m.pace for m in state.members.values()] == [5, 7]
    off = [state.members[1].is_off(low) for low in range(3, 9)]
    assert off == [False, True, True, True, False, False]
    assert observe(state, TakesEveryNth(0, 3, 1.0)).members[0].every == 3
    assert observe(state, TakesEveryNth(9, 3, 1.0)).members == state.members
