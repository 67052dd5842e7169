"""The network as methods see it: ranks and arcs are numbers, and what lies between two ranks is a list of arcs."""

from __future__ import annotations

import math
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.routing import DimensionOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.routing import Arc
    from offbeat.topology import Topology


class Paths:
    """The hosts of a network as ranks, in their order, and the ways between them.

    Args:
        network: with a way from each host to each other one.

    Attributes:
        names: of the hosts.
        ranks: how many there are.
        arcs: of the network, in its order.
        byte_s: how long one byte takes on each arc, in seconds; 0 where it is not shaped.
        latency_s: of each arc.
    """

    def __init__(self, network: Topology) -> None:
        self._network = network
        self.names = [host.name for host in network.hosts]
        self._ranks = {name: rank for rank, name in enumerate(self.names)}
        self._numbers = {arc: number for number, arc in enumerate(network.arcs)}
        self._found: dict[tuple[int, int], tuple[int, ...]] = {}
        self.ranks = len(self.names)
        self.arcs: Sequence[Arc] = network.arcs
        self.byte_s = tuple(_byte_s(arc) for arc in self.arcs)
        self.latency_s = tuple(arc.latency_ms / 1e3 for arc in self.arcs)
        self._hubs = self._star()
        self._check_connected()

    def between(self, source: int, destination: int) -> tuple[int, ...]:
        """The arcs from one rank to another, in order."""
        if (source, destination) not in self._found:
            if self._hubs is not None:
                found: tuple[int, ...] = (self._hubs[source][0], self._hubs[destination][1])
            else:
                way = self._network.route(self.names[source], self.names[destination])
                found = tuple(self._numbers[arc] for arc in way)
            self._found[source, destination] = found
        return self._found[source, destination]

    def message_s(self, source: int, destination: int, size_bytes: float) -> float:
        """The time that so many bytes take from one rank to another, arc by arc."""
        return sum(self.latency_s[arc] + size_bytes * self.byte_s[arc] for arc in self.between(source, destination))

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """The ranks to which the way from each rank leads through no other rank.

        In a grid they are in the order of its axes, downwards first, as in the code published with MultiTree. Else the
        next rank is first, so that where all take theirs at the same time, each is somebody else's.
        """
        return tuple(
            tuple(other for other in self._near(rank) if not self._passes_a_rank(rank, other))
            for rank in range(self.ranks)
        )

    @property
    def are_direct(self) -> bool:
        """Whether hosts are linked to each other."""
        return any(arc.source in self._ranks and arc.target in self._ranks for arc in self.arcs)

    @property
    def are_star(self) -> bool:
        """Whether all hosts hang on one switch by one link each; rates may differ in both directions."""
        return self._hubs is not None

    @cached_property
    def out_arcs(self) -> dict[str, list[int]]:
        """The arcs that leave each node."""
        found: dict[str, list[int]] = {}
        for number, arc in enumerate(self.arcs):
            found.setdefault(arc.source, []).append(number)
        return found

    @cached_property
    def in_arcs(self) -> dict[str, list[int]]:
        """The arcs that enter each node."""
        found: dict[str, list[int]] = {}
        for number, arc in enumerate(self.arcs):
            found.setdefault(arc.target, []).append(number)
        return found

    def _near(self, rank: int) -> list[int]:
        """The ranks that some way reaches without passing another rank."""
        seen, todo = {self.names[rank]: None}, deque([self.names[rank]])
        while todo:
            for number in self.out_arcs.get(todo.popleft(), []):
                node = self.arcs[number].target
                if node not in seen:
                    seen[node] = None
                    if node not in self._ranks:
                        todo.append(node)
        found = [self._ranks[node] for node in seen if node in self._ranks and self._ranks[node] != rank]
        grid = self._network.routing
        if not isinstance(grid, DimensionOrder):
            return sorted(found, key=lambda other: (other - rank) % self.ranks)
        here = grid.place(grid.hosts.index(self.names[rank]))
        return sorted(
            found, key=lambda other: _direction(here, grid.place(grid.hosts.index(self.names[other])), grid.dims)
        )

    def _passes_a_rank(self, source: int, destination: int) -> bool:
        return any(self.arcs[arc].target in self._ranks for arc in self.between(source, destination)[:-1])

    def _star(self) -> list[tuple[int, int]] | None:
        """The arcs to the switch and back of each rank, if there is one switch and nothing else."""
        ends = {(arc.source, arc.target): number for number, arc in enumerate(self.arcs)}
        if len(self._network.switches) != 1 or len(self.arcs) != 2 * self.ranks:
            return None
        (switch,) = self._network.switches
        if any((name, switch) not in ends for name in self.names):
            return None
        return [(ends[name, switch], ends[switch, name]) for name in self.names]

    def _check_connected(self) -> None:
        for arc in self.arcs:
            rate = arc.rate_mbps
            if rate is not None and not 0 < rate < math.inf:
                raise PlanError(
                    f"Cannot plan over the link from {arc.source!r} to {arc.target!r} at {rate:g} Mbit/s: a rate is "
                    "above 0. Measure it again, or leave the link out."
                )
        reached, todo = {self.names[0]}, [self.names[0]]
        while todo:
            for number in self.out_arcs.get(todo.pop(), []):
                if self.arcs[number].target not in reached:
                    reached.add(self.arcs[number].target)
                    todo.append(self.arcs[number].target)
        for name in self.names:
            if name not in reached:
                raise PlanError(
                    f"Cannot plan among {self.ranks} hosts: no way leads from {self.names[0]!r} to {name!r}. Add a "
                    "link between them, or leave one of them out."
                )


class InterfacePaths(Paths):
    """The same with the hosts' network interfaces, through which all goes that a host sends, and receives.

    Args:
        interfaces: of each host, each as fast as its fastest link.
    """

    def __init__(self, network: Topology, interfaces: int) -> None:
        super().__init__(network)
        self._first = len(self.arcs)
        fastest = {
            name: min(self.byte_s[arc] for arc in (*self.out_arcs[name], *self.in_arcs[name])) for name in self.names
        }
        shared = tuple(fastest[name] / interfaces for name in self.names)
        self.byte_s = (*self.byte_s, *shared, *shared)
        self.latency_s = (*self.latency_s, *(0.0 for _ in (*shared, *shared)))

    def between(self, source: int, destination: int) -> tuple[int, ...]:
        """The arcs from one rank to another, and the interfaces at both ends, numbered behind them."""
        sends, receives = self._first + source, self._first + self.ranks + destination
        return (sends, *super().between(source, destination), receives)


def _direction(here: tuple[int, ...], there: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, bool]:
    """The axis along which a neighbour lies, and whether upwards."""
    axis = next(axis for axis, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
    return axis, (there[axis] - here[axis]) % dims[axis] == 1


def _byte_s(arc: Arc) -> float:
    return 0.0 if arc.rate_mbps is None else 8e-6 / arc.rate_mbps if arc.rate_mbps else math.inf
