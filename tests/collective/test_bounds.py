"""Bounds: the known ones of regular networks; those of any network by all of its cuts; no method is faster."""

from __future__ import annotations

import builtins
import itertools
import math
import random
import sys
from typing import Any

import pytest

from offbeat.collective import MultiTree, Ring, WaterFilling, bound, cost
from offbeat.errors import PlanError
from offbeat.topology import Topology
from tests.collective.networks import MB_S, drawn, star


@pytest.mark.parametrize(
    ("network", "sequential", "any_method"),
    [
        (Topology.torus(4, 4, rate_mbps=MB_S), 0.469, 0.469),
        (Topology.torus(6, 6, rate_mbps=MB_S), 0.486, 0.486),
        (Topology.torus(8, 8, rate_mbps=MB_S), 0.492, 0.492),
        (Topology.mesh(4, 4, rate_mbps=MB_S), 0.9375, 0.625),
        (Topology.mesh(6, 6, rate_mbps=MB_S), 0.972, 0.583),
        (Topology.mesh(8, 8, rate_mbps=MB_S), 0.984, 0.5625),
        (Topology.fat_tree(8, 2, rate_mbps=MB_S), 1.969, 1.969),
        (Topology.bigraph(4, 8, rate_mbps=MB_S), 1.9375, 1.9375),
        (star(*[MB_S] * 4), 1.5, 1.5),
        (Topology.ring(2, rate_mbps=MB_S), 1.0, 1.0),
        (Topology.star("a", rate_mbps=MB_S), 0.0, 0.0),
        (Topology.mesh(3, 3), 0.0, 0.0),
    ],
)
def test_regular_networks(network: Topology, sequential: float, any_method: float) -> None:
    """For 1 MB over links of 1 MB/s: the table of MultiTree's spec."""
    found = bound(network, 1e6)
    assert found.sequential_s == pytest.approx(sequential, abs=6e-4)
    assert found.any_method_s == pytest.approx(any_method, abs=6e-4)


def test_a_slow_link_of_four() -> None:
    found = bound(star(200, 200, 200, 50), 8e6)
    assert found.any_method_s == pytest.approx(1.28)
    assert found.sequential_s == pytest.approx(1.92)
    assert all(type(one) is float for one in found)


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_that_binds_is_found(seed: int) -> None:
    """By trying all sets of nodes."""
    network = drawn(seed)
    hosts = {host.name for host in network.hosts}
    gather = scatter = least = 0.0
    for count in range(1, len(network.nodes)):
        for chosen in itertools.combinations(network.nodes, count):
            inside = hosts.intersection(chosen)
            if not inside or inside == hosts:
                continue
            out = sum(arc.rate_mbps or 0.0 for arc in network.arcs if arc.source in chosen and arc.target not in chosen)
            into = sum(
                arc.rate_mbps or 0.0 for arc in network.arcs if arc.target in chosen and arc.source not in chosen
            )
            gather = max(gather, len(inside) / out / len(hosts))
            scatter = max(scatter, len(inside) / into / len(hosts))
            least = max(least, 1 / out)
    found = bound(network, 1 / 8e-6)
    assert found.all_gather_s == pytest.approx(gather)
    assert found.reduce_scatter_s == pytest.approx(scatter)
    assert found.any_method_s >= least - 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_no_method_is_faster(seed: int) -> None:
    network = drawn(seed)
    found = bound(network, 1e6)
    assert found.any_method_s <= found.sequential_s * (1 + 1e-9)
    for method in (Ring(), MultiTree(), MultiTree(split=2)):
        assert cost(method.plan(network), network, 1e6, block_bytes=1e4) >= found.any_method_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_one_switch_has_the_bound_in_closed_form(seed: int) -> None:
    draw = random.Random(seed)
    network = star(*[draw.uniform(1, 1000) for _ in range(draw.randrange(2, 20))])
    found = bound(network, 1e6).any_method_s
    assert found == pytest.approx(network.allreduce_bound_s(1e6), rel=1e-3)
    assert found <= cost(WaterFilling().plan(network), network, 1e6) * (1 + 1e-9)


def test_links_that_are_not_shaped_do_not_bind() -> None:
    assert bound(star(8, None, None), 1e6).any_method_s == pytest.approx(1.0)
    assert bound(star(8, None), 1e6).all_gather_s == pytest.approx(0.5)


def test_large_rates_beside_small_ones() -> None:
    found = bound(star(*[10_000.0] * 60, 0.1), 1e6)
    assert found.any_method_s == pytest.approx(80.0, rel=1e-3)
    assert math.isclose(found.all_gather_s, 80.0 * 60 / 61, rel_tol=1e-3)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def no_scipy(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError("No module named 'scipy'")
        return load(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("scipy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_scipy)
    with pytest.raises(PlanError, match=r"named 'scipy'\. Install what plans need: pip install 'offbeat\[plan\]'"):
        bound(Topology.ring(3, rate_mbps=8), 1e6)
