"""The ring: each chunk goes round once to be summed up, and once to be spread.

Every rank sends to the next one alone, and sends 2 (N - 1) / N of the vector: Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.collective.trees import Edge, SpanningTree, all_reduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology


@dataclass(frozen=True)
class Ring:
    """One ring through all ranks, in their order."""

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        nodes = len(network.hosts)
        tour = range(nodes)
        down, up = ([chain(way, way.index(root)) for root in tour] for way in (tour, tour[::-1]))
        return all_reduce("Ring()", nodes, down, reduce_trees=up)


def chain(tour: Sequence[int], root: int) -> SpanningTree:
    """The path along a tour, from its place `root` on, until it has been round."""
    nodes = len(tour)
    at = [tour[(root + i) % nodes] for i in range(nodes)]
    return SpanningTree(at[0], tuple(Edge(at[i], at[i + 1], i) for i in range(nodes - 1)))
