"""Water-filling: parts by the rates of links, slow hosts as leaves, and a time close to what any method needs."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from offbeat.collective import Ring, WaterFilling, cost
from offbeat.collective.water_filling import owned_parts
from offbeat.errors import PlanError
from offbeat.topology import Topology
from tests.collective.networks import star


@pytest.mark.parametrize(
    ("rates", "parts"),
    [
        ([1], "1"),
        ([1, 9], "1/2 1/2"),
        ([1, 1, 1], "1/3 1/3 1/3"),
        ([200, 200, 200, 50], "1/3 1/3 1/3 0"),
        ([2, 1, 1, 1], "7/10 1/10 1/10 1/10"),
        ([4, 1, 1, 1], "1 0 0 0"),
    ],
)
def test_parts(rates: list[int], parts: str) -> None:
    assert " ".join(map(str, owned_parts([Fraction(rate) for rate in rates]))) == parts


def test_parts_of_any_rates_keep_all_links_busy_equally_long() -> None:
    draw = random.Random(0)
    for _ in range(300):
        rates = [Fraction(draw.randrange(10, 10_000)) for _ in range(draw.randrange(3, 20))]
        parts = owned_parts(rates)
        times = [(1 + part * (len(rates) - 2)) / rate for part, rate in zip(parts, rates, strict=True)]
        assert sum(parts) == 1
        assert len({time for time, part in zip(times, parts, strict=True) if part}) == 1
        least = max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))
        assert max(times) == least


@pytest.mark.parametrize(
    ("rates_mbps", "most"),
    [((200, 200, 200, 50), 1.04), ((*[200] * 7, 50), 1.04), ((200,) * 4, 1.01), ((200, 100, 100, 50, 400), 1.04)],
)
def test_time_is_close_to_what_any_method_needs(rates_mbps: tuple[float, ...], most: float) -> None:
    """With 40 us for each message. A ring takes 1.5 to 1.75 times as long where one link is slow."""
    network = star(*rates_mbps)
    least_s = network.allreduce_bound_s(8e6)
    took_s = cost(WaterFilling(16).plan(network), network, 8e6, block_bytes=1 << 18, overhead_s=40e-6)
    assert least_s <= took_s < most * least_s
    if len(set(rates_mbps)) > 1:
        assert cost(Ring().plan(network), network, 8e6) > 1.49 * least_s


@pytest.mark.parametrize(("rates_mbps", "least_s"), [((200, 200, 200, 50), 1.28), ((200,) * 4, 0.48)])
def test_time_of_a_host_at_a_quarter(rates_mbps: tuple[float, ...], least_s: float) -> None:
    assert star(*rates_mbps).allreduce_bound_s(8e6) == pytest.approx(least_s)


@pytest.mark.parametrize("network", [Topology.ring(4), Topology.fat_tree(2, 2)], ids=["ring", "fat tree"])
def test_it_is_for_one_switch(network: Topology) -> None:
    with pytest.raises(PlanError, match=r"Cannot plan WaterFilling for 4 hosts, \d switches and \d links"):
        WaterFilling().plan(network)


def test_it_needs_a_piece() -> None:
    with pytest.raises(PlanError, match="pieces=0"):
        WaterFilling(0)
