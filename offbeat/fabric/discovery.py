"""The capacity of the network between the workers, from a tournament in which pairs send both ways at the same time.

In each of N - 1 rounds every worker has one partner (the circle method), so that a pair has its links to itself. A
first tournament with little tells how much there is to be sent in the second, so that it takes some tenths of a second
a round whatever the links. What is measured is the time from the first block to the last, at the one who receives.

One switch is assumed: a host sends to all as fast as to whom it sends fastest. `unlike` says which pairs do not fit.

When workers come and go (`known_among`) what is known of those that stay holds, and who comes is measured with the
fastest of them, all newcomers at the same time.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec

from offbeat.errors import NetworkError, PeerError
from offbeat.topology import MAX_RATE_MBPS, MIN_RATE_MBPS, Host, Link, Topology
from offbeat.wire.lane import BLOCK_BYTES, CopyingSink, GrowingBuffer, LaneKey, OutgoingLane, blocks_on
from offbeat.wire.mesh import MeshExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from offbeat.errors import OffbeatError
    from offbeat.fabric.lane_network import LaneNetwork
    from offbeat.wire.mesh import MeshChannel

_FIRST_BYTES, _BLOCK_BYTES = 2 * BLOCK_BYTES, BLOCK_BYTES // 2  # several blocks, whatever is known of the link
_ROUND_S = 0.2
_MOST_BYTES = 64 << 20
_PINGS = 4
_SURE_MBPS = 1000.0  # beyond that a busy machine decides how fast a process sends
_CHANGED = 1.2  # more, or less, than so many times what was known
_LIKE = 0.7  # of what one switch would carry between two


@dataclass(frozen=True)
class MeasuredNetwork:
    """The knowledge of the network between the workers.

    Args:
        network: hosts are workers, by place.
        message_s: what a message costs by itself, in seconds.
        block_bytes: the size of blocks that suits the links.
        unlike: pairs, sender first, that are much slower than the network would have it.
        group_ratios: of the plan that was made first (`PathPlan`).
    """

    network: Topology
    message_s: float
    block_bytes: int
    unlike: tuple[tuple[int, int], ...] = ()
    group_ratios: tuple[float, ...] = ()


_Rate = Annotated[float, msgspec.Meta(ge=MIN_RATE_MBPS, le=MAX_RATE_MBPS)]


class HostRate(msgspec.Struct, frozen=True, array_like=True):
    """The rates of a host's link with the one switch, in 10^6 bit/s."""

    rank: int
    out_mbps: _Rate
    in_mbps: _Rate


class NetworkReport(msgspec.Struct, frozen=True):
    """The knowledge of a network, as one worker tells it to others.

    Args:
        hosts: of the one switch; none where people have said which links there are.
        message_s: what a message costs by itself, in seconds.
        group_ratios: of the plan (`PathPlan`).
    """

    hosts: Annotated[tuple[HostRate, ...], msgspec.Meta(max_length=4096)]
    message_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    group_ratios: Annotated[tuple[Annotated[float, msgspec.Meta(ge=0, le=1e6)], ...], msgspec.Meta(max_length=8)] = ()


_reports = msgspec.json.Decoder(NetworkReport | None)


def measure_network(network: LaneNetwork, meet: Callable[[str], list[str]]) -> MeasuredNetwork:
    """Measure what the links carry. Collective; raises as `measure_rates`."""
    rates, message_s = measure_rates(network, meet, partners(network.world, network.place))
    star = star_of(rates, network.members)
    return _measured(star, message_s, tuple(unlike(rates, star)))


def known_among(
    network: LaneNetwork, before: MeasuredNetwork | None, given: Topology | None, meet: Callable[[str], list[str]]
) -> MeasuredNetwork | None:
    """Find what is known of the network among workers some of whom have come or gone. Collective.

    Args:
        before: what this one knew among others; None for nothing.
        given: what people say of the links, with a host for each worker of the beginning; None if they do not.

    Returns:
        None if nothing is known.

    Raises:
        NetworkError: if a link is lost meanwhile.
        PeerError: if it is told nonsense.
    """
    mine = None
    if before is not None:
        known = () if given is not None else _host_rates(before.network)
        mine = NetworkReport(known, before.message_s, before.group_ratios)
    told = meet(msgspec.json.encode(mine).decode())[0]  # the one that has been there longest knows for all
    try:
        report = _reports.decode(told)
    except msgspec.MsgspecError as error:
        raise PeerError(f"Cannot understand what rank {network.members[0]} knows of the network: {error}.") from error
    if report is None:
        return None
    if given is not None and max(network.members) < len(given.hosts):
        names = [given.hosts[rank].name for rank in network.members]
        return _measured(given.among(names), report.message_s, group_ratios=report.group_ratios)
    hosts = {host.rank: host for host in report.hosts}
    there = [rank for rank in network.members if rank in hosts]
    if len(there) == len(network.members):
        star = _star([hosts[rank] for rank in network.members])
        return _measured(star, report.message_s, group_ratios=report.group_ratios)
    if not there:
        return None
    came = [rank for rank in network.members if rank not in hosts]
    there.sort(key=lambda rank: (-min(hosts[rank].out_mbps, hosts[rank].in_mbps), rank))
    turns: list[int | None] = []
    for first in range(0, len(came), len(there)):
        pairs = dict(zip(came[first:], there, strict=False))
        partner = (pairs | {b: a for a, b in pairs.items()}).get(network.rank)
        turns.append(None if partner is None else network.members.index(partner))
    rates, message_s = measure_rates(network, meet, turns)
    hosts |= {host.rank: host for host in _fastest_of(rates, network.members) if host.rank in came}
    star = _star([hosts[rank] for rank in network.members])
    return _measured(star, min(message_s, report.message_s), group_ratios=report.group_ratios)


def measure_again(
    network: LaneNetwork, known: MeasuredNetwork, meet: Callable[[str], list[str]]
) -> MeasuredNetwork | None:
    """Measure what the links carry now. Collective; raises as `measure_rates`.

    The links of hosts with one switch are measured as at first. Of another network that people have described those
    between two hosts are, several at a time, and the others are taken to be as they were.

    Returns:
        None if it is much as it was known.
    """
    fan = known.network.is_fan
    turns = partners(network.world, network.place) if fan else _turns_of_links(known.network, network.place)
    rates, message_s = measure_rates(network, meet, turns)
    places = {host.name: place for place, host in enumerate(known.network.hosts)}
    links = []
    for link in known.network.links:
        a, b = places.get(link.a), places.get(link.b)
        there, back = link.rates_mbps
        if a is not None and b is not None:
            there, back = _now(there, rates[a][b]), _now(back, rates[b][a])
        elif fan and a is not None:
            there, back = _now(there, max(rates[a])), _now(back, max(row[a] for row in rates))
        elif fan and b is not None:
            there, back = _now(there, max(row[b] for row in rates)), _now(back, max(rates[b]))
        if (there, back) != link.rates_mbps:
            link = replace(link, rate_mbps=there or MAX_RATE_MBPS, back_mbps=back or MAX_RATE_MBPS)
        links.append(link)
    if tuple(links) == known.network.links:
        return None
    network_now = replace(known.network, links=tuple(links))
    return _measured(network_now, min(message_s, known.message_s), group_ratios=known.group_ratios)


def can_measure_again(network: Topology) -> bool:
    """Whether `measure_again` would find out anything."""
    hosts = {host.name for host in network.hosts}
    return network.is_fan or any(link.a in hosts and link.b in hosts for link in network.links)


def _now(known_mbps: float | None, rate_bytes_per_s: float) -> float | None:
    """The rate that holds for a link: what was known, unless it is far from what was measured."""
    measured_mbps = min(_SURE_MBPS, _mbps(rate_bytes_per_s))
    before_mbps = min(_SURE_MBPS, known_mbps or MAX_RATE_MBPS)
    is_alike = not rate_bytes_per_s or 1 / _CHANGED < measured_mbps / before_mbps < _CHANGED
    return known_mbps if is_alike else measured_mbps


def _turns_of_links(network: Topology, place: int) -> list[int | None]:
    """The partner of a host in each round, if those with a link between them have one round each."""
    places = {host.name: number for number, host in enumerate(network.hosts)}
    pairs = dict.fromkeys(
        (min(places[link.a], places[link.b]), max(places[link.a], places[link.b]))
        for link in network.links
        if link.a in places and link.b in places
    )
    rounds: list[dict[int, int]] = []
    for a, b in pairs:
        free = next((one for one in rounds if a not in one and b not in one), None)
        if free is None:
            rounds.append(free := {})
        free[a], free[b] = b, a
    return [one.get(place) for one in rounds]


def _measured(
    network: Topology,
    message_s: float,
    unlike: tuple[tuple[int, int], ...] = (),
    group_ratios: tuple[float, ...] = (),
) -> MeasuredNetwork:
    return MeasuredNetwork(network, message_s, blocks_on(network), unlike, group_ratios)


def known_network(network: LaneNetwork, topology: Topology, meet: Callable[[str], list[str]]) -> MeasuredNetwork:
    """Go by what people say of the links; what a message costs is measured. Collective.

    Raises:
        NetworkError: if a link is lost meanwhile.
    """
    turns, message_s = partners(network.world, network.place), math.inf
    channel, base = network.measurements(len(turns) * _PINGS)
    for turn, partner in enumerate(turns):
        if partner is not None:
            pair = PairExchange(channel, network.members[partner], network.patience)
            message_s = min(message_s, network.loop.run(pair.ping(base + turn * _PINGS)))
        meet("")
    return _measured(topology, min(float(text) for text in meet(str(message_s))))


def measure_rates(
    network: LaneNetwork, meet: Callable[[str], list[str]], turns: Sequence[int | None]
) -> tuple[list[list[float]], float]:
    """Measure how fast pairs send to each other. Collective.

    Args:
        network: the links.
        meet: tells the others a text, and returns what all say, by place.
        turns: the place of this worker's partner in each round, None where it has none; as many rounds for all.

    Returns:
        By places of sender and receiver, in bytes per second, 0 for those that are no pair; and what a message costs by
        itself, in seconds.

    Raises:
        NetworkError: if a link is lost meanwhile, or carries next to nothing; on all, after as many meetings.
    """
    world, error = network.world, ""
    channel, base = network.measurements(2 * len(turns) * (_PINGS + 1))
    sizes = [[_FIRST_BYTES] * world for _ in range(world)]
    rates: list[list[float]] = []
    message_s = math.inf
    for number in range(2):
        mine, paces = [0.0] * world, [0.0] * world
        for turn, partner in enumerate(turns):
            if partner is not None:
                out, come = sizes[network.place][partner], sizes[partner][network.place]
                first = base + (turn + number * len(turns)) * (_PINGS + 1)
                pair = PairExchange(channel, network.members[partner], network.patience)
                try:
                    message_s = min(message_s, network.loop.run(pair.ping(first)))
                    mine[partner], took_s = network.loop.run(pair.both_ways(first + _PINGS, out, come))
                    paces[partner] = come / took_s
                except NetworkError as failed:  # told below, so that all meet as often
                    error = error or str(failed)
            meet("")  # the next round begins when all links are free
        said = [json.loads(text) for text in meet(json.dumps([message_s, mine, paces, error]))]
        if len(said) != world:
            raise NetworkError("Cannot measure the links: a worker was lost meanwhile.")
        if error := next((one for *_, one in said if one), ""):
            raise NetworkError(error)
        message_s = min(one for one, *_ in said)
        rates, by_pace = (
            [[said[receiver][which][sender] for receiver in range(world)] for sender in range(world)]
            for which in (1, 2)
        )
        # Not by the rate: where workers wait for a processor, little may come fast, and much takes its time.
        sizes = [
            [int(min(_MOST_BYTES, max(_FIRST_BYTES, pace * _ROUND_S))) // BLOCK_BYTES * BLOCK_BYTES for pace in row]
            for row in by_pace
        ]
    return rates, message_s


def partners(world: int, rank: int) -> list[int | None]:
    """The partner of a rank in each round, None where it has none; after all rounds it has had everybody once.

    >>> [partners(3, rank) for rank in range(3)]
    [[None, 1, 2], [2, 0, None], [1, None, 0]]
    """
    places = world + world % 2
    found: list[int | None] = []
    for turn in range(places - 1):
        circle = [0, *((i + turn) % (places - 1) + 1 for i in range(places - 1))]
        at = circle.index(rank)
        other = circle[places - 1 - at]
        found.append(other if other < world else None)
    return found


def star_of(rates: Sequence[Sequence[float]], ranks: Sequence[int]) -> Topology:
    """The one switch that explains the rates between hosts best: each is as fast as with its fastest partner.

    Args:
        rates: by sender and receiver.
        ranks: of the workers.
    """
    return _star(_fastest_of(rates, ranks))


def _fastest_of(rates: Sequence[Sequence[float]], ranks: Sequence[int]) -> list[HostRate]:
    columns = zip(*rates, strict=True)
    return [
        HostRate(rank, _mbps(max(row)), _mbps(max(column)))
        for rank, row, column in zip(ranks, rates, columns, strict=True)
    ]


def _star(hosts: Sequence[HostRate]) -> Topology:
    links = tuple(Link(f"h{one.rank}", "switch", one.out_mbps, one.in_mbps) for one in hosts)
    return Topology(tuple(Host(f"h{one.rank}") for one in hosts), links)


def _host_rates(star: Topology) -> tuple[HostRate, ...]:
    """The hosts of a network that `_star` made."""
    rates = {link.a: link.rates_mbps for link in star.links}
    return tuple(
        HostRate(int(host.name.removeprefix("h")), *(rate or MAX_RATE_MBPS for rate in rates[host.name]))
        for host in star.hosts
    )


def unlike(rates: Sequence[Sequence[float]], network: Topology) -> list[tuple[int, int]]:
    """The pairs, sender first, that are much slower than one switch would have it."""
    links = [link.rates_mbps for link in network.links]
    return [
        (a, b)
        for a, row in enumerate(rates)
        for b, rate in enumerate(row)
        if a != b and _mbps(rate) < _LIKE * min(links[a][0] or MAX_RATE_MBPS, links[b][1] or MAX_RATE_MBPS)
    ]


class PairExchange:
    """A measurement of two workers, each of which sends to the other at the same time.

    Args:
        channel: of measurements.
        partner: the other's rank.
        patience: for how long an exchange may take.
    """

    def __init__(self, channel: MeshChannel, partner: int, patience: timedelta) -> None:
        self._channel, self._partner, self._patience_s = channel, partner, patience.total_seconds()

    async def ping(self, first: int) -> float:
        """Exchange a byte `_PINGS` times, one after the other; the shortest time that it took."""
        took_s = [(await self.both_ways(number, 1, 1))[1] for number in range(first, first + _PINGS)]
        return min(took_s)

    async def both_ways(self, number: int, out_bytes: int, come_bytes: int) -> tuple[float, float]:
        """Send and receive so much; return how fast it came, in bytes per second, and how long all of it took.

        Raises:
            NetworkError: if the link is lost, or it takes longer than the network's patience; names the direction.
        """
        over, stamps = asyncio.Event(), list[tuple[float, int]]()
        errors: list[OffbeatError] = []
        under_way = {"receive", "send"}

        def failed(error: OffbeatError) -> None:
            errors.append(error)
            over.set()

        def has_ended(direction: str) -> None:
            under_way.discard(direction)
            if not under_way:
                over.set()

        target = GrowingBuffer(memoryview(bytearray(come_bytes)), 0)
        target.follow(lambda: stamps.append((time.monotonic(), target.progress)))
        lane = OutgoingLane(
            LaneKey(self._channel.number, number, 0), GrowingBuffer(memoryview(bytearray(out_bytes))), (0,),
            most_bytes=_BLOCK_BYTES, sent=lambda: has_ended("send"),
        )  # fmt: skip
        sinks = {(self._partner, 0): CopyingSink(target, lambda: has_ended("receive"))}
        began_s = time.monotonic()
        self._channel.begin(number, MeshExchange("a measurement", sinks, [(self._partner, lane)], failed))
        try:
            async with asyncio.timeout(self._patience_s):
                await over.wait()
        except TimeoutError:
            here = f"{target.progress} of the {come_bytes} bytes that it sends are here" * ("receive" in under_way)
            there = f"it has not confirmed the {out_bytes} bytes sent to it" * ("send" in under_way)
            raise NetworkError(
                f"Cannot measure the link with rank {self._partner} in {self._patience_s:g} s: "
                f"{' and '.join(filter(None, (here, there)))}. Give the workers a longer timeout, or look at the link."
            ) from None
        if errors:
            raise errors[0]
        self._channel.end(number)
        (first_s, first_bytes), (last_s, _) = stamps[0], stamps[-1]
        return (come_bytes - first_bytes) / max(last_s - first_s, 1e-6), time.monotonic() - began_s


def _mbps(rate_bytes_per_s: float) -> float:
    return min(MAX_RATE_MBPS, max(MIN_RATE_MBPS, rate_bytes_per_s * 8e-6))
