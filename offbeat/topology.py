"""Hosts and the links between them: what a lab builds, what a simulator prices, what a bound is computed from.

A topology is a graph of nouns without any I/O. A `Link` is full duplex: its rate holds in each direction on its own, as
on switched Ethernet. Ends of links are hosts or switches; a switch is a node that only forwards.

>>> topology = Topology.star(["a", "b", "c", "d"], rate_mbps=200)
>>> round(topology.allreduce_bound_s(25_000_000), 3)
1.5
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_RATE_MBPS = 0.1
"""Below this a single full frame takes more than 0.1 s and no training step ends."""
MAX_RATE_MBPS = 10_000.0
"""Above this no token bucket on one machine keeps its promise; measured rates saturate well below."""
MAX_HOSTS = 10_000
"""More are a mistake in a file rather than a cluster."""
_QUEUE_S = 0.025
_QUEUE_MIN_BYTES = 128 * 1024

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True)
class Host:
    """A machine: its name and by how much its computation is slower than the reference (1.0; 2.0 is half as fast)."""

    name: str
    compute_factor: float = 1.0


@dataclass(frozen=True)
class Link:
    """A full-duplex cable between two nodes. `rate_mbps` is per direction, in 10^6 bit/s; None is not shaped."""

    a: str
    b: str
    rate_mbps: float | None = None


@dataclass(frozen=True)
class Topology:
    """Hosts, links and switches, checked when made.

    Raises:
        ScenarioError: if a name is used twice or is no host name, a link ends at an unknown node, or a rate or a
            compute factor cannot be.
    """

    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    switches: tuple[str, ...] = ("switch",)

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise ScenarioError(
                f"Cannot build {len(self.hosts)} hosts: a scenario has 1 to {MAX_HOSTS}. Change the number of "
                "hosts (hosts)."
            )
        check_names([host.name for host in self.hosts], taken=self.switches, path="hosts")
        for index, host in enumerate(self.hosts):
            check_compute_factor(host.compute_factor, f"hosts[{index}].compute_factor")
        nodes = {host.name for host in self.hosts} | set(self.switches)
        for index, link in enumerate(self.links):
            for end in (link.a, link.b):
                if end not in nodes:
                    raise ScenarioError(
                        f"Cannot link {link.a!r} to {link.b!r}: {end!r} is neither a host nor a switch. "
                        f"Use one of {', '.join(sorted(nodes))} (links[{index}])."
                    )
            if link.rate_mbps is not None:
                check_rate(link.rate_mbps, f"links[{index}].rate_mbps")

    @classmethod
    def star(
        cls,
        names: Sequence[str],
        *,
        rate_mbps: float | None = None,
        compute_factor: float = 1.0,
    ) -> Topology:
        """Equal hosts, each with one link of `rate_mbps` (10^6 bit/s per direction) to one switch."""
        hosts = tuple(Host(name, compute_factor) for name in names)
        return cls(hosts, tuple(Link(name, "switch", rate_mbps) for name in names))

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
        """The graph as text: for one switch a fan of its hosts, else one line per link."""
        notes = {
            host.name: f"{host.name}  (compute x{host.compute_factor:g})" if host.compute_factor != 1 else host.name
            for host in self.hosts
        }
        if len(self.switches) != 1 or any(self.switches[0] not in (link.a, link.b) for link in self.links):
            return "\n".join(f"{notes.get(k.a, k.a)} ── {_rate(k)} ── {notes.get(k.b, k.b)}" for k in self.links)
        switch = self.switches[0]
        width = max((len(_rate(link)) for link in self.links), default=0)
        middle = (len(self.links) - 1) // 2
        lines = []
        for index, link in enumerate(self.links):
            first, last = index == 0, index == len(self.links) - 1
            stem = f"{switch} ─" if index == middle else " " * (len(switch) + 2)
            joint = "─" if first and last else ("┬" if index == middle else "┌") if first else ("└" if last else "├")
            if index == middle and not first and not last:
                joint = "┼"
            host = link.a if link.b == switch else link.b
            lines.append(f"{stem}{joint}── {_rate(link):>{width}} ── {notes[host]}")
        return "\n".join(lines)


def check_names(names: Sequence[str], *, taken: Sequence[str], path: str) -> None:
    """Refuse a host name that is malformed or used twice; `path` is where the list of hosts stands.

    Raises:
        ScenarioError: if so, naming the second use.
    """
    counts: Counter[str] = Counter(taken)
    for index, name in enumerate(names):
        if _NAME.fullmatch(name) is None:
            raise ScenarioError(
                f"Cannot name a host {name!r}: a name is 1 to 32 of a-z, 0-9 and '-', not starting with '-'. "
                f"Rename it ({path}[{index}].name)."
            )
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


def queue_bytes(rate_mbps: float) -> int:
    """Size of the queue at the head of each link of `rate_mbps`: 25 ms, as of a switch with shallow buffers."""
    return max(int(rate_mbps * 1e6 / 8 * _QUEUE_S), _QUEUE_MIN_BYTES)


def _rate(link: Link) -> str:
    return "not shaped" if link.rate_mbps is None else f"{link.rate_mbps:g} Mbit/s"
