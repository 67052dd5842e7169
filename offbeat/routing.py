"""Ways through a network: from each node that is passed to the next one, for a destination.

A `Routing` says for one destination by which arc each node sends on what is meant for it. So the way from a node does
not depend on where a packet came from, as in forwarding tables, and as the lab sets them up in the kernel.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Arc(NamedTuple):
    """One direction of a link.

    Args:
        source, target: names of the nodes at its ends.
        rate_mbps: in 10^6 bit/s; None if it is not shaped.
        latency_ms: that it adds to what passes.
        link: its number among the topology's links.
    """

    source: str
    target: str
    rate_mbps: float | None
    latency_ms: float
    link: int


class Routing(Protocol):
    """A rule that finds ways."""

    def towards(self, destination: str, arcs: Sequence[Arc]) -> dict[str, Arc]:
        """The arc by which each node sends what is meant for `destination`; nodes without a way there are left out."""


@dataclass(frozen=True)
class ShortestPath:
    """Fewest hops; of those ways the one whose slowest arc is fastest; of those the one by the first names."""

    def towards(self, destination: str, arcs: Sequence[Arc]) -> dict[str, Arc]:
        """See `Routing`."""
        widest_mbps = {destination: math.inf}
        found: dict[str, Arc] = {}
        for node, candidates in closer(destination, arcs):
            widths = {arc: min(_rate(arc), widest_mbps[arc.target]) for arc in candidates}
            found[node] = min(candidates, key=lambda arc: (-widths[arc], arc.target, arc.link))
            widest_mbps[node] = widths[found[node]]
        return found


@dataclass(frozen=True)
class DimensionOrder:
    """Along the last dimension of a grid of hosts, then along the one before, and so on.

    Where a dimension is a ring, the shorter way round; upwards if both are equally long.

    Args:
        hosts: names, in row-major order.
        dims: hosts in each dimension.
        wraps: whether the last one in a dimension is linked to the first one.
    """

    hosts: tuple[str, ...]
    dims: tuple[int, ...]
    wraps: bool

    def towards(self, destination: str, arcs: Sequence[Arc]) -> dict[str, Arc]:
        """See `Routing`."""
        best: dict[tuple[str, str], Arc] = {}
        for arc in arcs:
            ends = arc.source, arc.target
            if ends not in best or _rate(arc) > _rate(best[ends]):
                best[ends] = arc
        end = self.place(self.hosts.index(destination))
        found = {}
        for index, host in enumerate(self.hosts):
            if host != destination:
                found[host] = best[host, self.hosts[self.number(self._step(self.place(index), end))]]
        return found

    def place(self, number: int) -> tuple[int, ...]:
        """The coordinates of a host.

        >>> DimensionOrder(("a", "b", "c", "d", "e", "f"), (2, 3), wraps=False).place(5)
        (1, 2)
        """
        coordinates = []
        for size in reversed(self.dims):
            number, coordinate = divmod(number, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def number(self, place: Sequence[int]) -> int:
        """The number of the host with these coordinates."""
        number = 0
        for size, coordinate in zip(self.dims, place, strict=True):
            number = number * size + coordinate
        return number

    def neighbours(self, place: Sequence[int], *, parallel: bool = False) -> Iterable[tuple[int, ...]]:
        """The next place upwards in each dimension, if there is one: what a host is linked to, each link once.

        Args:
            parallel: a ring of two has two links, as it has where it is longer.
        """
        for axis, size in enumerate(self.dims):
            after = place[axis] + 1
            if after < size or (self.wraps and size > (1 if parallel else 2)):
                yield (*place[:axis], after % size, *place[axis + 1 :])

    def _step(self, place: tuple[int, ...], end: tuple[int, ...]) -> tuple[int, ...]:
        axis = max(axis for axis, (here, there) in enumerate(zip(place, end, strict=True)) if here != there)
        here, there, size = place[axis], end[axis], self.dims[axis]
        is_up = (there - here) % size <= size / 2 if self.wraps else there > here
        return (*place[:axis], (here + (1 if is_up else -1)) % size, *place[axis + 1 :])


@dataclass(frozen=True)
class CommonAncestor:
    """Up to a nearest common ancestor, and down.

    Where several links go up, the destination's number says which, digit by digit, so that what goes to different hosts
    is spread over all of them (Zahavi, "D-Mod-K routing providing non-blocking traffic for shift permutations on real
    life fat trees", 2010).

    Args:
        hosts: names, in order of their numbers.
    """

    hosts: tuple[str, ...]

    def towards(self, destination: str, arcs: Sequence[Arc]) -> dict[str, Arc]:
        """See `Routing`."""
        heights = _distances(self.hosts, arcs)
        number, found = self.hosts.index(destination) if destination in self.hosts else 0, {}
        for node, candidates in closer(destination, arcs):
            digit = number // len(candidates) ** max(0, heights[node] - 1) % len(candidates)
            found[node] = sorted(candidates, key=lambda arc: (arc.target, arc.link))[digit]
        return found


def closer(destination: str, arcs: Sequence[Arc]) -> list[tuple[str, list[Arc]]]:
    """The arcs of each node that lead one hop closer to the destination; nodes in order of distance."""
    distances = _distances([destination], arcs)
    candidates: dict[str, list[Arc]] = {node: [] for node in distances if node != destination}
    for arc in arcs:
        if arc.source in candidates and distances[arc.source] == distances[arc.target] + 1:
            candidates[arc.source].append(arc)
    return list(candidates.items())


def _distances(targets: Iterable[str], arcs: Sequence[Arc]) -> Mapping[str, int]:
    """Hops from each node to the nearest of these, in ascending order; nodes without a way there are left out."""
    before: dict[str, list[str]] = {}
    for arc in arcs:
        before.setdefault(arc.target, []).append(arc.source)
    distances = dict.fromkeys(targets, 0)
    queue = deque(distances)
    while queue:
        node = queue.popleft()
        for source in before.get(node, []):
            if source not in distances:
                distances[source] = distances[node] + 1
                queue.append(source)
    return distances


def _rate(arc: Arc) -> float:
    return math.inf if arc.rate_mbps is None else arc.rate_mbps
