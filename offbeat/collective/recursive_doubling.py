"""Recursive doubling: in each step two ranks exchange all they have, for vectors so small that steps alone count.

There are log2 N steps, half as many as anywhere else, and each rank sends the vector in each of them. Ranks beyond a
power of two give theirs to a partner before, and hear the sum from it after (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from offbeat.collective.algorithm import Algorithm, Chunk, Op
from offbeat.collective.paths import Paths
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.topology import Topology


@dataclass(frozen=True)
class RecursiveDoubling:
    """Exchanges of the whole vector.

    What a rank sends in a step is what it had before it, although its partner's arrives at the same time. All ranks get
    the same bits, as a sum of two does not depend on which is first.
    """

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        nodes = Paths(network).ranks
        levels = nodes.bit_length() - 1
        partners = 1 << levels
        first = 1 if nodes > partners else 0
        ops: list[Op] = []
        came: list[tuple[int, ...]] = [()] * nodes
        for rank in range(partners, nodes):
            came[rank - partners] = (len(ops),)
            ops.append(Op("reduce", 0, rank, rank - partners, 0))
        for level in range(levels):
            before = list(came)
            for rank in range(partners):
                other = rank ^ 1 << level
                came[other] = (*before[other], len(ops))
                ops.append(Op("reduce", 0, rank, other, first + level, before[rank]))
        ops += [
            Op("copy", 0, rank - partners, rank, first + levels, came[rank - partners])
            for rank in range(partners, nodes)
        ]
        return Algorithm(short_name(self), nodes, (Chunk(Fraction(0), Fraction(1)),), tuple(ops))
