"""Topologies: what cannot be built is refused with its path; the bound and the drawing are right."""

from __future__ import annotations

import random

import pytest

from offbeat.errors import ScenarioError
from offbeat.topology import MAX_HOSTS, MAX_RATE_MBPS, Host, Link, Topology, check_compute_factor, check_rate

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
        Topology((Host("a"),), (Link("a", "s"),), switches=("s", "t")).allreduce_bound_s(1)
    lonely = Topology((Host("a"), Host("b")), (Link("a", "switch", 1),))
    with pytest.raises(ScenarioError, match="Cannot tell the uplink of host 'b': it has 0 links"):
        lonely.allreduce_bound_s(1)


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
