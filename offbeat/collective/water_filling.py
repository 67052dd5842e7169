"""Direct shards on one switch, as large as each host's link has room for.

Every host sends each shard to the one that owns it, which sends the sum to all. Host i that owns the part f_i of a
vector of S sends S (1 - f_i) of its own and f_i S of sums to each of the N - 1 others: S (1 + f_i (N - 2)) in all, and
receives as much. The parts are chosen so that all end at the same time tau, in units of S:

    f_i = (b_i tau - 1) / (N - 2)        tau = (m + N - 2) / sum of b_i over the m hosts that own something

A host too slow to own anything (f_i < 0) is a leaf: it sends S, and receives S, at the same time, since sums flow back
while the rest is still on its way. So the whole takes S max(tau, 1 / min b), which is the least there is, where a ring
takes 2 (N - 1) / N S / min b. With equal links it is as good as a ring; with a host that has nothing of its own it is
what BytePS does (Jiang et al., OSDI 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from offbeat.collective.algorithm import Algorithm, Chunk, Op
from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.topology import Topology

_PRECISION = 1 << 20
# Connections that share a slow link do not share it evenly, and the last one would be alone in the end.
_MOST_AHEAD = 6


@dataclass(frozen=True)
class WaterFilling:
    """Direct shards for unequal links to one switch.

    Args:
        chunks: into how many each shard is cut; sums of one flow back while the next is summed up.

    Raises:
        PlanError: if there are none.
    """

    chunks: int = 32

    def __post_init__(self) -> None:
        if type(self.chunks) is not int or not 1 <= self.chunks <= 1024:
            raise PlanError(
                f"Cannot cut shards into {self.chunks!r}: use a whole number from 1 to 1024 - at "
                "`plan.collective.chunks`."
            )

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order.

        Raises:
            PlanError: if they do not hang on one switch.
        """
        hosts, hanging = (
            {host.name for host in network.hosts},
            [{*network.switches} & {k.a, k.b} for k in network.links],
        )
        if len(network.switches) != 1 or not all(hanging) or len(hanging) != len(hosts):
            raise PlanError(
                f"Cannot plan {self!r} for a network that is no star: it has to be one switch with one link per host. "
                "Use Greedy(), or MultiTree()."
            )
        nodes = len(network.hosts)
        shares = shares_of([_rate(network, host.name) for host in network.hosts])
        chunks, ops, at = list[Chunk](), list[Op](), Fraction(0)
        owners = []
        for owner, share in enumerate(shares):
            for _ in range(self.chunks if share and nodes > 1 else 0):
                chunks.append(Chunk(at, at + share / self.chunks))
                owners.append(owner)
                at += share / self.chunks
        if nodes == 1:
            return Algorithm(repr(self), 1, (Chunk(Fraction(0), Fraction(1)),), ())
        places: dict[int, list[int]] = {}
        for number, owner in enumerate(owners):
            places.setdefault(owner, []).append(number)
        for turn in range(self.chunks):
            for owner, numbers in places.items():
                chunk, come = numbers[turn], list[int]()
                for away in range(1, nodes):
                    come.append(len(ops))
                    ops.append(Op("reduce", chunk, (owner + away) % nodes, owner, 2 * turn))
                for away in range(1, nodes):
                    ops.append(Op("copy", chunk, owner, (owner + away) % nodes, 2 * turn + 3, tuple(come)))
        return Algorithm(repr(self), nodes, tuple(chunks), tuple(ops), most_ahead=_MOST_AHEAD)


def shares_of(rates: Sequence[float]) -> list[Fraction]:
    """The part of the vector that each host owns, by the rates of their links, in whatever unit; they add up to 1.

    >>> [round(float(share), 3) for share in shares_of([200, 200, 200, 50])]
    [0.333, 0.333, 0.333, 0.0]
    >>> [round(float(share), 3) for share in shares_of([300, 200, 200, 200])]
    [0.5, 0.167, 0.167, 0.167]
    """
    nodes = len(rates)
    if nodes <= 2:  # whoever owns what, each sends the vector once
        return [Fraction(1, nodes)] * nodes
    owners = list(range(nodes))
    while True:
        tau = (len(owners) + nodes - 2) / sum(rates[i] for i in owners)
        shares = {i: (rates[i] * tau - 1) / (nodes - 2) for i in owners}
        if min(shares.values()) >= 0:
            break
        owners = [i for i in owners if shares[i] > 0]
    found = [Fraction(round(shares.get(i, 0.0) * _PRECISION), _PRECISION) for i in range(nodes)]
    largest = max(range(nodes), key=lambda i: found[i])
    found[largest] += 1 - sum(found)
    return found


def _rate(network: Topology, host: str) -> float:
    rates = [rate for rate in network.uplink(host).rates_mbps if rate is not None]
    return min(rates, default=1e6)
