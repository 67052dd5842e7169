"""Programs: the other collectives, of a network's hosts, with any root.

Broadcasts and reduces go along many trees at once, each with a piece of the vector, and so use all links of the root;
all-gathers and reduce-scatters along several trees per rank. What one rank has for one other goes straight there.

How the vector is laid out: rank i's part is the i-th of N equal ones in an all-gather, reduce-scatter, gather and
scatter. In an all-to-all that part has N parts itself, of which the j-th is for rank j.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.collective.algorithm import Algorithm, Chunk, Op
from offbeat.collective.flat_tree import check_root
from offbeat.collective.greedy import Greedy
from offbeat.collective.multitree import MultiTree
from offbeat.collective.paths import Paths
from offbeat.collective.rarest_first import spread_times, trees_of
from offbeat.collective.trees import equal_parts, gather_up, spread

if TYPE_CHECKING:
    from offbeat.collective.trees import SpanningTree
    from offbeat.topology import Topology

PIECES = 64
_SIZE_BYTES = 64e6  # beside which the latency of links counts


def broadcast(network: Topology, root: int = 0, *, pieces: int = PIECES) -> Algorithm:
    """All get what the root has; one piece for small vectors, several for large ones."""
    return spread("broadcast", len(network.hosts), _trees(network, root, pieces, reverse=False))


def reduce(network: Topology, root: int = 0, *, pieces: int = PIECES) -> Algorithm:
    """The root gets the sum of what all have."""
    return gather_up("reduce", len(network.hosts), _trees(network, root, pieces, reverse=True))


def all_gather(network: Topology) -> Algorithm:
    """All get the part of each."""
    _, trees, uses_slots = _trees_of_all(network)
    return spread("all-gather", len(network.hosts), trees, uses_slots=uses_slots)


def reduce_scatter(network: Topology) -> Algorithm:
    """Each gets the sum of its part."""
    trees, _, uses_slots = _trees_of_all(network)
    return gather_up("reduce-scatter", len(network.hosts), trees, uses_slots=uses_slots)


def gather(network: Topology, root: int = 0) -> Algorithm:
    """The root gets the part of each."""
    nodes = len(network.hosts)
    check_root(root, nodes)
    return _direct("gather", nodes, [(rank, root) for rank in range(nodes)])


def scatter(network: Topology, root: int = 0) -> Algorithm:
    """Each gets its part of what the root has."""
    nodes = len(network.hosts)
    check_root(root, nodes)
    return _direct("scatter", nodes, [(root, rank) for rank in range(nodes)])


def all_to_all(network: Topology) -> Algorithm:
    """Each gets from each what that has for it; in a step all send to the rank that is equally far on."""
    nodes = len(network.hosts)
    return _direct("all-to-all", nodes, [(source, target) for source in range(nodes) for target in range(nodes)])


def _direct(name: str, nodes: int, ends: list[tuple[int, int]]) -> Algorithm:
    """One chunk for each pair of ranks, from the one to the other."""
    chunks = tuple(Chunk(*part, *pair) for part, pair in zip(equal_parts(len(ends)), ends, strict=True))
    ops = [
        Op("copy", number, source, target, (target - source) % nodes - 1)
        for number, (source, target) in enumerate(ends)
        if source != target
    ]
    return Algorithm(name, nodes, chunks, tuple(sorted(ops, key=lambda op: (op.step, op.chunk))))


def _trees(network: Topology, root: int, pieces: int, *, reverse: bool) -> list[SpanningTree]:
    """Trees from one root, or to it, along which so many pieces take the least time."""
    paths = Paths(network)
    sources = [check_root(root, paths.ranks)] * pieces
    _, sent = spread_times(paths, sources, _SIZE_BYTES / pieces, seed=0, reverse=reverse)
    return trees_of(sent, sources)


def _trees_of_all(network: Topology) -> tuple[list[SpanningTree], list[SpanningTree], bool]:
    """Trees to all ranks and from them; whether their steps are time slots."""
    if len({arc.rate_mbps for arc in network.arcs}) <= 1:
        trees = MultiTree().trees(network)
        return trees, trees, True
    return *Greedy().trees(network), False
