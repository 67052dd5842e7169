"""Halving and doubling: in each step two ranks exchange half of what they still have to sum up, until each has a part.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005). Every rank sends
2 (N - 1) / N of the vector in 2 log2 N steps. The nearest ranks exchange most.

Where N is no power of two, ranks do not exchange: each sends to one rank and hears another one, equally far away on
either side, as in the all-gather of Bruck et al. ("Efficient algorithms for all-to-all communications in multiport
message-passing systems", 1997). That takes as many steps as the next power of two, and sends as little as above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.collective.paths import Paths
from offbeat.collective.trees import Edge, SpanningTree, all_reduce
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology


@dataclass(frozen=True)
class HalvingDoubling:
    """Recursive halving, and doubling."""

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        nodes = Paths(network).ranks
        return all_reduce(short_name(self), nodes, doubling_trees(range(nodes)))


def doubling_trees(order: Sequence[int]) -> list[SpanningTree]:
    """The trees by which each chunk is spread from its owner, for ranks that stand in this order.

    In a step each rank that has the chunk sends it on: first by half the number of ranks, in the end to the next one.
    """
    nodes = len(order)
    is_power = nodes & nodes - 1 == 0
    trees = []
    for owner in range(nodes):
        edges = []
        # Who has the chunk: how far away, and how many ranks from there on shall hear it from there.
        have = {0: nodes}
        distance, step = nodes, 0
        while distance > 1:
            distance = (distance + 1) // 2
            for away, reach in list(have.items()):
                if reach > distance:
                    have[away] = distance
                    have[away + distance] = reach - distance
                    here, there = (
                        owner ^ one if is_power else (owner + one) % nodes for one in (away, away + distance)
                    )
                    edges.append(Edge(order[here], order[there], step))
            step += 1
        trees.append(SpanningTree(order[owner], tuple(edges)))
    return trees
