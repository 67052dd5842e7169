"""Direct shards: their sizes, and that none takes longer than the bound."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from offbeat.collective import WaterFilling
from offbeat.collective.water_filling import shares_of
from offbeat.errors import PlanError
from offbeat.topology import Host, Link, Topology


def star(rates: list[float]) -> Topology:
    hosts = tuple(Host(f"h{i}") for i in range(len(rates)))
    return Topology(hosts, tuple(Link(host.name, "switch", rate) for host, rate in zip(hosts, rates, strict=True)))


@pytest.mark.parametrize("seed", range(30))
def test_no_link_carries_more_than_the_bound_says(seed: int) -> None:
    """max(S / min b, 2 (N - 1) S / sum b), met to one part in a thousand: that is how finely shards are cut."""
    draw = random.Random(seed)
    rates = [draw.choice([draw.uniform(10, 1000), 200.0]) for _ in range(draw.randrange(2, 10))]
    made = WaterFilling(draw.randrange(1, 5)).plan(star(rates))
    made.verify()
    sent = [0.0] * made.nodes
    come = [0.0] * made.nodes
    for op in made.ops:
        part = float(made.chunks[op.chunk].end - made.chunks[op.chunk].begin)
        sent[op.source] += part
        come[op.destination] += part
    taken = max(max(out, back) / rate for out, back, rate in zip(sent, come, rates, strict=True))
    bound = max(1 / min(rates), 2 * (made.nodes - 1) / sum(rates))
    if made.nodes > 2:
        assert taken == pytest.approx(bound, rel=1e-3)
    else:
        assert taken == pytest.approx(1 / min(rates))


def test_equal_links_have_equal_shards() -> None:
    assert shares_of([100.0] * 4) == [Fraction(1, 4)] * 4


def test_a_slow_host_owns_nothing() -> None:
    made = WaterFilling(2).plan(star([200, 200, 200, 50]))
    assert {op.source for op in made.ops if op.kind == "copy"} == {0, 1, 2}
    assert made.sent_parts()[3] == 1


def test_one_is_alone() -> None:
    made = WaterFilling().plan(star([100]))
    made.verify()
    assert not made.ops


def test_what_is_no_star() -> None:
    with pytest.raises(PlanError, match=r"for a network that is no star.*Use Greedy\(\), or MultiTree\(\)"):
        WaterFilling().plan(Topology.torus(2, 2, rate_mbps=10))


@pytest.mark.parametrize("chunks", [0, -1, 2.5, 5000])
def test_what_is_no_number_of_chunks(chunks: int) -> None:
    with pytest.raises(PlanError, match=r"use a whole number from 1 to 1024 - at `plan\.collective\.chunks`"):
        WaterFilling(chunks)
