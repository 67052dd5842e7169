"""Halving and doubling with rank mapping: partners of each step at opposite layers of a BiGraph, and no two ways alike.

Dong et al., "EFLOPS: algorithm and system co-design for a high performance distributed training platform" (HPCA 2020).
A BiGraph has two layers of switches, each switch linked to all of the other layer. Partners differ in one bit of their
place; places with an even number of ones go to the upper layer, those with an odd number to the lower one, so that each
exchange takes one link between layers. The partners of the hosts at one switch are at different switches in each step,
so that no link carries two messages at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.collective.halving_doubling import doubling_trees
from offbeat.collective.paths import Paths
from offbeat.collective.trees import all_reduce
from offbeat.errors import PlanError
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology


@dataclass(frozen=True)
class HDRM:
    """Halving and doubling on a BiGraph.

    Its numbers of switches and of hosts at each are powers of two, with no more hosts at a switch than switches in a
    layer.
    """

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order.

        Raises:
            PlanError: if it is no such BiGraph.
        """
        return all_reduce(short_name(self), Paths(network).ranks, doubling_trees(_order(network)))


def _order(network: Topology) -> list[int]:
    """The rank at each place.

    A place is, from its lowest bit: one that makes its number of ones even or odd, `low`, and `high`. In the upper
    layer `high` is the switch and `low` the host at it. In the lower layer the switch is `high` with the bits of `low`
    turned over in it, as high up as they go: for hosts at one upper switch these are different switches, whichever bit
    of the place is turned over, and the other way round.
    """
    layers = _layers(network)
    switches, hosts = len(layers[0]), len(layers[0][0])
    host_bits, switch_bits = hosts.bit_length() - 1, switches.bit_length() - 1
    taken = [0] * switches
    order = []
    for place in range(2 * hosts * switches):
        rest = place >> 1
        low, high = rest & hosts - 1, rest >> host_bits
        if place.bit_count() % 2 == 0:
            order.append(layers[0][high][low])
        else:
            switch = high ^ low << switch_bits - host_bits
            order.append(layers[1][switch][taken[switch]])
            taken[switch] += 1
    return order


def _layers(network: Topology) -> list[list[list[int]]]:
    """The ranks at each switch of each layer."""
    at = {}
    between: dict[str, set[str]] = {switch: set() for switch in network.switches}
    for arc in network.arcs:
        if arc.source not in between:
            at[arc.source] = arc.target
        elif arc.target in between:
            between[arc.source].add(arc.target)
    first = at.get(network.hosts[0].name, "")
    lower = between.get(first, set())
    upper = set(between) - lower
    ranks = [
        [
            [rank for rank, host in enumerate(network.hosts) if at.get(host.name) == switch]
            for switch in between
            if switch in layer
        ]
        for layer in (upper, lower)
    ]
    is_whole = all(between[switch] == lower for switch in upper) and all(between[switch] == upper for switch in lower)
    sizes = {len(hosts) for layer in ranks for hosts in layer}
    is_even = len(upper) == len(lower) and len(sizes) == 1 and 0 < min(sizes) <= len(upper)
    if not is_whole or not is_even or any(n & n - 1 for n in (*sizes, len(upper))):
        raise PlanError(
            f"Cannot plan HDRM for {len(network.hosts)} hosts and {len(network.switches)} switches: it is for a "
            "BiGraph, whose numbers of switches and of hosts at each are powers of two, with no more hosts at a switch "
            "than switches in a layer. Use HalvingDoubling."
        )
    return ranks
