"""Pipelined trees: each chunk is summed up and spread along one tree, both at once, as blocks follow each other.

A tree carries its chunk once up and once down each of its links, in opposite directions. So the vector takes what the
busiest link carries, however chunks go to and fro meanwhile, and no bound of a reduce-scatter with an all-gather behind
it holds: on a mesh of 4x4 that is 0.94 S/B, and trees that share all links equally take 0.625, which is the least for
any method. TTO overlaps the phases of three such trees on meshes (Laskar et al., HPCA 2024).

Trees are found one by one, each over the links that those before left free, with a price of a link that grows
exponentially with its load; then each in turn is taken out and found again. That is how fractional packings of spanning
trees are approximated (Plotkin, Shmoys and Tardos, 1995). Blocks have to be small for it: there are as many on their
way as there are links from leaf to root and back.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offbeat.collective.number_check import check_number
from offbeat.collective.paths import Paths
from offbeat.collective.trees import Edge, SpanningTree, all_reduce
from offbeat.number_range import WholeNumbers
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology

_STEEPNESS = 20.0  # by e to this power a link is dearer that carries as much as all may on average
_DEPTH = 0.1  # by so much more for each link from where the tree began, as deep trees need more blocks on their way
_ROUNDS = 8
_CLOSE = 1.005  # to what the busiest arc carries at least: no further round is worth it
_LINKS = 500_000  # that may be looked at in all: a second or two


@dataclass(frozen=True)
class PipelinedTrees:
    """Trees that share all links, whatever their rates, as equally as it goes.

    Args:
        count: of trees, and of chunks.
        seed: of the draws between links that cost the same.

    Raises:
        PlanError: if there are fewer than 1.
    """

    count: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self, "count", WholeNumbers(1), "a whole number from 1")
        check_number(self, "seed", WholeNumbers(0), "a whole number from 0")

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        made = all_reduce(short_name(self), len(network.hosts), self.trees(network))
        # The first blocks go first, up or down, in whichever tree they are.
        return replace(made, ops=tuple(op._replace(step=0) for op in made.ops))

    def trees(self, network: Topology) -> list[SpanningTree]:
        """Find the trees; each has its root in its middle."""
        packing = _Packing(Paths(network), self.count, self.seed)
        return [_from_the_middle(packing.ranks, tree) for tree in packing.find()]


class _Packing:
    """Trees, each of which loads the arcs of its edges once."""

    def __init__(self, paths: Paths, count: int, seed: int) -> None:
        self.ranks = paths.ranks
        self.count = count
        self.random = random.Random(seed)
        self.load = [0] * len(paths.arcs)
        # Of each rank its neighbours, with the arcs there and back.
        self.near = [
            [(other, (*paths.between(rank, other), *paths.between(other, rank))) for other in paths.neighbours[rank]]
            for rank in range(paths.ranks)
        ]
        slowest = max(paths.byte_s, default=0.0)
        # How long an arc takes for a chunk, where the slowest takes 1; for one that is not shaped nearly nothing.
        self.times = [one / slowest if one else 1e-9 for one in paths.byte_s] if slowest else [1.0] * len(paths.arcs)
        rates = [sum(1 / self.times[arc] for arc in paths.out_arcs.get(name, ())) for name in paths.names]
        self.least = max(2 * (self.ranks - 1) / sum(rates), 1 / min(rates)) * count if self.ranks > 1 else 0.0

    def find(self) -> list[list[tuple[int, int]]]:
        """The trees of the best round, as edges."""
        if self.ranks == 1:
            return [[] for _ in range(self.count)]
        trees = [self._grow(7 * number % self.ranks) for number in range(self.count)]
        best, found = self._busiest(), list(trees)
        for _ in range(min(_ROUNDS, _LINKS // (self.count * sum(map(len, self.near))))):
            if best <= self.least * _CLOSE:
                break
            for number, tree in enumerate(trees):
                for _, _, arcs in tree:
                    for arc in arcs:
                        self.load[arc] -= 1
                trees[number] = self._grow(self.random.randrange(self.ranks))
            if (busiest := self._busiest()) < best:
                best, found = busiest, list(trees)
        return [[(a, b) for a, b, _ in tree] for tree in found]

    def _busiest(self) -> float:
        return max(load * time for load, time in zip(self.load, self.times, strict=True))

    def _price(self, arcs: Iterable[int], depth: int) -> float:
        """The price of loading these arcs once more."""
        loads = [(self.load[arc] + 1) * self.times[arc] / self.least for arc in arcs]
        return (1 + _DEPTH * depth) * sum(math.exp(min(_STEEPNESS * load, 600.0)) for load in loads)

    def _grow(self, root: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """A tree of the cheapest edges (Prim), each of which makes its arcs dearer for the next."""
        depths = {root: 0}
        edges: list[tuple[int, int, tuple[int, ...]]] = []
        offers: list[tuple[float, int, float, int, int, tuple[int, ...]]] = []
        newest = root
        while len(depths) < self.ranks:
            for other, arcs in self.near[newest]:
                if other not in depths:
                    depth = depths[newest]
                    offer = (self._price(arcs, depth), depth, self.random.random(), newest, other, arcs)
                    heapq.heappush(offers, offer)
            while True:
                price, depth, draw, rank, other, arcs = heapq.heappop(offers)
                if other in depths:
                    continue
                dearer = self._price(arcs, depth)
                if dearer <= price:
                    break
                heapq.heappush(offers, (dearer, depth, draw, rank, other, arcs))
            depths[other] = depth + 1
            edges.append((rank, other, arcs))
            for arc in arcs:
                self.load[arc] += 1
            newest = other
        return edges


def _from_the_middle(ranks: int, edges: Sequence[tuple[int, int]]) -> SpanningTree:
    """The tree of these edges, rooted where the way to the farthest leaf is shortest."""
    near: list[list[int]] = [[] for _ in range(ranks)]
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)

    def parents(root: int) -> dict[int, int]:
        found = {root: root}
        for rank in (order := [root]):
            new = [other for other in near[rank] if other not in found]
            found.update(dict.fromkeys(new, rank))
            order += new
        return found

    one_end = list(parents(0))[-1]
    from_there = parents(one_end)
    longest = [list(from_there)[-1]]
    while longest[-1] != one_end:
        longest.append(from_there[longest[-1]])
    root = longest[len(longest) // 2]
    depths = {root: -1}
    tree = []
    for child, parent in parents(root).items():
        if child != root:
            depths[child] = depths[parent] + 1
            tree.append(Edge(parent, child, depths[child]))
    return SpanningTree(root, tuple(tree))
