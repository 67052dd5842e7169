"""The double binary tree: two trees, each for one half of the vector, in which no rank is an inner node twice.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009), as in NCCL. A
vector goes up and down in 2 log2 N hops, and as blocks follow each other each rank sends it no more than twice. Where
hosts have a link each, that is about as long as a ring for large vectors, and far less for small ones. All edges are
of one step: the first blocks go first, in whichever tree they are.
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
class DoubleBinaryTree:
    """Two binary trees at the same time."""

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        nodes = Paths(network).ranks
        # The leaves of the first tree are the odd places. Read backwards, or from one further on, they are even.
        second = range(nodes)[::-1] if nodes % 2 == 0 else [*range(1, nodes), 0]
        return all_reduce(short_name(self), nodes, [binary_tree(range(nodes)), binary_tree(second)])


def binary_tree(order: Sequence[int]) -> SpanningTree:
    """The tree whose inner nodes stand between their subtrees, below the first rank.

    Place v = 2^k (2 j + 1) is k steps above the leaves. Its parent is that of v - 2^k and v + 2^k which is one step
    above it; or the former, where the latter is beyond the end.
    """
    nodes = len(order)
    children: dict[int, list[int]] = {}
    for place in range(1, nodes):
        bit = place & -place
        parent = (place ^ bit) | bit << 1
        children.setdefault(parent if parent < nodes else place ^ bit, []).append(place)
    edges, level = [], [0]
    while level:
        edges += [Edge(order[parent], order[child]) for parent in level for child in children.get(parent, [])]
        level = [child for parent in level for child in children.get(parent, [])]
    return SpanningTree(order[0], tuple(edges))
