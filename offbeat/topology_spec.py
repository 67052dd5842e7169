"""Descriptions of a network, as a scenario has them: `[topology]`, `[[link]]` and `[[switch]]`.

[topology]  a preset, or that the links are those of a table
[[link]]    a link of the table, or what is different about one of the preset
[[switch]]  an end of links that is no host, of the table
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import tomli_w

from offbeat import toml_reader
from offbeat.errors import ScenarioError
from offbeat.topology import (
    MAX_DIMS,
    MAX_HOSTS,
    Host,
    Link,
    Topology,
    check_dims,
    check_latency,
    check_name,
    check_rate,
    check_ways,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TopologyKind = Literal["star", "ring", "mesh", "torus", "fat-tree", "bigraph", "table"]
_DIMS: dict[TopologyKind, tuple[int, int, str]] = {
    "star": (1, 1, "the number of hosts"),
    "ring": (1, 1, "the number of hosts"),
    "mesh": (1, MAX_DIMS, "the hosts in each dimension"),
    "torus": (1, MAX_DIMS, "the hosts in each dimension"),
    "fat-tree": (2, 2, "the links down from a switch and the levels of switches"),
    "bigraph": (2, 2, "the hosts of a switch and the number of switches"),
    "table": (0, 0, "nothing"),
}


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[link]]`: one link. What is left out is as the topology has it, and the way back as the way there.

    Args:
        rate_mbps: from a to b, in 10^6 bit/s.
        back_mbps: from b to a.
        latency_ms: that it adds in each direction.
    """

    a: str
    b: str
    rate_mbps: float | None = None
    back_mbps: float | None = None
    latency_ms: float | None = None

    def over(self, usual: Link) -> Link:
        """The link, where this one would be there without it."""
        there, back = usual.rates_mbps if usual.a == self.a else usual.rates_mbps[::-1]
        rate_mbps = there if self.rate_mbps is None else self.rate_mbps
        if self.back_mbps is not None:
            back = self.back_mbps
        elif self.rate_mbps is not None:
            back = rate_mbps
        latency_ms = usual.latency_ms if self.latency_ms is None else self.latency_ms
        return Link(self.a, self.b, rate_mbps, None if back == rate_mbps else back, latency_ms)


class SwitchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[switch]]`: an end of links that is no host; it only forwards."""

    name: str


class TopologySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[topology]`: which hosts there are, and which links; see `offbeat.topology.Topology` for each kind.

    Args:
        dims: as the kind takes them: of a ring or star the number of hosts, of a mesh or torus those in each dimension,
            of a fat tree the links down from a switch and the levels, of a BiGraph the hosts of a switch and the number
            of switches.
        rate_mbps: of each link, in 10^6 bit/s per direction.
        latency_ms: of each link.
        mtu: bytes that a frame carries, IP header included, in the lab.
        ranks: all hosts, in order of rank; as the topology has them if it is empty.
    """

    kind: TopologyKind
    dims: list[int] = []
    rate_mbps: float | None = None
    latency_ms: float = 0.0
    mtu: Annotated[int, msgspec.Meta(ge=1280, le=9000)] = 1500
    ranks: list[str] = []

    def build(self, links: Sequence[LinkSpec], switches: Sequence[SwitchSpec]) -> Topology:
        """The topology, of equal hosts.

        Raises:
            ScenarioError: if it cannot be; the text ends with the path in a scenario.
        """
        self.check()
        usual = Link("", "", self.rate_mbps, latency_ms=self.latency_ms)
        if self.kind == "table":
            return self._ranked(_table(usual, links, switches))
        if switches:
            raise ScenarioError(
                f"Cannot name switches of kind {self.kind!r}: it says itself which there are. Leave them out, or use "
                'kind = "table" (switch).'
            )
        return self._ranked(overridden(self._preset(), links))

    def _preset(self) -> Topology:
        rate_mbps, latency_ms = self.rate_mbps, self.latency_ms
        match self.kind, self.dims:
            case "mesh", dims:
                return Topology.mesh(*dims, rate_mbps=rate_mbps, latency_ms=latency_ms)
            case "torus", dims:
                return Topology.torus(*dims, rate_mbps=rate_mbps, latency_ms=latency_ms)
            case "fat-tree", [arity, levels]:
                return Topology.fat_tree(arity, levels, rate_mbps=rate_mbps, latency_ms=latency_ms)
            case "bigraph", [hosts, switches]:
                return Topology.bigraph(hosts, switches, rate_mbps=rate_mbps, latency_ms=latency_ms)
            case "ring", [count]:
                return Topology.ring(count, rate_mbps=rate_mbps, latency_ms=latency_ms)
        names = [f"h{index}" for index in range(min(self.dims[0], MAX_HOSTS + 1))]
        return Topology.star(names, rate_mbps=rate_mbps, latency_ms=latency_ms)

    def check(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            ScenarioError: if one cannot.
        """
        if self.rate_mbps is not None:
            check_rate(self.rate_mbps, "topology.rate_mbps")
        check_latency(self.latency_ms, "topology.latency_ms")
        least, most, what = _DIMS[self.kind]
        if not least <= len(self.dims) <= most and (self.dims or self.kind != "star"):
            many = f"{least}" if least == most else f"{least} to {most}"
            raise ScenarioError(
                f"Cannot build a topology of kind {self.kind!r} with {len(self.dims)} dims: it takes {many}, {what}. "
                "Give as many (topology.dims)."
            )
        check_dims(self.dims, self.kind)

    def _ranked(self, topology: Topology) -> Topology:
        if not self.ranks:
            return topology
        hosts = {host.name: host for host in topology.hosts}
        for index, name in enumerate(self.ranks):
            if name not in hosts or name in self.ranks[:index]:
                why = "it has a rank already" if name in hosts else f"there are {', '.join(list(hosts)[:9])}"
                raise ScenarioError(
                    f"Cannot give {name!r} rank {index}: {why}. Name each host once (topology.ranks[{index}])."
                )
        if lacking := [name for name in hosts if name not in self.ranks]:
            raise ScenarioError(
                f"Cannot tell the rank of {lacking[0]!r}: {len(self.ranks)} of {len(hosts)} hosts are named. Name all "
                "of them, or leave out ranks (topology.ranks)."
            )
        return dataclasses.replace(topology, hosts=tuple(hosts[name] for name in self.ranks))


def overridden(topology: Topology, links: Sequence[LinkSpec]) -> Topology:
    """A topology in which some links are different; of several for the same one the last holds.

    Raises:
        ScenarioError: if there is no such link.
    """
    if not links:
        return topology
    places = {frozenset((link.a, link.b)): index for index, link in enumerate(topology.links)}
    made = list(topology.links)
    for index, spec in enumerate(links):
        _check_link(spec, f"link[{index}]")
        place = places.get(frozenset((spec.a, spec.b)))
        if place is None:
            beside = sorted({arc.target for arc in topology.arcs if arc.source == spec.a})
            there = f"{spec.a!r} is linked to {', '.join(beside)}" if beside else f"there is no {spec.a!r}"
            raise ScenarioError(
                f"Cannot change the link between {spec.a!r} and {spec.b!r}: {there}. Name two ends of a link "
                f"(link[{index}])."
            )
        made[place] = spec.over(made[place])
    return dataclasses.replace(topology, links=tuple(made))


def check_links(links: Sequence[LinkSpec]) -> None:
    """Refuse two tables for the same link.

    Raises:
        ScenarioError: if there are, naming the second one.
    """
    first: dict[frozenset[str], int] = {}
    for index, spec in enumerate(links):
        ends = frozenset((spec.a, spec.b))
        if (before := first.setdefault(ends, index)) != index:
            raise ScenarioError(
                f"Cannot have two links between {spec.a!r} and {spec.b!r}: link[{index}] has the ends of "
                f"link[{before}]. Leave one out; back_mbps is the rate of the way back (link[{index}])."
            )


def _table(usual: Link, links: Sequence[LinkSpec], switches: Sequence[SwitchSpec]) -> Topology:
    if not links:
        raise ScenarioError("Cannot build a network without links: none is given. Add a [[link]] for each (link).")
    names = [switch.name for switch in switches]
    for index, name in enumerate(names):
        check_name(name, f"switch[{index}].name")
        if name in names[:index]:
            raise ScenarioError(
                f"Cannot build switch {name!r} twice: switch[{index}] has the name of switch[{names.index(name)}]. "
                f"Give each its own name (switch[{index}].name)."
            )
    for index, spec in enumerate(links):
        for key, end in (("a", spec.a), ("b", spec.b)):
            check_name(end, f"link[{index}].{key}")
        _check_link(spec, f"link[{index}]")
    made = [spec.over(dataclasses.replace(usual, a=spec.a, b=spec.b)) for spec in links]
    ends = dict.fromkeys(end for link in made for end in (link.a, link.b))
    hosts = tuple(Host(end) for end in ends if end not in names)
    if not hosts:
        raise ScenarioError(
            "Cannot build a network of switches alone: no end of a link is a host. Leave out some of them (switch)."
        )
    check_ways([*(host.name for host in hosts), *names], made, "link")
    return Topology(hosts, tuple(made), tuple(names))


def _check_link(spec: LinkSpec, path: str) -> None:
    if spec.a == spec.b:
        raise ScenarioError(f"Cannot link {spec.a!r} to itself: a link joins two nodes. Name another one ({path}.b).")
    for key, rate_mbps in (("rate_mbps", spec.rate_mbps), ("back_mbps", spec.back_mbps)):
        if rate_mbps is not None:
            check_rate(rate_mbps, f"{path}.{key}")
    if spec.latency_ms is not None:
        check_latency(spec.latency_ms, f"{path}.latency_ms")


class NetworkFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that says which network connects the workers: `[topology]`, `[[link]]` and `[[switch]]`, as in a scenario.

    Hosts are ranks in their order, or in that of `ranks`.

    >>> NetworkFile.from_toml("topology = { kind = 'ring', dims = [3], rate_mbps = 100 }").build().hosts[2].name
    'h2'
    """

    topology: TopologySpec
    link: list[LinkSpec] = []
    switch: list[SwitchSpec] = []

    @classmethod
    def from_toml(cls, text: str) -> NetworkFile:
        """Read it.

        Raises:
            ScenarioError: if it is no such file.
        """
        table = toml_reader.decode(text, "topology", ScenarioError)
        try:
            return msgspec.convert(table, cls)
        except msgspec.ValidationError as error:
            raise ScenarioError(f"Cannot read the topology: {error}. See docs/lab.md for the keys.") from error

    @classmethod
    def read(cls, path: Path, where: str = "") -> NetworkFile:
        """Read it from a file.

        Args:
            where: people named the file, for the end of the error.

        Raises:
            ScenarioError: if there is no such file.
        """
        try:
            text = path.read_text()
        except OSError as error:
            raise ScenarioError(f"Cannot read the topology in {path}: {error.strerror}{where}.") from error
        except UnicodeDecodeError as error:
            raise ScenarioError(
                f"Cannot read the topology in {path}: it is no text in UTF-8. Name a TOML file{where}."
            ) from error
        return cls.from_toml(text)

    def to_toml(self) -> str:
        """Write it as a file."""
        return tomli_w.dumps(_without_none(msgspec.to_builtins(self)))

    def build(self) -> Topology:
        """The topology.

        Raises:
            ScenarioError: if it cannot be.
        """
        return self.topology.build(self.link, self.switch)


def _without_none(table: Any) -> Any:
    if isinstance(table, dict):
        return {key: _without_none(value) for key, value in table.items() if value is not None}
    return [_without_none(one) for one in table] if isinstance(table, list) else table
