"""The capacity of the network between the workers, from a tournament in which pairs send both ways at the same time.

In each of N - 1 rounds every worker has one partner (the circle method), so that a pair has its links to itself. A
first tournament with little tells how much there is to be sent in the second, so that it takes some tenths of a second
a round whatever the links. What is measured is the time from the first block to the last, at the one who receives.

One switch is assumed: a host sends to all as fast as to whom it sends fastest. `unlike` says which pairs do not fit.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, PlanError
from offbeat.topology import MAX_RATE_MBPS, MIN_RATE_MBPS, Host, Link, Topology
from offbeat.wire.lane import BLOCK_BYTES, CopyingSink, GrowingBuffer, LaneKey, OutgoingLane, block_bytes_for
from offbeat.wire.mesh import MeshExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.errors import OffbeatError
    from offbeat.fabric.lane_network import LaneNetwork
    from offbeat.wire.mesh import MeshChannel

_FIRST_BYTES = 2 * BLOCK_BYTES
_ROUND_S = 0.2
_MOST_BYTES = 64 << 20
_PATIENCE_S = 20.0
_PINGS = 4
_LIKE = 0.7  # of what one switch would carry between two


@dataclass(frozen=True)
class MeasuredNetwork:
    """The knowledge of the network between the workers.

    Args:
        network: hosts are ranks in their order.
        message_s: what a message costs by itself, in seconds.
        block_bytes: the size of blocks that suits the links.
        unlike: pairs, sender first, that are much slower than the network would have it.
    """

    network: Topology
    message_s: float
    block_bytes: int
    unlike: tuple[tuple[int, int], ...] = ()


def measure_network(network: LaneNetwork, meet: Callable[[str], list[str]]) -> MeasuredNetwork:
    """Measure what the links carry. Collective; raises as `measure_rates`."""
    rates, message_s = measure_rates(network, meet)
    star = star_of(rates)
    slowest = min(rate for row in rates for rate in row if rate)
    return MeasuredNetwork(star, message_s, block_bytes_for(slowest / (network.world - 1)), tuple(unlike(rates, star)))


def known_network(network: LaneNetwork, topology: Topology, meet: Callable[[str], list[str]]) -> MeasuredNetwork:
    """Go by what people say of the links; what a message costs is measured. Collective.

    Raises:
        PlanError: if it has another number of hosts.
        NetworkError: if a link is lost meanwhile.
    """
    if len(topology.hosts) != network.world:
        raise PlanError(
            f"Cannot plan paths: the topology has {len(topology.hosts)} hosts, and there are {network.world} workers. "
            "Name the file that describes this network with OFFBEAT_TOPOLOGY, or none."
        )
    channel, message_s = network.channel(), math.inf
    for turn, partner in enumerate(partners(network.world, network.rank)):
        if partner is not None:
            message_s = min(message_s, network.loop.run(_pings(channel, turn * _PINGS, partner)))
        meet("")
    slowest_mbps = min((arc.rate_mbps for arc in topology.arcs if arc.rate_mbps is not None), default=MAX_RATE_MBPS)
    told = min(float(text) for text in meet(str(message_s)))
    return MeasuredNetwork(topology, told, block_bytes_for(slowest_mbps * 1e6 / 8))


def measure_rates(network: LaneNetwork, meet: Callable[[str], list[str]]) -> tuple[list[list[float]], float]:
    """Measure how fast each sends to each. Collective.

    Args:
        network: the links.
        meet: tells the others a text, and returns what all say, in rank order.

    Returns:
        By sender and receiver, in bytes per second, 0 on the diagonal; and what a message costs by itself, in seconds.

    Raises:
        NetworkError: if a link is lost meanwhile, or carries next to nothing.
    """
    channel, world = network.channel(), network.world
    sizes = [[_FIRST_BYTES] * world for _ in range(world)]
    rates: list[list[float]] = []
    message_s = math.inf
    for number in range(2):
        mine = [0.0] * world
        for turn, partner in enumerate(partners(world, network.rank)):
            if partner is not None:
                out, come = sizes[network.rank][partner], sizes[partner][network.rank]
                first = (turn + number * world) * (_PINGS + 1)
                message_s = min(message_s, network.loop.run(_pings(channel, first, partner)))
                mine[partner] = network.loop.run(_both_ways(channel, first + _PINGS, partner, out, come))
            meet("")  # the next round begins when all links are free
        said = [json.loads(text) for text in meet(json.dumps([message_s, mine]))]
        message_s, by_receiver = min(one for one, _ in said), [row for _, row in said]
        rates = [[by_receiver[receiver][sender] for receiver in range(world)] for sender in range(world)]
        sizes = [
            [int(min(_MOST_BYTES, max(_FIRST_BYTES, rate * _ROUND_S))) // BLOCK_BYTES * BLOCK_BYTES for rate in row]
            for row in rates
        ]
    return rates, message_s


def partners(world: int, rank: int) -> list[int | None]:
    """The partner of a rank in each round, None where it has none; after all rounds it has had everybody once.

    >>> [partners(3, rank) for rank in range(3)]
    [[None, 2, 1], [2, None, 0], [1, 0, None]]
    """
    places = world + world % 2
    found: list[int | None] = []
    for turn in range(places - 1):
        circle = [0, *((i + turn) % (places - 1) + 1 for i in range(places - 1))]
        at = circle.index(rank)
        other = circle[places - 1 - at]
        found.append(other if other < world else None)
    return found


def star_of(rates: Sequence[Sequence[float]]) -> Topology:
    """The one switch that explains the rates between hosts best: each is as fast as with its fastest partner."""
    world = len(rates)
    links = []
    for rank in range(world):
        out = max(rates[rank][other] for other in range(world) if other != rank)
        come = max(rates[other][rank] for other in range(world) if other != rank)
        links.append(Link(f"h{rank}", "switch", _mbps(out), _mbps(come)))
    return Topology(tuple(Host(f"h{rank}") for rank in range(world)), tuple(links))


def unlike(rates: Sequence[Sequence[float]], network: Topology) -> list[tuple[int, int]]:
    """The pairs, sender first, that are much slower than one switch would have it."""
    arcs = {(arc.source, arc.target): arc.rate_mbps or MAX_RATE_MBPS for arc in network.arcs}
    return [
        (a, b)
        for a, row in enumerate(rates)
        for b, rate in enumerate(row)
        if a != b and _mbps(rate) < _LIKE * min(arcs[f"h{a}", "switch"], arcs["switch", f"h{b}"])
    ]


async def _pings(channel: MeshChannel, first: int, partner: int) -> float:
    """Exchange a byte several times, one after the other; the shortest time that it took."""
    shortest_s = math.inf
    for number in range(first, first + _PINGS):
        began_s = time.monotonic()
        await _both_ways(channel, number, partner, 1, 1)
        shortest_s = min(shortest_s, time.monotonic() - began_s)
    return shortest_s


async def _both_ways(channel: MeshChannel, number: int, partner: int, out_bytes: int, come_bytes: int) -> float:
    """Send and receive so much, and return how fast it came."""
    over, stamps = asyncio.Event(), list[tuple[float, int]]()
    errors: list[OffbeatError] = []

    def failed(error: OffbeatError) -> None:
        errors.append(error)
        over.set()

    left = 2

    def one_less() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            over.set()

    target = GrowingBuffer(memoryview(bytearray(come_bytes)), 0)
    target.follow(lambda: stamps.append((time.monotonic(), target.progress)))
    lane = OutgoingLane(
        LaneKey(channel.number, number, 0), GrowingBuffer(memoryview(bytearray(out_bytes))), (0,), sent=one_less
    )
    sinks = {(partner, 0): CopyingSink(target, one_less)}
    channel.begin(number, MeshExchange("a measurement", sinks, [(partner, lane)], failed))
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await over.wait()
    except TimeoutError:
        raise NetworkError(
            f"Cannot measure the link with rank {partner}: of {come_bytes} bytes {target.progress} came in "
            f"{_PATIENCE_S:g} s."
        ) from None
    if errors:
        raise errors[0]
    channel.end(number)
    (first_s, first_bytes), (last_s, _) = stamps[0], stamps[-1]
    return (come_bytes - first_bytes) / max(last_s - first_s, 1e-6)


def _mbps(rate_bytes_per_s: float) -> float:
    return min(MAX_RATE_MBPS, max(MIN_RATE_MBPS, rate_bytes_per_s * 8e-6))
