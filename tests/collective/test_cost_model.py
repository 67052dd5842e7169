"""The cost of an algorithm: blocks follow each other, links carry one at a time, steps come in order."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest

from offbeat.collective import Algorithm, Chunk, MultiTree, Op, Ring, cost
from offbeat.collective.cost_model import occupancies
from offbeat.errors import PlanError
from offbeat.topology import Topology

WHOLE = (Chunk(Fraction(0), Fraction(1)),)
MB_S = 8.0  # in 10^6 bit/s


def line(hosts: int, *rates_mbps: float, latency_ms: float = 0.0) -> Topology:
    return Topology.from_table(
        (f"h{index}", f"h{index + 1}", rates_mbps[index % len(rates_mbps)], None, latency_ms)
        for index in range(hosts - 1)
    )


def chain(hosts: int) -> Algorithm:
    """A broadcast from one to the next."""
    whole = (Chunk(Fraction(0), Fraction(1), source=0),)
    ops = [Op("copy", 0, rank, rank + 1, rank, (rank - 1,) if rank else ()) for rank in range(hosts - 1)]
    return Algorithm("chain", hosts, whole, tuple(ops))


@pytest.mark.parametrize(("block_bytes", "seconds"), [(math.inf, 3.0), (5e5, 2.0), (1e5, 1.2), (3e5, 1.5)])
def test_blocks_follow_each_other(block_bytes: float, seconds: float) -> None:
    assert cost(chain(4), line(4, MB_S), 1e6, block_bytes=block_bytes) == pytest.approx(seconds)


def test_a_slow_link_holds_up_those_behind_it() -> None:
    assert cost(chain(4), line(4, MB_S, MB_S / 2, MB_S), 1e6, block_bytes=1e5) == pytest.approx(0.1 + 2.0 + 0.1)


def test_latency_and_overhead() -> None:
    took = cost(chain(4), line(4, MB_S, latency_ms=5), 1e6, block_bytes=math.inf, overhead_s=0.01)
    assert took == pytest.approx(3 * (1 + 0.005 + 0.01))
    assert cost(chain(4), line(4, MB_S, latency_ms=5), 1e6, overhead_s=0.01, lock_step=True) == pytest.approx(took)


@pytest.mark.parametrize("rates", [(MB_S, MB_S), (MB_S, MB_S / 4), (MB_S / 4, MB_S)])
def test_a_message_is_on_all_arcs_of_its_way_at_once(rates: tuple[float, float]) -> None:
    far = Algorithm("far", 3, (Chunk(Fraction(0), Fraction(1), 0, 2),), (Op("copy", 0, 0, 2),))
    assert cost(far, line(3, *rates), 1e6, block_bytes=math.inf) == pytest.approx(8 / min(rates))


def test_ways_that_cross_share_an_arc() -> None:
    """Two messages to rank 2, one of them past rank 1: the arc to rank 2 carries both, that of the lower step first."""
    chunks = (Chunk(Fraction(0), Fraction(1, 2), 0, 2), Chunk(Fraction(1, 2), Fraction(1), 1, 2))
    both = Algorithm("both", 3, chunks, (Op("copy", 0, 0, 2, 1), Op("copy", 1, 1, 2, 0)))
    assert cost(both, line(3, MB_S), 1e6, block_bytes=math.inf) == pytest.approx(1.0)
    ends = [one.op for one in occupancies(both, line(3, MB_S), 1e6) if one.arc == 2]
    assert ends == [1, 0]


def test_links_that_are_not_shaped_take_no_time() -> None:
    star = Topology.star("abcd")
    assert cost(Ring().plan(star), star, 1e9) == 0.0
    assert cost(Ring().plan(star), star, 1e9, block_bytes=math.inf, overhead_s=1e-3) == pytest.approx(6e-3)


@pytest.mark.parametrize(("hosts", "parts"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_ring_at_one_switch(hosts: int, parts: float) -> None:
    star = Topology.star([f"h{index}" for index in range(hosts)], rate_mbps=MB_S)
    for block_bytes in (math.inf, 1e4):
        assert cost(Ring().plan(star), star, 1e6, block_bytes=block_bytes) == pytest.approx(parts)
    assert cost(Ring().plan(star), star, 1e6, lock_step=True) == pytest.approx(parts)


def test_no_arc_carries_two_blocks_at_a_time() -> None:
    network = Topology.mesh(3, 3, rate_mbps=MB_S)
    seen = occupancies(MultiTree().plan(network), network, 1e6, block_bytes=1e4)
    for arc in range(len(network.arcs)):
        spans = sorted((one.begin_s, one.end_s) for one in seen if one.arc == arc)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert seen == occupancies(MultiTree().plan(network), network, 1e6, block_bytes=1e4)


def test_what_cannot_be_priced() -> None:
    star = Topology.star("ab", rate_mbps=MB_S)
    with pytest.raises(PlanError, match="it is for 2 ranks, and the network has 3 hosts"):
        cost(Ring().plan(star), Topology.star("abc"), 1)
    for kwargs in ({"size_bytes": -1}, {"size_bytes": math.nan}, {"size_bytes": 1, "block_bytes": 0}):
        with pytest.raises(PlanError, match="Cannot price"):
            cost(Ring().plan(star), star, **kwargs)
