"""The 2-D ring: rings along rows and along columns, instead of one through all ranks.

A chunk is summed up along one dimension and then along the other, and spread the same way back (Ying et al., "Image
classification at supercomputer scale", 2018). Of four parts of the vector two begin with rows and two with columns, in
both directions, so that on a torus all links are busy; there are 2 (rows + columns) steps instead of 2 N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.collective.number_check import check_number
from offbeat.collective.paths import Paths
from offbeat.collective.trees import Edge, SpanningTree, all_reduce
from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.routing import DimensionOrder
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology


@dataclass(frozen=True)
class Ring2D:
    """Rings along rows and columns.

    Args:
        rows: in which the ranks stand, row by row; None takes those of a grid, else as many as make it most square.

    Raises:
        PlanError: if it is below 1, or, when planned, no divisor of the number of ranks.
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            check_number(self, "rows", WholeNumbers(1), "a whole number from 1, or None")

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        nodes = Paths(network).ranks
        table = self._table(network)
        turned = [list(column) for column in zip(*table, strict=True)]
        trees = [
            _tree(one, row, column, direction)
            for one in (table, turned)
            for direction in (1, -1)
            for row in range(len(one))
            for column in range(len(one[0]))
        ]
        return all_reduce(short_name(self), nodes, trees)

    def _table(self, network: Topology) -> list[list[int]]:
        """Ranks by row and column."""
        ranks = {host.name: rank for rank, host in enumerate(network.hosts)}
        nodes, order, grid = len(ranks), list(range(len(ranks))), network.routing
        rows = self.rows or next(rows for rows in range(math.isqrt(nodes), 0, -1) if nodes % rows == 0)
        if isinstance(grid, DimensionOrder) and self.rows is None:
            order = [ranks[name] for name in grid.hosts]
            rows = nodes // grid.dims[-1]
        if nodes % rows:
            raise PlanError(
                f"Cannot plan Ring2D with rows={rows} for {nodes} hosts: rows are equally long. Choose a divisor."
            )
        length = nodes // rows
        return [order[row * length : (row + 1) * length] for row in range(rows)]


def _tree(table: Sequence[Sequence[int]], row: int, column: int, direction: int) -> SpanningTree:
    """The tree from one rank through its column, and from all of that through their rows."""
    rows, columns = len(table), len(table[0])
    down = [table[(row + direction * i) % rows][column] for i in range(rows)]
    edges = [Edge(down[i], down[i + 1], i) for i in range(rows - 1)]
    for i in range(columns - 1):
        here, there = ((column + direction * j) % columns for j in (i, i + 1))
        edges += [
            Edge(table[at % rows][here], table[at % rows][there], rows - 1 + i)
            for at in range(row, row + direction * rows, direction)
        ]
    return SpanningTree(down[0], tuple(edges))
