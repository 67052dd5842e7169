"""The ring: each chunk goes round once to be summed up, and once to be spread.

Every rank sends to the next one alone, and sends 2 (N - 1) / N of the vector: Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.collective.number_check import check_number
from offbeat.collective.paths import Paths
from offbeat.collective.tour import shortest_tour
from offbeat.collective.trees import Edge, SpanningTree, all_reduce
from offbeat.number_range import TruthValues
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology


@dataclass(frozen=True)
class Ring:
    """One ring through all ranks.

    Args:
        by_links: in the order that is best for the links (`offbeat.collective.tour`), instead of that of ranks.
    """

    by_links: bool = False

    def __post_init__(self) -> None:
        check_number(self, "by_links", TruthValues(), "True or False")

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        tour = order(network, by_links=self.by_links)
        up, down = round_trip(tour)
        return all_reduce(short_name(self), len(tour), down, reduce_trees=up)


@dataclass(frozen=True)
class BidirectionalRing:
    """Two rings in opposite directions, each for one half of the vector.

    Args:
        by_links: in the order that is best for the links (`offbeat.collective.tour`), instead of that of ranks.
    """

    by_links: bool = False

    def __post_init__(self) -> None:
        check_number(self, "by_links", TruthValues(), "True or False")

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        tour = order(network, by_links=self.by_links)
        trips = [round_trip(tour), round_trip(tour[::-1])]
        up, down = ([tree for trip in trips for tree in trip[part]] for part in (0, 1))
        return all_reduce(short_name(self), len(tour), down, reduce_trees=up)


def order(network: Topology, *, by_links: bool) -> tuple[int, ...]:
    """The ranks of a network one after the other."""
    paths = Paths(network)
    return shortest_tour(network, paths) if by_links else tuple(range(paths.ranks))


def round_trip(tour: Sequence[int]) -> tuple[list[SpanningTree], list[SpanningTree]]:
    """Trees of a ring, from and to each rank in order: along which it is summed up, and along which it is spread."""
    up = [chain(tour[::-1], len(tour) - 1 - place) for place in range(len(tour))]
    return up, [chain(tour, place) for place in range(len(tour))]


def chain(tour: Sequence[int], root: int) -> SpanningTree:
    """The path along a tour, from its place `root` on, until it has been round."""
    nodes = len(tour)
    at = [tour[(root + i) % nodes] for i in range(nodes)]
    return SpanningTree(at[0], tuple(Edge(at[i], at[i + 1], i) for i in range(nodes - 1)))
