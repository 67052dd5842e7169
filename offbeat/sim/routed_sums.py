"""The time of sums along planned paths: the cost of the algorithm on the links, by the model that chose it."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from offbeat.collective import Ring
from offbeat.fabric.discovery import MeasuredNetwork
from offbeat.fabric.path_planner import predict_paths, predicted
from offbeat.sim.allreduce import ring_s
from offbeat.sim.links import GOODPUT, LATENCY_S
from offbeat.wire.lane import blocks_on

if TYPE_CHECKING:
    from offbeat.collective import CollectiveMethod
    from offbeat.topology import Link, Topology


class RoutedSums:
    """The time of a sum along the paths that are best for its size.

    Args:
        network: of the workers, with nothing amiss.
        method: by which paths are found; None for what suits the network.
        slowest: bytes per second of the slowest link, when nothing is amiss.
        rounds: whether algorithms are carried out in rounds.
    """

    def __init__(
        self, network: Topology, method: CollectiveMethod | None, slowest: float, *, rounds: bool = False
    ) -> None:
        self._slowest = slowest
        self._tries_ring = method is None and network.is_star
        left = dataclasses.replace(network, links=tuple(_behind_headers(link) for link in network.links))
        self._measured = MeasuredNetwork(left, LATENCY_S / 2, blocks_on(left))
        self._paths, self._rounds = predict_paths(self._measured, method, rounds=rounds), rounds
        self._healthy_s = functools.cache(self._priced)

    def __call__(self, size_bytes: float, world: int, slowest: float, to_worker_s: float) -> float:
        """Seconds of one all-reduce; see `allreduce.ring_s`. With a slower link it takes longer by as much."""
        if world == 1:
            return 0.0
        along_paths_s = self._healthy_s(int(size_bytes)) * self._slowest / slowest
        # Where any paths may be taken, Gloo's ring is one of them.
        return (
            min(along_paths_s, ring_s(size_bytes, world, slowest, to_worker_s)) if self._tries_ring else along_paths_s
        )

    def _priced(self, size_bytes: int) -> float:
        algorithm = self._paths.chosen[self._paths.for_size(size_bytes)].algorithm
        return predicted(algorithm, self._measured, size_bytes, rounds=self._rounds)


def ring_on(network: Topology, slowest: float) -> RoutedSums:
    """The time of sums around a ring of all ranks in their order, as Gloo makes them, whose ways may cross."""
    return RoutedSums(network, Ring(), slowest)


def _behind_headers(link: Link) -> Link:
    """The link with what it leaves for data."""
    there, back = (None if rate is None else GOODPUT * rate for rate in link.rates_mbps)
    return dataclasses.replace(link, rate_mbps=there, back_mbps=back)
