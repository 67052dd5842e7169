"""Topologies: what cannot be built is refused with its path; the bound and the drawing are right."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ScenarioError
from offbeat.topology import MAX_HOSTS, MAX_RATE_MBPS, Arc, Host, Link, Topology, check_compute_factor, check_rate

if TYPE_CHECKING:
    from collections.abc import Callable

STAR = Topology.star(["a", "b", "c", "d"], rate_mbps=200)


@pytest.mark.parametrize(
    ("hosts", "links", "says"),
    [
        ([], [], r"Cannot build 0 hosts: a scenario has 1 to 10000\..*\(hosts\)"),
        (["a", "b", "a"], [], r"'a' twice: hosts\[2\] has the name of hosts\[0\]\..*\(hosts\[2\].name\)"),
        (["a", "switch"], [], r"Cannot build host 'switch' twice: hosts\[1\] has the name of a switch\."),
        (["A b"], [], r"Cannot name a host 'A b'.*\(hosts\[0\].name\)"),
        (["-a"], [], r"Cannot name a host '-a'"),
        (["a"], [("a", "router", 100)], r"'router' is neither .* nor .* Use one of a, switch \(links\[0\]\)"),
        (["a"], [("a", "switch", 0)], r"to 0 Mbit/s: the lab shapes 0\.1 to 10000 .*\(links\[0\]\.rate_mbps\)"),
        (["a"], [("a", "switch", -5)], r"Cannot shape a link to -5 Mbit/s"),
        (["a"], [("a", "switch", 2e4)], r"Cannot shape a link to 20000 Mbit/s"),
        (["a"], [("a", "switch", float("nan"))], r"Cannot shape a link to nan Mbit/s"),
        (["a"], [("a", "switch", 5, 0)], r"Cannot shape a link to 0 Mbit/s.*\(links\[0\]\.back_mbps\)"),
        (["a"], [("a", "switch", 5, 5, -1)], r"Cannot delay a link by -1 ms: .*\(links\[0\]\.latency_ms\)"),
        (["a"], [("a", "switch", 5, 5, float("nan"))], r"Cannot delay a link by nan ms"),
        (["a"], [("a", "a", 5)], r"Cannot link 'a' to itself: .*\(links\[0\]\.b\)"),
        (["a", "b"], [("a", "switch", 5)], r"Cannot find a way from 'a' to 'b': no links lead there\. .*\(links\)"),
        (["a", "b"], [("a", "b", 5)], r"Cannot find a way from 'a' to 'switch'"),
    ],
)
def test_what_cannot_be_is_refused(hosts: list[str], links: list[tuple[str, str, float]], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        Topology(tuple(map(Host, hosts)), tuple(Link(*link) for link in links))


def test_too_many_hosts() -> None:
    Topology.star([f"h{index}" for index in range(MAX_HOSTS)], rate_mbps=1)
    with pytest.raises(ScenarioError, match=f"Cannot build {MAX_HOSTS + 1} hosts"):
        Topology.star([f"h{index}" for index in range(MAX_HOSTS + 1)], rate_mbps=1)


@pytest.mark.parametrize("factor", [0.0, -1.0, 101.0, float("nan"), float("inf")])
def test_compute_factors_are_slowdowns(factor: float) -> None:
    with pytest.raises(ScenarioError, match=r"Cannot slow a host down by .*\(hosts\[1\]\.compute_factor\)"):
        Topology((Host("a"), Host("b", factor)), ())


def test_the_limits_themselves_are_allowed() -> None:
    check_rate(MAX_RATE_MBPS, "here")
    check_rate(0.1, "here")
    check_compute_factor(0.01, "here")
    check_compute_factor(100, "here")


def test_equal_links_have_the_bound_of_a_ring() -> None:
    """2 (N-1)/N S/B: 4 hosts, 25 MB, 200 Mbit/s = 25 MB/s."""
    assert STAR.allreduce_bound_s(25_000_000) == pytest.approx(1.5)
    assert Topology.star(["a", "b"], rate_mbps=8).allreduce_bound_s(1_000_000) == pytest.approx(1.0)


def test_a_slow_link_has_to_carry_a_gradient_once_in_each_direction() -> None:
    """8 MB, one link of 4 at 50 Mbit/s: S / min b, where a ring would send 2 (N-1)/N S over it, in 1.92 s."""
    hosts = tuple(Host(name) for name in "abcd")
    links = tuple(Link(name, "switch", 50 if name == "a" else 200) for name in "abcd")
    assert Topology(hosts, links).allreduce_bound_s(8_000_000) == pytest.approx(1.28)


def test_a_link_that_is_not_shaped_costs_nothing() -> None:
    links = (Link("a", "switch", 100), Link("switch", "b", 20), Link("c", "switch", None))
    topology = Topology((Host("a"), Host("b"), Host("c")), links)
    assert topology.allreduce_bound_s(3_000_000) == pytest.approx(3e6 / 2.5e6)


@pytest.mark.parametrize("topology", [Topology.star(["a"], rate_mbps=1), Topology.star(["a", "b"])])
def test_nothing_to_send_or_nothing_that_limits_costs_nothing(topology: Topology) -> None:
    assert topology.allreduce_bound_s(1e9) == 0.0


def test_no_transfer_beats_the_bound() -> None:
    """Two direct counts of bytes on random stars: a ring, and all to one host and back."""
    dice = random.Random(0)
    for _ in range(100):
        rates = [dice.uniform(1, 1000) for _ in range(dice.randint(2, 8))]
        hosts = tuple(Host(f"h{index}") for index in range(len(rates)))
        topology = Topology(hosts, tuple(Link(h.name, "switch", r) for h, r in zip(hosts, rates, strict=True)))
        size_bytes = dice.randint(1, 10**8)
        chunk_bytes = size_bytes / len(rates)
        ring_s = sum(max(chunk_bytes * 8 / (rate * 1e6) for rate in rates) for _ in range(2 * (len(rates) - 1)))
        hub, *others = sorted(rates, reverse=True)
        # All at once, each at the rate of its own link: what comes in is summed, and goes out again, block by block.
        hub_s = max(len(others) * size_bytes * 8e-6 / hub, size_bytes * 8e-6 / others[-1])
        assert topology.allreduce_bound_s(size_bytes) <= min(ring_s, hub_s) * (1 + 1e-9)


@pytest.mark.parametrize("count", range(2, 8))
def test_the_bound_is_reached(count: int) -> None:
    """By one host that sums for all others, if its link carries as much as all of theirs."""
    names = [f"h{index}" for index in range(count)]
    links = tuple(Link(name, "switch", 10.0 if index else 10.0 * (count - 1)) for index, name in enumerate(names))
    bound_s = Topology(tuple(map(Host, names)), links).allreduce_bound_s(1_250_000)
    assert bound_s == pytest.approx(1.0)  # as long as it takes to send, or to receive, one gradient


def test_a_bound_needs_one_switch_and_one_link_each() -> None:
    with pytest.raises(ScenarioError, match="over 2 switches: the bound holds for exactly 1"):
        Topology((Host("a"),), (Link("a", "s"), Link("s", "t")), switches=("s", "t")).allreduce_bound_s(1)
    double = Topology((Host("a"), Host("b")), (Link("a", "switch", 1), Link("b", "switch", 1), Link("a", "b", 1)))
    with pytest.raises(ScenarioError, match="Cannot tell the uplink of host 'a': it has 2 links"):
        double.allreduce_bound_s(1)


def test_the_drawing_shows_every_host_rate_and_factor() -> None:
    hosts = (Host("fast"), Host("slow", 2.0), Host("free"))
    links = (Link("fast", "switch", 200), Link("slow", "switch", 20), Link("free", "switch"))
    assert Topology(hosts, links).draw().splitlines() == [
        "        ┌── 200 Mbit/s ── fast",
        "switch ─┼──  20 Mbit/s ── slow  (compute x2)",
        "        └── not shaped ── free",
    ]


@pytest.mark.parametrize("count", range(1, 9))
def test_drawings_of_all_sizes_hang_on_one_stem(count: int) -> None:
    lines = Topology.star([f"h{index}" for index in range(count)], rate_mbps=10).draw().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [f"h{index}" for index in range(count)]
    assert sum(line.startswith("switch ─") for line in lines) == 1
    joints = "".join(line[len("switch ─")] for line in lines)
    fan = "┌" + "├" * (count - 2) + "└"
    assert joints.replace("┼", "├") == {1: "─", 2: "┬└"}.get(count, fan)


def test_several_switches_are_drawn_as_edges() -> None:
    topology = Topology((Host("a"), Host("b")), (Link("a", "s", 10), Link("s", "t"), Link("t", "b", 5)), ("s", "t"))
    assert topology.draw().splitlines() == [
        "a ── 10 Mbit/s ── s",
        "s ── not shaped ── t",
        "t ── 5 Mbit/s ── b",
    ]


RATES = st.one_of(st.none(), st.floats(1, 100))


@st.composite
def any_topology(draw: st.DrawFn) -> Topology:
    """A tree of hosts and switches, and some links more."""
    count = draw(st.integers(2, 10))
    names = [f"n{index}" for index in range(count)]
    pairs = [(names[draw(st.integers(0, index - 1))], names[index]) for index in range(1, count)]
    pairs += draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda p: p[0] != p[1])))
    links = tuple(Link(a, b, draw(RATES), draw(RATES)) for a, b in pairs)
    switches = tuple(name for name in names[1:] if draw(st.booleans()))
    return Topology(tuple(Host(name) for name in names if name not in switches), links, switches)


GRIDS = [
    Topology.ring(1),
    Topology.ring(2),
    Topology.ring(7),
    Topology.mesh(3, 4),
    Topology.mesh(2, 3, 4),
    Topology.torus(4, 4),
    Topology.torus(2, 5),
    Topology.torus(3, 2, 4),
    Topology.torus(2, 2, parallel=True),
]
TREES = [Topology.fat_tree(2, 3), Topology.fat_tree(4, 2), Topology.bigraph(4, 8), Topology.fat_tree(3, 1)]


def hops(topology: Topology, a: str) -> dict[str, int]:
    """Fewest hops from a node, counted in the simplest way."""
    found = {a: 0}
    for _ in topology.nodes:
        for arc in topology.arcs:
            if arc.source in found:
                found[arc.target] = min(found.get(arc.target, 99), found[arc.source] + 1)
    return found


def check_routes(topology: Topology) -> None:
    for a in topology.nodes:
        least = hops(topology, a)
        for b in (host.name for host in topology.hosts):
            way = topology.route(a, b)
            assert [arc.source for arc in way] + [b] == [a] + [arc.target for arc in way]
            assert len(way) == least[b], "no way has fewer hops"
            assert all(arc in topology.arcs for arc in way)
            if way:  # a node on the way sends on as if it came from there
                assert topology.route(way[0].target, b) == way[1:]


@settings(max_examples=60)
@given(any_topology())
def test_routes_have_the_fewest_hops(topology: Topology) -> None:
    check_routes(topology)


@pytest.mark.parametrize("topology", GRIDS + TREES, ids=lambda t: f"{len(t.hosts)} hosts, {len(t.links)} links")
def test_routes_of_presets(topology: Topology) -> None:
    check_routes(topology)
    assert Topology(topology.hosts, topology.links, topology.switches, topology.routing) == topology


def test_of_short_ways_the_widest_is_taken_and_then_the_first_name() -> None:
    hosts = tuple(map(Host, "abcxyz"))
    links = [Link("a", "x", 50), Link("x", "b", 5), Link("a", "z", 10), Link("z", "b", 10), Link("a", "y", 10)]
    topology = Topology(hosts, (*links, Link("y", "b", 10), Link("c", "a", 1)), switches=())
    assert [arc.target for arc in topology.route("a", "b")] == ["y", "b"]
    assert [arc.target for arc in topology.route("c", "b")] == ["a", "y", "b"], "what limits both does not decide"
    assert [arc.target for arc in topology.route("b", "a")] == ["y", "a"]


def test_rates_back_decide_on_the_way_back() -> None:
    links = (Link("a", "x", 9, 1), Link("x", "b", 9, 1), Link("a", "y", 5, 5), Link("y", "b", 5, 5))
    topology = Topology(tuple(map(Host, "abxy")), links, switches=())
    assert [arc.target for arc in topology.route("a", "b")] == ["x", "b"]
    assert [arc.target for arc in topology.route("b", "a")] == ["y", "a"]


def test_arcs_are_both_directions_of_each_link() -> None:
    topology = Topology((Host("a"), Host("b")), (Link("a", "b", 9, 1, 0.5), Link("b", "a", 3)), switches=())
    assert topology.arcs == (
        Arc("a", "b", 9, 0.5, 0),
        Arc("b", "a", 1, 0.5, 0),
        Arc("b", "a", 3, 0.0, 1),
        Arc("a", "b", 3, 0.0, 1),
    )
    assert topology.route("a", "b") == (topology.arcs[0],)
    assert topology.route("b", "a") == (topology.arcs[2],)
    assert topology.between("b", "a") == 0


def test_a_grid_goes_along_rows_first() -> None:
    mesh = Topology.mesh(3, 3, rate_mbps=5)
    assert [arc.target for arc in mesh.route("h0", "h8")] == ["h1", "h2", "h5", "h8"]
    assert [arc.target for arc in mesh.route("h8", "h0")] == ["h7", "h6", "h3", "h0"]
    assert [arc.target for arc in Topology.torus(3, 3).route("h0", "h8")] == ["h2", "h8"]
    assert [arc.target for arc in Topology.ring(4).route("h3", "h1")] == ["h0", "h1"], "upwards, if both are as long"


def test_the_order_of_hosts_is_no_matter_of_their_places() -> None:
    """Ranks may go along a grid in any order."""
    torus = Topology.torus(3, 4, rate_mbps=1)
    turned = Topology(torus.hosts[::-1], torus.links, (), torus.routing)
    check_routes(turned)
    assert turned.route("h0", "h11") == torus.route("h0", "h11")
    assert turned.draw() == torus.draw()


def test_presets_have_their_links() -> None:
    """A torus of two in a dimension has one link there, unless both are asked for."""
    counts = [len(topology.links) for topology in GRIDS]
    assert counts == [0, 1, 7, 9 + 8, 12 + 16 + 18, 32, 5 + 10, 24 + 12 + 24, 8]
    fat = TREES[0]
    assert (len(fat.hosts), len(fat.switches), len(fat.links)) == (8, 12, 8 + 16)
    degrees = Counter(arc.source for arc in fat.arcs)
    assert {degrees[switch] for switch in fat.switches} == {2, 4}, "roots have no links up"
    bigraph = TREES[2]
    assert (len(bigraph.hosts), len(bigraph.switches), len(bigraph.links)) == (32, 8, 32 + 16)
    assert [arc.target for arc in bigraph.route("h0", "h16")] == ["upper0", "lower0", "h16"]


def test_ways_up_a_fat_tree_are_spread() -> None:
    """Hosts of one switch, each sending to another one of another switch, share no link."""
    topology = Topology.fat_tree(4, 2)
    used = Counter(arc for host in range(4) for arc in topology.route(f"h{host}", f"h{4 + host}"))
    assert set(used.values()) == {1}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Topology.mesh(), r"a mesh of 0 dimensions: it has 1 to 3\. .*\(topology\.dims\)"),
        (lambda: Topology.torus(2, 2, 2, 2), "a torus of 4 dimensions"),
        (lambda: Topology.torus(4, 0), r"a torus with 0 in a dimension: .*\(topology\.dims\[1\]\)"),
        (lambda: Topology.torus(1000, 1000, 1000), "Cannot build 1000000000 hosts"),
        (lambda: Topology.ring(0), "a ring with 0 in a dimension"),
        (lambda: Topology.fat_tree(4, 0), "a fat tree with 0 in a dimension"),
        (lambda: Topology.fat_tree(2, 1_000_000), "Cannot build 10001 hosts"),
        (lambda: Topology.bigraph(4, 3), "a BiGraph of 3 switches: two layers have equally many"),
        (lambda: Topology.from_table([]), "Cannot build 0 hosts"),
        (lambda: Topology.from_table([("a", "b", 1, 1, 0), ("c", "d", 1, 1, 0)]), "a way from 'a' to 'c'"),
        (lambda: Topology.ring(3).route("h0", "h7"), "a way from 'h0' to 'h7'"),
        (lambda: Topology.ring(3).route("h7", "h0"), "a way from 'h7' to 'h0'"),
        (lambda: Topology.ring(5).between("h0", "h2"), "between 'h0' and 'h2': 'h0' is linked to h1, h4"),
        (lambda: Topology.ring(5).between("x", "h2"), "between 'x' and 'h2': there is no 'x'"),
    ],
)
def test_presets_that_cannot_be(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        make()


def test_a_table_says_all_of_a_network() -> None:
    rows = [("a", "s", 10.0, None, 0.0), ("s", "b", 20.0, 5.0, 1.5)]
    topology = Topology.from_table(rows, switches=["s"])
    assert [host.name for host in topology.hosts] == ["a", "b"]
    assert topology.switches == ("s",)
    assert [arc[2:4] for arc in topology.route("b", "a")] == [(5.0, 1.5), (10.0, 0.0)]
    assert not topology.is_star
    assert Topology.from_table([("s", "a", 1, 1, 0), ("b", "s", 1, None, 0)], switches=["s"]).is_star
    assert topology.draw().splitlines() == [
        "s ─┬──                  10 Mbit/s ── a",
        "   └── 20, back 5 Mbit/s + 1.5 ms ── b",
    ]


def test_a_grid_is_drawn_as_such() -> None:
    torus = Topology.torus(3, 3, rate_mbps=10)
    links = (Link("h0", "h1", 2.5), *torus.links[1:])
    slow = Topology((Host("h0", 2.0), *torus.hosts[1:]), links, (), torus.routing)
    assert slow.draw().splitlines() == [
        "   │     │     │",
        "── h0 ── h1 ── h2 ──",
        "   │     │     │",
        "── h3 ── h4 ── h5 ──",
        "   │     │     │",
        "── h6 ── h7 ── h8 ──",
        "   │     │     │",
        "",
        "what leaves at one side comes in at the other",
        "each link: 10 Mbit/s",
        "but h0 ── 2.5 Mbit/s ── h1",
        "h0  (compute x2)",
    ]
    assert Topology.mesh(2, 2, 2, rate_mbps=1).draw().splitlines() == [
        "plane 0:",
        "h0 ── h1",
        "│     │",
        "h2 ── h3",
        "",
        "plane 1:",
        "h4 ── h5",
        "│     │",
        "h6 ── h7",
        "",
        "each host is linked to those in its place of the next planes",
        "each link: 1 Mbit/s",
    ]


def test_planning_a_large_torus_is_quick() -> None:
    topology = Topology.torus(16, 16, rate_mbps=10)
    assert max(len(topology.route(a.name, b.name)) for a in topology.hosts[:16] for b in topology.hosts) == 16
