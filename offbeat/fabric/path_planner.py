"""The choice of paths by size: all methods that suit the network are priced, and the best few are tried once.

What a message costs by itself decides where little is sent, and what links carry where much is; so the choice is made
for classes of sizes. All workers come to the same one: they price what they have told each other, and go by the slowest
worker's time.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from offbeat.collective import (
    BidirectionalRing,
    DoubleBinaryTree,
    FlatTree,
    Greedy,
    HalvingDoubling,
    MultiTree,
    PipelinedTrees,
    RecursiveDoubling,
    Ring,
    WaterFilling,
    cost,
)
from offbeat.errors import NetworkError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.collective import Algorithm, CollectiveMethod
    from offbeat.fabric.discovery import MeasuredNetwork
    from offbeat.topology import Topology

SIZES = (16 << 10, 256 << 10, 4 << 20)
"""Bytes of a vector, one of each class."""
_TRIED = 3
_CLOSE = 1.25  # what is predicted to take longer than that many times the best is not tried
_TIMES = 2
_WORTH_S = 2.0  # on links so slow that trials would take longer, what was predicted has to do


class PricedPaths(NamedTuple):
    """An algorithm for a class of sizes, with what it was predicted to take, and took when it was tried.

    Args:
        algorithm: whose it is.
        size_bytes: of the vector.
        predicted_s: seconds.
        measured_s: the slowest worker's; None if it was not tried.
    """

    algorithm: Algorithm
    size_bytes: int
    predicted_s: float
    measured_s: float | None = None


@dataclass(frozen=True)
class PathPlan:
    """The paths that were chosen, from the smallest class of sizes to the largest.

    Args:
        network: for which they were.
        chosen: one for each class.
    """

    network: Topology
    chosen: tuple[PricedPaths, ...]

    def for_size(self, size_bytes: int) -> int:
        """The place among those chosen of the one for a vector of so many bytes: of the class nearest by ratio."""
        for place, (one, other) in enumerate(itertools.pairwise(self.chosen)):
            if size_bytes < math.sqrt(one.size_bytes * other.size_bytes):
                return place
        return len(self.chosen) - 1


def plan_paths(
    measured: MeasuredNetwork,
    method: CollectiveMethod | None,
    measure: Callable[[Algorithm, int], float],
    meet: Callable[[str], list[str]],
) -> PathPlan:
    """Choose paths. Collective.

    Args:
        measured: what is known of the network.
        method: the only one that may be used; None for any.
        measure: tries an algorithm on a vector of so many bytes: how long it took here.
        meet: tells the others a text, and returns what all say, in rank order.

    Raises:
        PlanError: if the method cannot be used on this network.
        NetworkError: if a link is lost meanwhile; on all, behind as many meetings.
    """
    chosen = (
        _fastest(close, measure, meet) if len(close) > 1 and close[0].predicted_s <= _WORTH_S else close[0]
        for close in priced_paths(measured, method)
    )
    return PathPlan(measured.network, tuple(chosen))


def predict_paths(measured: MeasuredNetwork, method: CollectiveMethod | None) -> PathPlan:
    """Choose paths by what is predicted alone; raises as `plan_paths`."""
    return PathPlan(measured.network, tuple(close[0] for close in priced_paths(measured, method)))


def priced_paths(measured: MeasuredNetwork, method: CollectiveMethod | None) -> list[list[PricedPaths]]:
    """The paths of each class of sizes that may be best, the one of which that is predicted first.

    Raises:
        PlanError: if the method cannot be used on this network.
    """
    if method is not None:
        algorithm = method.plan(measured.network)
        return [[PricedPaths(algorithm, SIZES[-1], predicted(algorithm, measured, SIZES[-1]))]]
    algorithms, found = list(_algorithms(measured)), []
    for size_bytes in SIZES:
        priced = sorted(
            (PricedPaths(one, size_bytes, predicted(one, measured, size_bytes)) for one in algorithms),
            key=lambda one: one.predicted_s,
        )
        found.append([one for one in priced[:_TRIED] if one.predicted_s <= _CLOSE * priced[0].predicted_s])
    return found


def predicted(algorithm: Algorithm, measured: MeasuredNetwork, size_bytes: int) -> float:
    """Predict how long an algorithm takes, in seconds."""
    return cost(
        algorithm, measured.network, size_bytes, block_bytes=measured.block_bytes, overhead_s=measured.message_s
    )


def methods_for(network: Topology) -> Sequence[CollectiveMethod]:
    """The methods that are priced for a network: what costs more to price than it can gain is left out."""
    world = len(network.hosts)
    if not network.switches:
        return (RecursiveDoubling(), Ring(by_links=True), MultiTree(), PipelinedTrees(), Greedy())
    pieces = [WaterFilling(pieces) for pieces in (1, 4, 16, 32) if pieces * world <= 512]
    small = (FlatTree(), RecursiveDoubling(), HalvingDoubling(), DoubleBinaryTree())
    return (*small, *pieces, Ring(), BidirectionalRing(), MultiTree())


def _algorithms(measured: MeasuredNetwork) -> list[Algorithm]:
    found: dict[str, Algorithm] = {}
    for method in methods_for(measured.network):
        try:
            algorithm = method.plan(measured.network)
        except PlanError:  # it is for another kind of network
            continue
        found.setdefault(algorithm.digest, algorithm)
    return list(found.values())


def _fastest(
    close: Sequence[PricedPaths], measure: Callable[[Algorithm, int], float], meet: Callable[[str], list[str]]
) -> PricedPaths:
    """Try each a few times, in turns; the one whose shortest time is the least, at the slowest worker."""
    mine, error = [0.0] * len(close), ""
    try:
        took = [[measure(one.algorithm, one.size_bytes) for one in close] for _ in range(_TIMES)]
        mine = [min(column) for column in zip(*took, strict=True)]
    except NetworkError as failed:  # told, so that all meet as often
        error = str(failed)
    said = [json.loads(text) for text in meet(json.dumps([mine, error]))]
    if error := next((one for _, one in said if one), ""):
        raise NetworkError(error)
    slowest = [max(column) for column in zip(*(one for one, _ in said), strict=True)]
    best = min(range(len(close)), key=lambda place: slowest[place])
    return close[best]._replace(measured_s=slowest[best])


def timed(run: Callable[[], object]) -> float:
    """Measure how long it takes, in seconds."""
    began_s = time.monotonic()
    run()
    return time.monotonic() - began_s
