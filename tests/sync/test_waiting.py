"""How much waiting each policy saves, by order statistics: straggling workers, and a link that costs nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import PlanError
from offbeat.sync import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Apply,
    Drop,
    Grant,
    KSync,
    Left,
    Member,
    Policy,
    Pulled,
    Pushed,
    Ready,
    Release,
    Remember,
    State,
    on,
)
from offbeat.sync.dssp import Allowance
from tests.sync.simulated_link import Server

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 300


def stragglers(seed: int = 0) -> Callable[[int, int], float]:
    """With probability 0.15 a step takes longer, by between 0.5 and 2 times its mean."""
    rng = random.Random(seed)
    return lambda worker, step: 1.0 + (rng.uniform(0.5, 2.0) if rng.random() < 0.15 else 0.0)


@cache
def seconds(policy: Policy, world: int) -> float:
    """Of one contribution."""
    return Server(policy, stragglers(), world).run(STEPS * world).seconds_per_contribution(10 * world)


@pytest.mark.parametrize(("world", "ratio"), [(4, 1.30), (8, 1.55)])
def test_ssp_against_bsp(world: int, ratio: float) -> None:
    assert seconds(BSP(), world) / seconds(SSP(bound=8), world) >= ratio


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        # Seconds in parts of BSP's, from another simulation of the rule: bounds 0, 1, 2, 4, 8, none.
        (4, [1.00, 0.81, 0.78, 0.75, 0.74, 0.73]),
        (8, [1.00, 0.71, 0.66, 0.62, 0.61, 0.60]),
    ],
)
def test_what_each_step_of_slack_gives(world: int, expected: list[float]) -> None:
    policies = [*(SSP(bound=bound) for bound in (0, 1, 2, 4, 8)), ASP()]
    measured = [seconds(policy, world) / seconds(BSP(), world) for policy in policies]
    assert measured == pytest.approx(expected, abs=0.03)


def test_dssp_lies_between_its_bounds() -> None:
    low, between, high = (seconds(policy, 8) for policy in (SSP(bound=1), DSSP(low=1, high=8), SSP(bound=8)))
    assert high <= between <= 1.02 * low, "it gains little over its lower bound where stragglers come at random"


def test_dssp_gives_the_fastest_the_steps_after_which_it_waits_least() -> None:
    fast = Member(step=5, clock=6, ready_s=10.0, granted_s=10.0, arrived=True, last_ready_s=10.0, interval_s=1.0)
    slow = Member(step=5, clock=5, last_ready_s=8.0, interval_s=3.4)  # next at 11.4, 14.8
    state = State({0: fast, 1: slow}, now_s=10.0)
    # The fast one ends its next steps at 10, 11, 12, 13, 14 s: it waits 1.4, 0.4, 2.8, 1.8, 0.8 s.
    state, actions = on(DSSP(low=0, high=5), state, Pushed(0, 5, 10.0))
    assert actions == (Release(0), Remember(Allowance(until=((0, 6),))))
    state, actions = on(DSSP(low=0, high=5), on(ASP(), state, Pulled(0, 10.1))[0], Ready(0, 6, 11.0))
    assert actions == (Grant(0), Apply(((0, 6),), rate=0.5, in_order=False)), "it waits after one more step"
    state, actions = on(DSSP(low=0, high=5), state, Left(1, 12.0))
    assert actions == (Release(0), Remember(Allowance()))
    unknown = State({0: fast, 1: replace(slow, interval_s=None)}, now_s=10.0)
    assert on(DSSP(low=0, high=5), unknown, Pushed(0, 5, 10.0))[1] == (), "nothing is foreseen from one contribution"
    assert on(DSSP(low=1, high=1), unknown, Pushed(0, 5, 10.0))[1] == (Release(0),)


@pytest.mark.parametrize(("world", "k"), [(4, 3), (8, 6)])
def test_ksync_takes_about_as_long_as_the_kth_fastest(world: int, k: int) -> None:
    """With times that have no memory that is H(N) - H(N-k) of the mean, when a late worker's work is not lost."""

    def seconds_per_update(policy: Policy) -> float:
        rng = random.Random(0)
        server = Server(policy, lambda worker, step: rng.expovariate(1.0), world).run(STEPS * k)
        return server.now_s / server.state.version

    kth, last = sum(1 / (world - i) for i in range(k)), sum(1 / (world - i) for i in range(world))
    carry, drop = seconds_per_update(KSync(k=k, late="carry")), seconds_per_update(KSync(k=k))
    assert carry == pytest.approx(kth, rel=0.05)
    assert seconds_per_update(BSP()) == pytest.approx(last, rel=0.05)
    assert carry < drop < 0.75 * last, "who was late begins the next step late, but nobody waits for it"


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_ksync_drops_only_what_was_not_pushed(late: str) -> None:
    server = Server(KSync(k=3, late=late), stragglers(), 4).run(300)  # type: ignore[arg-type]
    actions = [action for _, actions in server.log for action in actions]
    assert {(len(a.pushes), a.rate) for a in actions if isinstance(a, Apply)} == {(3, 1.0)}
    dropped = {push for a in actions if isinstance(a, Drop) for push in a.pushes}
    if late == "drop":
        assert dropped
        assert set(server.staleness) == {0}, "every contribution was computed on the version before its update"
        grants = sum(isinstance(action, Grant) for action in actions)
        assert grants == len(server.staleness) + len(server.state.pending), "nobody pushed in vain"
    else:
        assert not dropped
        assert max(server.staleness) > 0


def test_ksync_waits_for_the_others_for_as_long_as_it_says() -> None:
    """Steps take 1 s, and worker 3's takes 1.4 s, but for two of 9 s."""
    slow = {4: 9.0, 5: 9.0}
    server = Server(KSync(k=3, wait_s=0.5), lambda worker, step: slow.get(step, 1.4) if worker == 3 else 1.0, 4)
    server.run(40)
    updates = [(event.at_s, len(a.pushes)) for event, actions in server.log for a in actions if isinstance(a, Apply)]
    took_s = [there_s - before_s for (before_s, _), (there_s, _) in pairwise([(0.0, 0), *updates])]
    assert [size for _, size in updates[:4]] == [4] * 4, "all are in time"
    assert took_s[:4] == pytest.approx([1.4] * 4, abs=0.05)
    late = [took for took, (_, size) in zip(took_s, updates, strict=True) if size == 3]
    assert late == pytest.approx([1.5] * len(late), abs=0.05), "0.5 s after the third"
    assert len(late) >= 6


@pytest.mark.parametrize("policy", [SSP(bound=2), ASP()], ids=str)
def test_updates_of_a_round_move_as_far_as_one_of_bsp(policy: Policy) -> None:
    server = Server(policy, stragglers(), 4).run(200)
    rates = [a.rate for _, actions in server.log for a in actions if isinstance(a, Apply)]
    assert rates[10:] == [0.25] * len(rates[10:])


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_ksync_asks_for_no_more_than_are_left(late: str) -> None:
    server = Server(KSync(k=3, late=late), stragglers(), 4).run(40)  # type: ignore[arg-type]
    before = len(server.log)
    for rank in (0, 2):
        server._lose(rank)
        server._tell(Left(rank, server.now_s))
    server.run(80)
    sizes = [len(a.pushes) for _, actions in server.log[before + 2 :] for a in actions if isinstance(a, Apply)]
    assert len(sizes) > 10
    assert set(sizes[1:]) == {2}


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: SSP(bound=-1), "plan.sync.bound"),
        (lambda: SSP(bound="4"), "plan.sync.bound"),  # type: ignore[arg-type]
        (lambda: DSSP(low=-1, high=2), "plan.sync.low"),
        (lambda: DSSP(low=3, high=2), "plan.sync.high"),
        (lambda: KSync(k=0), "plan.sync.k"),
        (lambda: KSync(k=2, late="keep"), "plan.sync.late"),  # type: ignore[arg-type]
        (lambda: KSync(k=2, wait_s=-1.0), "plan.sync.wait_s"),
    ],
)
def test_nonsense_is_refused_with_the_path(make: Callable[[], Policy], path: str) -> None:
    with pytest.raises(PlanError, match=f"at `{path}`"):
        make()
