"""Greedy: trees over links of unequal rates, found by letting chunks spread as fast as links allow.

Each rank's part of the vector is cut into chunks, which spread rarest first (`offbeat.collective.rarest_first`): that
is the all-gather. A reduce-scatter is one backwards in time, over the arcs turned round. Several draws are tried, and
the fastest is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.collective.number_check import check_number
from offbeat.collective.paths import Paths
from offbeat.collective.rarest_first import spread_times, trees_of
from offbeat.collective.trees import SpanningTree, all_reduce
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology

_SPLITS = (8, 4, 2, 1)
_MOST = 150_000  # links that may be looked at in one draw: a few seconds
_ENOUGH = 100_000  # in all, after which there are no further draws
_CLOSE = 1.002  # to the least time: no further draw is worth it


@dataclass(frozen=True)
class Greedy:
    """Trees for links of any rates.

    Args:
        split: chunks per rank; None tries 4 and 8, or fewer for hundreds of hosts.
        seeds: how many draws are tried, if a few seconds are enough for them.
        size_bytes: of the vector, beside which the latency of links counts.

    Raises:
        PlanError: if a number is below 1.
    """

    split: int | None = None
    seeds: int = 4
    size_bytes: float = 64e6

    def __post_init__(self) -> None:
        if self.split is not None:
            check_number(self, "split", WholeNumbers(1), "a whole number from 1, or None")
        check_number(self, "seeds", WholeNumbers(1), "a whole number from 1")
        check_number(self, "size_bytes", RealNumbers(least=1), "a number from 1")

    def plan(self, network: Topology) -> Algorithm:
        """Make it for the hosts of a network, which are ranks in their order."""
        up, down = self.trees(network)
        return all_reduce(short_name(self), len(network.hosts), down, reduce_trees=up)

    def trees(self, network: Topology) -> tuple[list[SpanningTree], list[SpanningTree]]:
        """Find the trees along which chunks are summed up, and those along which they are spread."""
        paths = Paths(network)
        down = self._best(paths, reverse=False)
        return (down if _is_symmetric(paths) else self._best(paths, reverse=True)), down

    def _best(self, paths: Paths, *, reverse: bool) -> list[SpanningTree]:
        """The trees that spread fastest, among as many draws as there is time for."""
        least_s = _least_s(paths, self.size_bytes, reverse=reverse)
        best_s, best, looked = math.inf, list[SpanningTree](), 0
        links = sum(map(len, paths.neighbours)) * paths.ranks // 4
        splits = [split for split in _SPLITS if links * split <= _MOST][:2] or [1]
        for seed in range(self.seeds):
            for split in splits if self.split is None else [self.split]:
                looked += links * split
                if best and (looked > _ENOUGH or best_s < least_s * _CLOSE):
                    return best
                sources = [rank for rank in range(paths.ranks) for _ in range(split)]
                took_s, sent = spread_times(paths, sources, self.size_bytes / len(sources), seed=seed, reverse=reverse)
                if took_s < best_s:
                    best_s, best = took_s, trees_of(sent, sources)
        return best


def _least_s(paths: Paths, size_bytes: float, *, reverse: bool) -> float:
    """Time in which each rank can hear all others over its own links, if nothing else is slow."""
    arcs_of = paths.out_arcs if reverse else paths.in_arcs
    rates = [sum(_rate(paths.byte_s[arc]) for arc in arcs_of.get(name, ())) for name in paths.names]
    return (1 - 1 / paths.ranks) * size_bytes / min(rates) if paths.ranks > 1 else 0.0


def _rate(byte_s: float) -> float:
    return 1 / byte_s if byte_s else math.inf


def _is_symmetric(paths: Paths) -> bool:
    """Whether neighbours are as far from each other in both directions."""
    return all(
        sorted((paths.byte_s[arc], paths.latency_s[arc]) for arc in paths.between(a, b))
        == sorted((paths.byte_s[arc], paths.latency_s[arc]) for arc in paths.between(b, a))
        for a in range(paths.ranks)
        for b in paths.neighbours[a]
    )
