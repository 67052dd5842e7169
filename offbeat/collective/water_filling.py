"""Water-filling: each host sums up and hands out a part of the vector as large as its link allows, without detours.

For hosts at one switch whose links differ. Host i, which owns a part f_i of a vector of S, sends what others own and
N - 1 times what it owns itself, and hears as much: S (1 + f_i (N - 2)) in each direction. All links are busy equally
long, for S tau, where

    f_i = (b_i tau - 1) / (N - 2)        tau = (m + N - 2) / (sum of b_i over the m hosts that own something)

and a host too slow for that is a leaf and owns nothing. So all is done after S max(tau, 1 / min b), which is the least
that any method needs (`offbeat.collective.bounds`), if sums are handed out while others are still made: the vector goes
in pieces, one after the other. With equal links f_i is 1/N. Machines that only help, without a gradient of their own,
would make it the optimal shares of BytePS (Jiang et al., OSDI 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from offbeat.collective.algorithm import Algorithm, Chunk, Op
from offbeat.collective.number_check import check_number
from offbeat.collective.paths import Paths
from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.topology import Topology

# Connections that share a slow link do not share it evenly: one would be far behind the others, and alone in the end.
_PIECES_AHEAD = 3
_PER_MBPS = 100  # rates are rounded to this, so that parts are short fractions


@dataclass(frozen=True)
class WaterFilling:
    """Direct transfers to the owners of parts and back, for hosts that hang on one switch.

    Args:
        pieces: of the vector, of which one is handed out while the next is summed up.

    Raises:
        PlanError: if there are fewer than 1.
    """

    pieces: int = 32

    def __post_init__(self) -> None:
        check_number(self, "pieces", WholeNumbers(1), "a whole number from 1")

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order.

        Raises:
            PlanError: if they do not hang on one switch by one link each.
        """
        rates = rates_at_switch(network)
        nodes, parts = len(rates), owned_parts(rates)
        fastest_first = sorted(range(nodes), key=lambda rank: (-rates[rank], rank))
        chunks: list[Chunk] = []
        ops: list[Op] = []
        for piece in range(self.pieces):
            begin = Fraction(piece, self.pieces)
            for owner, part in enumerate(parts):
                if not part:
                    continue
                number = len(chunks)
                chunks.append(Chunk(begin, begin + part / self.pieces))
                begin = chunks[-1].end
                # The slowest is added last, so that nobody else's contribution has to wait for it in memory.
                others = [(rank, (owner - rank) % nodes) for rank in fastest_first if rank != owner]
                first = 2 * nodes * piece
                came = tuple(range(len(ops), len(ops) + nodes - 1))
                ops += [Op("reduce", number, rank, owner, first + turn) for rank, turn in others]
                ops += [
                    Op("copy", number, owner, (owner + turn) % nodes, first + nodes + turn, came)
                    for turn in range(1, nodes)
                ]
        return Algorithm(short_name(self), nodes, tuple(chunks), tuple(ops), most_ahead=_PIECES_AHEAD * 2 * nodes)


def rates_at_switch(network: Topology) -> list[Fraction]:
    """Rates of the hosts at one switch, in 10^6 bit/s: the lower one of the two directions.

    A link that is not shaped counts as the fastest that is; if none is shaped, as 1.

    Raises:
        PlanError: if they do not hang on one switch by one link each.
    """
    if not Paths(network).are_star:
        raise PlanError(
            f"Cannot plan WaterFilling for {len(network.hosts)} hosts, {len(network.switches)} switches and "
            f"{len(network.links)} links: it is for hosts that hang on one switch by one link each. Use Greedy or "
            "MultiTree."
        )
    links = [network.uplink(host.name) for host in network.hosts]
    shaped = [[rate for rate in link.rates_mbps if rate is not None] for link in links]
    fastest = max((rate for rates in shaped for rate in rates), default=1.0)
    return [Fraction(max(1, round(min(rates, default=fastest) * _PER_MBPS)), _PER_MBPS) for rates in shaped]


def owned_parts(rates: Sequence[Fraction]) -> list[Fraction]:
    """Parts of the vector that hosts with these rates own; 0 for leaves.

    >>> [str(part) for part in owned_parts([Fraction(rate) for rate in (200, 200, 200, 50)])]
    ['1/3', '1/3', '1/3', '0']
    """
    nodes = len(rates)
    if nodes <= 2:
        return [Fraction(1, nodes)] * nodes
    owners = set(range(nodes))
    while True:
        tau = Fraction(len(owners) + nodes - 2) / sum(rates[rank] for rank in owners)
        parts = [(rates[rank] * tau - 1) / (nodes - 2) if rank in owners else Fraction(0) for rank in range(nodes)]
        leaves = {rank for rank in owners if parts[rank] <= 0}
        if not leaves:
            return parts
        owners -= leaves
