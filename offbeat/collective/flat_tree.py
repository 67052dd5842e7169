"""The flat tree: all send the vector to one rank, which sends the sum to all; for very small ones, and few ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.collective.number_check import check_number
from offbeat.collective.paths import Paths
from offbeat.collective.trees import Edge, SpanningTree, all_reduce
from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology


@dataclass(frozen=True)
class FlatTree:
    """Two steps, and N - 1 messages of the root in the second.

    Args:
        root: the rank that makes the sum.

    Raises:
        PlanError: if there is no such rank.
    """

    root: int = 0

    def __post_init__(self) -> None:
        check_number(self, "root", WholeNumbers(0), "a rank, a whole number from 0")

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        nodes = Paths(network).ranks
        return all_reduce(short_name(self), nodes, [flat_tree(nodes, check_root(self.root, nodes))])


def flat_tree(nodes: int, root: int) -> SpanningTree:
    """The tree in which all others are children of the root, the next rank first."""
    return SpanningTree(root, tuple(Edge(root, (root + turn) % nodes) for turn in range(1, nodes)))


def check_root(root: int, nodes: int) -> int:
    """The root, if it is a rank.

    Raises:
        PlanError: if it is none.
    """
    if not 0 <= root < nodes:
        raise PlanError(f"Cannot take rank {root} as the root: there are ranks 0 to {nodes - 1}. Choose one of them.")
    return root
