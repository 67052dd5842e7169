"""Hosts and the links between them: what a lab builds, what a simulator prices, what a bound is computed from.

A topology is a graph of nouns without any I/O. A `Link` is full duplex: its rate holds in each direction on its own, as
on switched Ethernet; a direction by itself is an `Arc`. Ends of links are hosts or switches; a switch is a node that
only forwards. In a direct network, such as a torus, there are none: hosts forward as well.

>>> topology = Topology.star(["a", "b", "c", "d"], rate_mbps=200)
>>> round(topology.allreduce_bound_s(25_000_000), 3)
1.5
>>> torus = Topology.torus(4, 4, rate_mbps=10)
>>> [arc.target for arc in torus.route("h0", "h15")]
['h3', 'h15']
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from offbeat import topology_drawing
from offbeat.errors import ScenarioError, brief
from offbeat.routing import Arc as Arc
from offbeat.routing import CommonAncestor, DimensionOrder, Routing, ShortestPath

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_RATE_MBPS = 0.1
"""Below this a single full frame takes more than 0.1 s and no training step ends."""
MAX_RATE_MBPS = 10_000.0
"""Above this no token bucket on one machine keeps its promise; measured rates saturate well below."""
MAX_HOSTS = 10_000
"""More are a mistake in a file rather than a cluster."""
MAX_LATENCY_MS = 10_000.0
MAX_DIMS = 3
_QUEUE_S = 0.025
_QUEUE_MIN_BYTES = 128 * 1024

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True)
class Host:
    """A machine.

    Args:
        name: of it.
        compute_factor: by how much its computation is slower than the reference; 2.0 is half as fast.
        memory_mb: that its processes may use together, in 10^6 bytes; None for all that there is.
    """

    name: str
    compute_factor: float = 1.0
    memory_mb: int | None = None


@dataclass(frozen=True)
class Link:
    """A full-duplex cable between two nodes.

    Args:
        a, b: names of the nodes.
        rate_mbps: from a to b, in 10^6 bit/s; None is not shaped.
        back_mbps: from b to a; None is the same.
        latency_ms: that it adds in each direction.
    """

    a: str
    b: str
    rate_mbps: float | None = None
    back_mbps: float | None = None
    latency_ms: float = 0.0

    @property
    def rates_mbps(self) -> tuple[float | None, float | None]:
        """The rates from a to b, and from b to a."""
        return self.rate_mbps, self.rate_mbps if self.back_mbps is None else self.back_mbps


@dataclass(frozen=True)
class Topology:
    """Hosts, links and switches, checked when made.

    Args:
        routing: which way from one node to another.

    Raises:
        ScenarioError: if a name is used twice or is no host name, a link ends at an unknown node or where it began, a
            rate, a latency or a compute factor cannot be, or there are two nodes without a way between them.
    """

    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    switches: tuple[str, ...] = ("switch",)
    routing: Routing = field(default_factory=ShortestPath)

    def __post_init__(self) -> None:
        _check_count(len(self.hosts))
        check_names([host.name for host in self.hosts], taken=self.switches, path="hosts")
        for index, host in enumerate(self.hosts):
            check_compute_factor(host.compute_factor, f"hosts[{index}].compute_factor")
        nodes = set(self.nodes)
        for index, link in enumerate(self.links):
            for end in (link.a, link.b):
                if end not in nodes:
                    raise ScenarioError(
                        f"Cannot link {link.a!r} to {link.b!r}: {end!r} is neither a host nor a switch. "
                        f"Use one of {', '.join(sorted(nodes))} (links[{index}])."
                    )
            if link.a == link.b:
                raise ScenarioError(
                    f"Cannot link {link.a!r} to itself: a link joins two nodes. Name another one (links[{index}].b)."
                )
            for key, rate_mbps in (("rate_mbps", link.rate_mbps), ("back_mbps", link.back_mbps)):
                if rate_mbps is not None:
                    check_rate(rate_mbps, f"links[{index}].{key}")
            check_latency(link.latency_ms, f"links[{index}].latency_ms")
        # A single host needs no network.
        if self.links or len(self.hosts) > 1:
            check_ways(self.nodes, self.links, "links")

    @classmethod
    def star(
        cls,
        names: Sequence[str],
        *,
        rate_mbps: float | None = None,
        compute_factor: float = 1.0,
        latency_ms: float = 0.0,
    ) -> Topology:
        """Equal hosts, each with one link of `rate_mbps` (10^6 bit/s per direction) to one switch."""
        hosts = tuple(Host(name, compute_factor) for name in names)
        return cls(hosts, tuple(Link(name, "switch", rate_mbps, latency_ms=latency_ms) for name in names))

    @classmethod
    def ring(cls, count: int, *, rate_mbps: float | None = None, latency_ms: float = 0.0) -> Topology:
        """Hosts h0, h1, ..., each linked to the next one, and the last to the first."""
        return cls._grid((count,), "ring", rate_mbps=rate_mbps, latency_ms=latency_ms)

    @classmethod
    def mesh(cls, *dims: int, rate_mbps: float | None = None, latency_ms: float = 0.0) -> Topology:
        """A grid of hosts h0, h1, ... in row-major order, each linked to the next one in each of 1 to 3 dimensions."""
        return cls._grid(dims, "mesh", rate_mbps=rate_mbps, latency_ms=latency_ms)

    @classmethod
    def torus(
        cls, *dims: int, rate_mbps: float | None = None, latency_ms: float = 0.0, parallel: bool = False
    ) -> Topology:
        """A mesh whose last hosts are linked to the first ones as well, in each dimension.

        Args:
            parallel: where a dimension has two hosts, both links between them are there; else they are one.
        """
        return cls._grid(dims, "torus", rate_mbps=rate_mbps, latency_ms=latency_ms, parallel=parallel)

    @classmethod
    def _grid(
        cls, dims: Sequence[int], kind: str, *, rate_mbps: float | None, latency_ms: float, parallel: bool = False
    ) -> Topology:
        if not 1 <= len(dims) <= MAX_DIMS:
            raise ScenarioError(
                f"Cannot build a {kind} of {len(dims)} dimensions: it has 1 to {MAX_DIMS}. Give so many numbers "
                "(topology.dims)."
            )
        check_dims(dims, kind)
        count = math.prod(dims)
        _check_count(count)
        hosts = _hosts(count)
        order = DimensionOrder(tuple(host.name for host in hosts), tuple(dims), wraps=kind != "mesh")
        pairs = [
            (number, order.number(neighbour))
            for number in range(count)
            for neighbour in order.neighbours(order.place(number), parallel=parallel)
        ]
        links = tuple(Link(f"h{a}", f"h{b}", rate_mbps, latency_ms=latency_ms) for a, b in pairs)
        return cls(hosts, links, switches=(), routing=order)

    @classmethod
    def fat_tree(cls, arity: int, levels: int, *, rate_mbps: float | None = None, latency_ms: float = 0.0) -> Topology:
        """A k-ary n-tree: k^n hosts below n levels of k^(n-1) switches, each with k links down, and as many up.

        Switches are named s0-0, s0-1, ... in the level of the hosts' and so on (Petrini and Vanneschi, "k-ary n-trees:
        high performance networks for massively parallel architectures", 1997).
        """
        check_dims((arity, levels), "fat tree")
        _check_count(arity**levels if levels <= 32 else MAX_HOSTS + 1)
        width = arity ** (levels - 1)
        pairs = [(f"h{host}", f"s0-{host // arity}") for host in range(arity * width)]
        for level in range(levels - 1):
            # Numbers of switches that are linked differ in the digit of that level alone.
            place = arity**level
            pairs += [
                (f"s{level}-{low}", f"s{level + 1}-{low + (digit - low // place % arity) * place}")
                for low in range(width)
                for digit in range(arity)
            ]
        switches = tuple(f"s{level}-{index}" for level in range(levels) for index in range(width))
        links = tuple(Link(a, b, rate_mbps, latency_ms=latency_ms) for a, b in pairs)
        made = _hosts(arity * width)
        return cls(made, links, switches, CommonAncestor(tuple(host.name for host in made)))

    @classmethod
    def bigraph(cls, hosts: int, switches: int, *, rate_mbps: float | None = None, latency_ms: float = 0.0) -> Topology:
        """Two layers of switches, upper0, ... and lower0, ..., each linked to all of the other layer, and to hosts.

        Hosts are numbered switch by switch, the upper ones first (Dong et al., "EFLOPS: algorithm and system co-design
        for a high performance distributed training platform", 2020).

        Args:
            hosts: at each switch.
            switches: in both layers together.
        """
        check_dims((hosts, switches), "BiGraph")
        _check_count(hosts * switches)
        if switches % 2:
            raise ScenarioError(
                f"Cannot build a BiGraph of {switches} switches: two layers have equally many. Choose an even number "
                "(topology.dims[1])."
            )
        upper, lower = ([f"{layer}{index}" for index in range(switches // 2)] for layer in ("upper", "lower"))
        pairs = [(f"h{host}", (upper + lower)[host // hosts]) for host in range(hosts * switches)]
        pairs += [(above, below) for above in upper for below in lower]
        links = tuple(Link(a, b, rate_mbps, latency_ms=latency_ms) for a, b in pairs)
        made = _hosts(hosts * switches)
        return cls(made, links, (*upper, *lower), CommonAncestor(tuple(host.name for host in made)))

    @classmethod
    def from_table(
        cls, rows: Iterable[tuple[str, str, float | None, float | None, float]], switches: Sequence[str] = ()
    ) -> Topology:
        """Any network.

        Args:
            rows: of each link its two ends, its rate and the rate back, in 10^6 bit/s, and its latency, in ms.
            switches: which of the ends are no hosts. Hosts are in the order in which they come.
        """
        links = tuple(Link(*row) for row in rows)
        ends = dict.fromkeys(end for link in links for end in (link.a, link.b))
        return cls(tuple(Host(end) for end in ends if end not in switches), links, tuple(switches))

    def among(self, names: Sequence[str]) -> Topology:
        """The network among some hosts, in this order: the others still forward.

        >>> ring = Topology.ring(3).among(["h2", "h0"])
        >>> [host.name for host in ring.hosts], ring.switches, len(ring.links)
        (['h2', 'h0'], ('h1',), 3)
        >>> len(Topology.star("abc").among("ab").links)
        2
        """
        hosts, links = {host.name: host for host in self.hosts}, self.links
        others = [name for name in hosts if name not in names]
        if self.is_fan:  # elsewhere the ways of those that are left may lead through the others
            links, others = tuple(link for link in links if not {link.a, link.b} & set(others)), []
        switches = (*self.switches, *others)
        return replace(self, hosts=tuple(hosts[name] for name in names), links=links, switches=switches)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of hosts and switches."""
        return (*(host.name for host in self.hosts), *self.switches)

    @cached_property
    def arcs(self) -> tuple[Arc, ...]:
        """Both directions of each link: that from a to b first."""
        return tuple(
            arc
            for index, link in enumerate(self.links)
            for arc in (
                Arc(link.a, link.b, link.rates_mbps[0], link.latency_ms, index),
                Arc(link.b, link.a, link.rates_mbps[1], link.latency_ms, index),
            )
        )

    @property
    def is_star(self) -> bool:
        """Whether each host has one link, which carries as much back, to the one switch, and there are no others."""
        return self.is_fan and all(one == other for one, other in (link.rates_mbps for link in self.links))

    def route(self, a: str, b: str) -> tuple[Arc, ...]:
        """The way from one node to another: by dimension order in a mesh or torus, by the nearest common ancestor in a
        fat tree or BiGraph, else with the fewest hops.

        Raises:
            ScenarioError: if there is none, or no such node.
        """
        way: list[Arc] = []
        while (here := way[-1].target if way else a) != b:
            way.append(self.next_arc(here, b))
        return tuple(way)

    def next_arc(self, node: str, destination: str) -> Arc:
        """The arc by which a node sends what is meant for another one.

        Raises:
            ScenarioError: if there is no way, or no such node.
        """
        if destination not in self._towards:
            if destination not in self.nodes:
                raise _no_way(node, destination)
            self._towards[destination] = self.routing.towards(destination, self.arcs)
        if node not in self._towards[destination]:
            raise _no_way(node, destination)
        return self._towards[destination][node]

    def between(self, a: str, b: str, path: str = "links") -> int:
        """The number of the link between two nodes, whichever is its `a`; `path` is where they are named.

        Raises:
            ScenarioError: if there is none.
        """
        for index, link in enumerate(self.links):
            if {link.a, link.b} == {a, b}:
                return index
        beside = sorted({arc.target for arc in self.arcs if arc.source == a})
        there = f"{a!r} is linked to {', '.join(beside)}" if beside else f"there is no {a!r}"
        raise ScenarioError(f"Cannot find a link between {a!r} and {b!r}: {there}. Name two ends of a link ({path}).")

    def uplink(self, host: str) -> Link:
        """The only link of `host`.

        Raises:
            ScenarioError: if the host has none or several.
        """
        links = [link for link in self.links if host in (link.a, link.b)]
        if len(links) != 1:
            raise ScenarioError(
                f"Cannot tell the uplink of host {host!r}: it has {len(links)} links, one switch needs exactly 1. "
                "Give each host one link to the switch (links)."
            )
        return links[0]

    def switch_bound_s(self, size_bytes: float) -> float:
        """Least time, in seconds, in which the switch can sum `size_bytes` of each host and give all the sum.

        Each host has to send S, and to receive it: S / min b, as links carry both at once. 0 if a link is not shaped.

        >>> Topology.star(["a", "b"], rate_mbps=200).switch_bound_s(25_000_000)
        1.0
        """
        rates = [self.uplink(host.name).rate_mbps for host in self.hosts]
        return max((size_bytes * 8 / (rate * 1e6) for rate in rates if rate is not None), default=0.0)

    def allreduce_bound_s(self, size_bytes: float) -> float:
        """Least time, in seconds, in which `size_bytes` per host can be all-reduced among all hosts of one switch.

        S bytes on each of N hosts, whose links carry b in each direction: max(S / min b, 2 (N-1) S / sum b).

        * Each host has to send at least S, or nobody else would know what it holds, and to receive at least S.
        * To tell N hosts what each of them holds takes 2 (N-1) messages, where messages go one way (Harary and Schwenk,
          "The communication problem on graphs and digraphs", 1974). That holds for each byte of the sum, so all hosts
          together send at least 2 (N-1) S.

        Where all links are equal, that is the 2 (N-1)/N S/b of a ring (Patarasuk and Yuan 2009); a ring over unequal
        links takes longer than this. Links that are not shaped cost nothing.

        Raises:
            ScenarioError: if the hosts do not hang on one switch by one link each.
        """
        if len(self.switches) != 1:
            raise ScenarioError(
                f"Cannot bound an all-reduce over {len(self.switches)} switches: the bound holds for exactly 1. "
                "Use one switch (switches)."
            )
        rates_mbps = [math.inf if (rate := self.uplink(host.name).rate_mbps) is None else rate for host in self.hosts]
        count = len(self.hosts)
        if count == 1:
            return 0.0
        return size_bytes * 8e-6 * max(1 / min(rates_mbps), 2 * (count - 1) / sum(rates_mbps))

    def server_bound_s(self, size_bytes: float, servers: Sequence[str], workers: int) -> float:
        """Least time, in seconds, in which each of `workers` can push `size_bytes` to servers and pull as much.

        All of it goes through the servers' links, in both directions at once; each server holds an equal part.
        """
        rates_mbps = [rate for name in servers if (rate := self.uplink(name).rate_mbps) is not None]
        if not rates_mbps:
            return 0.0
        return workers * size_bytes * 8 / (len(servers) * min(rates_mbps) * 1e6)

    def draw(self) -> str:
        """The graph as text: a grid as such, one switch as a fan of its hosts, else one line per link."""
        notes = {host.name: note for host in self.hosts if (note := _note(host))}
        edges = [topology_drawing.DrawnLink(link.a, link.b, _rate(link)) for link in self.links]
        if isinstance(self.routing, DimensionOrder):
            order = self.routing
            return topology_drawing.grid(order.hosts, order.dims, edges, notes, wraps=order.wraps)
        if self.is_fan:
            return topology_drawing.fan(self.switches[0], edges, notes)
        return topology_drawing.lines(edges, notes)

    @property
    def is_fan(self) -> bool:
        """Whether each host has one link, to the one switch, and there are no others."""
        ends = {frozenset((link.a, link.b)) for link in self.links}
        spokes = {frozenset((host.name, *self.switches)) for host in self.hosts}
        return len(self.switches) == 1 and ends == spokes and len(self.links) == len(self.hosts)

    @cached_property
    def _towards(self) -> dict[str, dict[str, Arc]]:
        return {}


def check_ways(nodes: Sequence[str], links: Sequence[Link], path: str) -> None:
    """Refuse a network in which some node cannot be reached; `path` is where the list of links stands.

    Raises:
        ScenarioError: if so, naming two nodes without a way between them.
    """
    beside: dict[str, list[str]] = {}
    for link in links:
        beside.setdefault(link.a, []).append(link.b)
        beside.setdefault(link.b, []).append(link.a)
    reached, queue = {nodes[0]}, [nodes[0]]
    while queue:
        new = [node for node in beside.get(queue.pop(), []) if node not in reached]
        reached.update(new)
        queue += new
    for node in nodes:
        if node not in reached:
            raise _no_way(nodes[0], node, path)


def check_name(name: str, path: str) -> None:
    """Refuse what is no name of a node.

    Raises:
        ScenarioError: if so.
    """
    if _NAME.fullmatch(name) is None:
        raise ScenarioError(
            f"Cannot name a host {brief(name)!r}: a name is 1 to 32 of a-z, 0-9 and '-', not starting with '-'. "
            f"Rename it ({path})."
        )


def check_names(names: Sequence[str], *, taken: Sequence[str], path: str) -> None:
    """Refuse a host name that is malformed or used twice; `path` is where the list of hosts stands.

    Raises:
        ScenarioError: if so, naming the second use.
    """
    counts: Counter[str] = Counter(taken)
    for index, name in enumerate(names):
        check_name(name, f"{path}[{index}].name")
        if counts[name]:
            first = f"{path}[{names.index(name)}]" if name not in taken else "a switch"
            raise ScenarioError(
                f"Cannot build host {name!r} twice: {path}[{index}] has the name of {first}. "
                f"Give each host its own name ({path}[{index}].name)."
            )
        counts[name] += 1


def check_rate(rate_mbps: float, path: str) -> None:
    """Refuse a rate (10^6 bit/s) that no lab can shape.

    Raises:
        ScenarioError: if it is not within `MIN_RATE_MBPS` and `MAX_RATE_MBPS`.
    """
    if not MIN_RATE_MBPS <= rate_mbps <= MAX_RATE_MBPS:
        raise ScenarioError(
            f"Cannot shape a link to {rate_mbps:g} Mbit/s: the lab shapes {MIN_RATE_MBPS:g} to {MAX_RATE_MBPS:g} "
            f"Mbit/s. Choose a rate in that range ({path})."
        )


def check_latency(latency_ms: float, path: str) -> None:
    """Refuse what no link adds.

    Raises:
        ScenarioError: if it is not from 0 to `MAX_LATENCY_MS`.
    """
    if not 0 <= latency_ms <= MAX_LATENCY_MS:
        raise ScenarioError(
            f"Cannot delay a link by {latency_ms:g} ms: 0 to {MAX_LATENCY_MS:g} can be. Choose such a latency ({path})."
        )


def check_compute_factor(compute_factor: float, path: str) -> None:
    """Refuse a compute factor that is not a slowdown or speedup between 0.01 and 100.

    Raises:
        ScenarioError: if so.
    """
    if not 0.01 <= compute_factor <= 100:
        raise ScenarioError(
            f"Cannot slow a host down by {compute_factor:g}: a compute factor lies between 0.01 and 100 "
            f"(1 is the reference, 2 half as fast). Choose one in that range ({path})."
        )


def _note(host: Host) -> str:
    """Say how a host differs from others; "" if it does not."""
    slow = [f"compute x{host.compute_factor:g}"] if host.compute_factor != 1 else []
    return ", ".join([*slow, *([f"{host.memory_mb} MB"] if host.memory_mb else [])])


def queue_bytes(rate_mbps: float) -> int:
    """Size of the queue at the head of each link of `rate_mbps`: 25 ms, as of a switch with shallow buffers."""
    return max(int(rate_mbps * 1e6 / 8 * _QUEUE_S), _QUEUE_MIN_BYTES)


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_HOSTS:
        raise ScenarioError(
            f"Cannot build {count} hosts: a scenario has 1 to {MAX_HOSTS}. Change the number of hosts (hosts)."
        )


def check_dims(dims: Sequence[int], kind: str) -> None:
    """Refuse sizes below 1.

    Raises:
        ScenarioError: if there is one.
    """
    for index, size in enumerate(dims):
        if size < 1:
            raise ScenarioError(
                f"Cannot build a {kind} with {size} in a dimension: each has at least 1. Choose a larger number "
                f"(topology.dims[{index}])."
            )


def _hosts(count: int) -> tuple[Host, ...]:
    return tuple(Host(f"h{index}") for index in range(count))


def _no_way(a: str, b: str, path: str = "links") -> ScenarioError:
    return ScenarioError(f"Cannot find a way from {a!r} to {b!r}: no links lead there. Add one between them ({path}).")


def _rate(link: Link) -> str:
    there, back = ("not shaped" if rate is None else f"{rate:g}" for rate in link.rates_mbps)
    words = there if there == back else f"{there}, back {back}"
    words += "" if back == "not shaped" else " Mbit/s"
    return words + (f" + {link.latency_ms:g} ms" if link.latency_ms else "")
