"""Batches with which all take equally long: against brute force, exactly the sum, within the bounds."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.batching.balance import CycleCost, shares, split


def longest_s(costs: list[CycleCost], batches: list[int] | list[float]) -> float:
    return max(cost.cycle_s(batch) for cost, batch in zip(costs, batches, strict=True))


def some_costs(luck: random.Random, workers: int, most: int) -> list[CycleCost]:
    made = []
    for _ in range(workers):
        low = luck.randint(0, most // 2)
        per_sample_s = luck.choice([0.01, 0.02, 0.5, luck.uniform(0.001, 1.0), luck.lognormvariate(0, 2)])
        made.append(CycleCost(luck.choice([0.0, luck.uniform(0, 2)]), per_sample_s, low, luck.randint(low, most)))
    return made


def test_no_split_has_a_smaller_longest_cycle() -> None:
    """Every split of whole samples within the bounds is tried."""
    luck, compared = random.Random(1), 0
    for _ in range(1000):
        workers = luck.randint(1, 4)
        costs = some_costs(luck, workers, most=12)
        total = luck.randint(sum(c.least for c in costs), sum(c.most for c in costs))
        found = split(costs, total)
        ranges = [range(cost.least, cost.most + 1) for cost in costs[:-1]]
        tried = [
            longest_s(costs, [*others, total - sum(others)])
            for others in itertools.product(*ranges)
            if costs[-1].least <= total - sum(others) <= costs[-1].most
        ]
        assert sum(found) == total
        assert all(cost.least <= batch <= cost.most for cost, batch in zip(costs, found, strict=True))
        assert longest_s(costs, found) <= min(tried) * (1 + 1e-9)
        compared += len(tried)
    assert compared > 10_000, compared


def level_by_bisection(costs: list[CycleCost], total: float) -> float:
    """The time in which the workers get through `total` samples, each within its bounds."""
    low, high = 0.0, max(cost.cycle_s(cost.most) for cost in costs)
    for _ in range(200):
        middle = (low + high) / 2
        done = sum(min(c.most, max(c.least, (middle - c.fixed_s) / c.per_sample_s)) for c in costs)
        low, high = (middle, high) if done < total else (low, middle)
    return high


def test_shares_meet_the_closed_form_and_keep_to_their_bounds() -> None:
    luck = random.Random(2)
    for _ in range(500):
        costs = some_costs(luck, luck.randint(1, 12), most=400)
        total = luck.randint(sum(c.least for c in costs), sum(c.most for c in costs))
        found = shares(costs, total)
        assert sum(found) == pytest.approx(total)
        level_s = level_by_bisection(costs, total)
        for cost, share in zip(costs, found, strict=True):
            assert cost.least <= share <= cost.most
            expected = min(cost.most, max(cost.least, (level_s - cost.fixed_s) / cost.per_sample_s))
            assert share == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_closed_form_itself() -> None:
    """T* = (G + sum f/s) / sum 1/s, by hand: (90 + 10 + 20) / (100 + 50) = 0.8 s."""
    costs = [CycleCost(0.1, 0.01, 1, 1000), CycleCost(0.4, 0.02, 1, 1000)]
    assert shares(costs, 90) == pytest.approx([70, 20])
    assert [cost.cycle_s(b) for cost, b in zip(costs, shares(costs, 90), strict=True)] == pytest.approx([0.8, 0.8])


def test_a_remainder_goes_where_it_costs_least() -> None:
    """The slow one has the larger remainder, 0.6 of a sample to 0.4, but rounding it up would take longer."""
    costs = [CycleCost(0.0, 1.0, 0, 99), CycleCost(0.0, 10.0, 0, 99)]
    assert shares(costs, 17) == pytest.approx([15.4545, 1.5454], rel=1e-3)
    assert split(costs, 17) == [16, 1]


@pytest.mark.parametrize(("total", "expected"), [(0, [3, 2]), (5, [3, 2]), (19, [10, 9]), (100, [10, 9])])
def test_bounds_are_kept_before_the_sum_is(total: int, expected: list[int]) -> None:
    costs = [CycleCost(0.1, 1.0, 3, 10), CycleCost(5.0, 0.1, 2, 9)]
    assert split(costs, total) == expected
    assert shares(costs, total) == expected


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-12, 1e6), st.integers(0, 50)), min_size=1, max_size=20),
    st.integers(0, 100_000),
)
@example([(32768.0, 1e-12, 0)], 3)  # a share is the difference of two numbers that are 10^16 times as large
@settings(max_examples=150, derandomize=True)
def test_any_costs_give_exactly_the_sum(lines: list[tuple[float, float, int]], extra: int) -> None:
    costs = [CycleCost(fixed_s, per_sample_s, least, least + 100_000) for fixed_s, per_sample_s, least in lines]
    total = sum(cost.least for cost in costs) + extra
    found = split(costs, total)
    assert sum(found) == total
    assert all(cost.least <= batch <= cost.most for cost, batch in zip(costs, found, strict=True))
