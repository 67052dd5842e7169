"""A thousand swaps under load in virtual time, among policies of all kinds: each contribution counts once and fully."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from offbeat.control import Keep, Metrics, Swap
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, LocalSGD, Policy, RoundRobin
from tests.control.cluster import WORLD, play

# Without KSync, whose updates move the parameters by more than the samples in them are of a round.
POLICIES: tuple[Policy, ...] = (
    BSP(),
    ASP(),
    SSP(0),
    SSP(3),
    DSSP(1, 4),
    LocalSGD(4),
    RoundRobin(),
    RoundRobin(strict=True),
    Hybrid(BSP(), ASP(), groups=2),
)


class Restless:
    """Wants another policy whenever it is asked, and a while has passed."""

    policies, looks_back_s = POLICIES, 0.4

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def decide(self, metrics: Metrics) -> Keep | Swap:
        if metrics.held_s < self._chance.choice((0.01, 0.05, 0.3)):
            return Keep()
        return Swap(self._chance.choice([one for one in POLICIES if one != metrics.sync]), "for a change")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6)]])
def test_a_thousand_swaps_lose_nothing_and_count_nothing_twice(seed: int) -> None:
    played = play(BSP(), Restless(seed), steps=300, sigma=0.3)
    assert len(played.swaps) >= 1000
    kinds = Counter(type(sync).__name__ for _, sync, _ in played.swaps)
    assert kinds["LocalSGD"] > 10
    done = [push for _, pushes, _ in played.updates for push in pushes]
    assert len(done) == len(set(done)), "nothing counts twice"
    assert set(done) == set(played.read), "nothing is lost"
    numbers = {rank: sorted(number for worker, number in done if worker == rank) for rank in range(WORLD)}
    assert all(of_worker == list(range(len(of_worker))) for of_worker in numbers.values())
    ends_s = min(sum(steps_s) for steps_s in played.step_s)  # from then on rounds are smaller
    for at_s, pushes, rate in played.updates:
        if at_s < ends_s:
            assert WORLD * rate / len(pushes) == pytest.approx(1.0), (at_s, pushes, rate)
