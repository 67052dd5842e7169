"""Networks that tests share."""

from __future__ import annotations

import random

from offbeat.topology import Host, Link, Topology

MB_S = 8.0
"""One megabyte per second, in 10^6 bit/s."""


def star(*rates_mbps: float | None) -> Topology:
    """Hosts with links of these rates at one switch."""
    hosts = tuple(Host(f"h{index}") for index in range(len(rates_mbps)))
    return Topology(hosts, tuple(Link(host.name, "switch", rate) for host, rate in zip(hosts, rates_mbps, strict=True)))


def with_rates(network: Topology, rates: list[tuple[float, float]]) -> Topology:
    """The same network, where links have other rates there and back."""
    links = tuple(
        Link(link.a, link.b, there, back, link.latency_ms)
        for link, (there, back) in zip(network.links, rates, strict=True)
    )
    return Topology(network.hosts, links, network.switches, network.routing)


def with_slow_link(network: Topology, number: int = 0) -> Topology:
    """One link at a quarter of the rate, both ways."""
    rates = [MB_S / 4 if index == number else MB_S for index in range(len(network.links))]
    return with_rates(network, [(rate, rate) for rate in rates])


def with_slow_host(network: Topology, name: str) -> Topology:
    """All links of one host at a quarter of the rate, both ways."""
    rates = [MB_S / 4 if name in (link.a, link.b) else MB_S for link in network.links]
    return with_rates(network, [(rate, rate) for rate in rates])


def with_drawn_rates(network: Topology, seed: int) -> Topology:
    """Links between a quarter and all of the rate, as fast back as there."""
    draw = random.Random(seed)
    rates = [round(MB_S * draw.uniform(0.25, 1), 3) for _ in network.links]
    return with_rates(network, [(rate, rate) for rate in rates])


def drawn(seed: int) -> Topology:
    """A connected network of up to 6 hosts and 2 switches, whose links differ in both directions."""
    draw = random.Random(seed)
    nodes = [f"h{index}" for index in range(draw.randrange(2, 7))] + ["s0", "s1"][: draw.randrange(3)]
    switches = tuple(name for name in nodes if name.startswith("s"))
    pairs = [(draw.choice(nodes[:index]), nodes[index]) for index in range(1, len(nodes))]
    pairs += [(first, second) for first, second in (draw.sample(nodes, 2) for _ in range(draw.randrange(6)))]
    return Topology.from_table(
        [(a, b, float(draw.randrange(10, 100)), float(draw.randrange(10, 100)), 0.0) for a, b in pairs], switches
    )
