"""MultiTree: one spanning tree per root, all of them built at once, step by step, so that no link is used twice.

Huang, Majumder, Kim, Muzahid, Yum and Kim, "Communication algorithm-architecture co-design for distributed deep
learning", ISCA 2021. In each step the trees take turns; in its turn a tree takes one link from a member that had joined
before the step, the oldest first, to a rank that is no member yet. All-gather goes down the trees in the order of
steps, reduce-scatter up in the reverse order, so that both are free of contention.

The published code ends a step as soon as the last tree of a round found no link, even where others still would; here a
step ends when none does. With several trees per root (`split`), the tree with the fewest members is next, and the last
steps are no longer half empty: on a torus of 4x4 two trees take 8 steps of half the size instead of 5.
"""

from __future__ import annotations

import heapq
import random
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

DIRECT_SPLIT, LARGE_SPLIT, LARGE = 4, 2, 64
"""Trees per root where hosts are linked to each other, and where there are more than 64 of them.

Where each host has one link, one tree is as good as any number.
"""
MOST_TRIES = 8
_EDGES = 64_000  # that may be tried in all: a second or less


@dataclass(frozen=True)
class MultiTree:
    """Trees for links of equal rates.

    Args:
        split: trees per root; None chooses.
        interfaces: how many messages a host can send at a time, and receive; None is as many as it has links.
        released: end steps early, as the published code does, to compare with it; for one tree per root.

    Raises:
        PlanError: if a number is below 1, or `released` is to split.
    """

    split: int | None = None
    interfaces: int | None = None
    released: bool = False

    def __post_init__(self) -> None:
        for name, value in (("split", self.split), ("interfaces", self.interfaces)):
            if value is not None:
                check_number(self, name, WholeNumbers(1), "a whole number from 1, or None")
        if self.released and self.split not in (None, 1):
            raise PlanError(
                f"Cannot plan MultiTree as released with split={self.split}: that has one tree per root. Use split=1 - "
                "at `plan.collective.split`."
            )

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        return all_reduce(short_name(self), len(network.hosts), self.trees(network), uses_slots=True)

    def trees(self, network: Topology) -> list[SpanningTree]:
        """Build the trees: those of root 0 first. No link is in two edges of the same step, in either direction."""
        paths = Paths(network)
        split = self.split or (1 if self.released or not paths.are_direct else _split(paths.ranks))
        needs = _needs(paths)
        as_published = self.released or (split == 1 and paths.are_direct)
        tries = 1 if as_published else max(1, min(MOST_TRIES, _EDGES // (paths.ranks**2 * split)))
        least = _least_steps(paths, split, self.interfaces)
        best: list[SpanningTree] = []
        for seed in range(tries):
            growth = _Growth(paths, needs, split, self.interfaces, seed)
            step = 0
            while growth.unfinished:
                growth.grow(step, released=self.released)
                step += 1
            if not best or step < max(tree.steps for tree in best):
                best = growth.trees
            if step <= least:
                break
        return best


def _split(ranks: int) -> int:
    return DIRECT_SPLIT if ranks <= LARGE else LARGE_SPLIT


def _needs(paths: Paths) -> list[list[tuple[int, int, int]]]:
    """The neighbours of each rank: number, bit, and the links that an edge to it takes.

    An edge takes the way down for all-gather, and the way up for reduce-scatter, which may be another one.
    """
    arcs = len(paths.arcs)
    return [
        [
            (
                child,
                1 << child,
                sum(1 << arc for arc in paths.between(rank, child))
                | sum(1 << arcs + arc for arc in paths.between(child, rank)),
            )
            for child in paths.neighbours[rank]
        ]
        for rank in range(paths.ranks)
    ]


def _least_steps(paths: Paths, split: int, interfaces: int | None) -> int:
    """Steps that it takes at least: each rank hears all others, over as many links as it has."""
    degrees = [len(paths.out_arcs.get(name, ())) for name in paths.names]
    ports = min(min(degree, interfaces or degree) for degree in degrees)
    return -(-split * (paths.ranks - 1) // max(1, ports))


class _Growth:
    """Trees that grow. Sets of ranks and of links are integers, a bit for each."""

    def __init__(
        self, paths: Paths, needs: list[list[tuple[int, int, int]]], split: int, interfaces: int | None, seed: int
    ) -> None:
        self.ranks = paths.ranks
        self.interfaces = interfaces
        self.needs = needs
        self.random = random.Random(seed) if seed else None
        self.everything = (1 << 2 * len(paths.arcs)) - 1
        self.near = [sum(bit for _, bit, _ in neighbours) for neighbours in needs]
        self.leaves = [sum(1 << arc for arc in paths.out_arcs.get(name, ())) for name in paths.names]
        self.enters = [sum(1 << arc for arc in paths.in_arcs.get(name, ())) for name in paths.names]
        roots = [root for root in range(self.ranks) for _ in range(split)]
        self.roots = roots
        self.members = [1 << root for root in roots]
        self.open = [[root] for root in roots]  # members that may still have a neighbour outside, oldest first
        self.edges: list[list[Edge]] = [[] for _ in roots]
        self.unfinished = list(range(len(roots))) if self.ranks > 1 else []

    @property
    def trees(self) -> list[SpanningTree]:
        return [SpanningTree(root, tuple(edges)) for root, edges in zip(self.roots, self.edges, strict=True)]

    def grow(self, step: int, *, released: bool) -> None:
        """Take as many links as trees find in one step."""
        self.free = self.everything
        self.sends = [self.interfaces or self.ranks] * self.ranks
        self.hears = list(self.sends)
        self.hearing = (1 << self.ranks) - 1
        # What joins in this step does not send in it, and what has no free link once has none later in the step.
        self.frontier = {}
        for tree in self.unfinished:
            outside = ~self.members[tree]
            self.open[tree] = [rank for rank in self.open[tree] if self.near[rank] & outside]
            self.frontier[tree] = self.open[tree].copy()
            self.frontier[tree].reverse()
        if released:
            self._by_rounds(step)
        else:
            self._by_size(step)
        everyone = (1 << self.ranks) - 1
        self.unfinished = [tree for tree in self.unfinished if self.members[tree] != everyone]

    def _by_rounds(self, step: int) -> None:
        """Go on while the last tree of a round finds a link."""
        last = True
        while last:
            last = False
            for tree in self.unfinished:
                if len(self.edges[tree]) < self.ranks - 1:
                    last = self._add(tree, step)

    def _by_size(self, step: int) -> None:
        """The tree with the fewest members is next; of those the first, or any, by the seed.

        With one tree per root and the first of them, that is round after round, as in the paper, but for trees that
        found no link in the step before.
        """
        turns = [(len(self.edges[tree]), self._tie(), tree) for tree in self.unfinished]
        heapq.heapify(turns)
        while turns:
            size, _, tree = turns[0]
            if self._add(tree, step):
                heapq.heapreplace(turns, (size + 1, self._tie(), tree))
            else:
                heapq.heappop(turns)

    def _tie(self) -> float:
        return self.random.random() if self.random else 0.0

    def _add(self, tree: int, step: int) -> bool:
        frontier, free, hearing = self.frontier[tree], self.free, self.hearing & ~self.members[tree]
        while frontier:
            parent = frontier[-1]
            if self.near[parent] & hearing and free & self.leaves[parent] and self.sends[parent]:
                for child, bit, need in self.needs[parent]:
                    if bit & hearing and need & free == need:
                        self.free = free ^ need
                        self._take(tree, parent, child, step)
                        return True
            frontier.pop()
        return False

    def _take(self, tree: int, parent: int, child: int, step: int) -> None:
        self.sends[parent] -= 1
        self.hears[child] -= 1
        if not self.hears[child] or not self.free & self.enters[child]:
            self.hearing ^= 1 << child
        self.members[tree] |= 1 << child
        self.open[tree].append(child)
        self.edges[tree].append(Edge(parent, child, step))
