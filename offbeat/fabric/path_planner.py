"""The choice of paths by size: all methods that suit the network are priced, and the best few are tried once.

What a message costs by itself decides where little is sent, and what links carry where much is; so the choice is made
for classes of sizes. All workers come to the same one: they price what they have told each other, and go by the slowest
worker's time.

Torch's group, which is there beside the links, is tried too: it sums around a ring at less cost per message.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
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
from offbeat.collective.rounds import in_rounds
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
_ALIKE, _GROUP_RATIO = 1.5, 0.5
_GROUP_CLOSE = 4.0  # its messages cost less
_COARSE_BYTES = 256 << 10
_TIMES = 2
_SMALL_WORTH, _LARGE_WORTH = 1.25, 1.05
_QUICK_S, _QUICK_TIMES = 0.05, 10
_WORTH_S = 2.0  # on links so slow that trials would take longer, what was predicted has to do


class PricedPaths(NamedTuple):
    """An algorithm for a class of sizes, with what it was predicted to take, and took when it was tried.

    Args:
        algorithm: whose it is.
        size_bytes: of the vector.
        predicted_s: seconds.
        measured_s: the slowest worker's; None if it was not tried.
        by_group: whether torch's group makes the sums, around that ring.
    """

    algorithm: Algorithm
    size_bytes: int
    predicted_s: float
    measured_s: float | None = None
    by_group: bool = False

    @property
    def name(self) -> str:
        """The name of who made them, for people."""
        return "torch's group" if self.by_group else self.algorithm.name

    @property
    def digest(self) -> str:
        """The same for those that can sum up together."""
        return "group" if self.by_group else self.algorithm.digest


@dataclass(frozen=True)
class PathPlan:
    """The paths that were chosen, from the smallest class of sizes to the largest.

    Args:
        network: for which they were.
        chosen: one for each class.
        group_ratios: of each class, how many times as long as predicted torch's group took; empty if it was not tried.
    """

    network: Topology
    chosen: tuple[PricedPaths, ...]
    group_ratios: tuple[float, ...] = ()

    def for_size(self, size_bytes: int) -> int:
        """The place among those chosen of the one for a vector of so many bytes: of the class nearest by ratio."""
        for place, (one, other) in enumerate(itertools.pairwise(self.chosen)):
            if size_bytes < math.sqrt(one.size_bytes * other.size_bytes):
                return place
        return len(self.chosen) - 1


def plan_paths(
    measured: MeasuredNetwork,
    method: CollectiveMethod | None,
    measure: Callable[[PricedPaths], float],
    meet: Callable[[str], list[str]],
    *,
    rounds: bool = False,
) -> PathPlan:
    """Choose paths. Collective.

    Args:
        measured: what is known of the network; with what was learnt of torch's group before, trials are few.
        method: the only one that may be used; None for any.
        measure: tries some: how long it took here.
        meet: tells the others a text, and returns what all say, in rank order.
        rounds: whether algorithms are carried out in rounds (`in_rounds`).

    Raises:
        PlanError: if the method cannot be used on this network.
        NetworkError: if a link is lost meanwhile; on all, behind as many meetings.
    """
    chosen, ratios, known = [], [], measured.group_ratios
    for place, close in enumerate(priced_paths(measured, method, rounds=rounds)):
        if method is not None or close[0].predicted_s > _WORTH_S:
            chosen.append(close[0])
            continue
        ring = _by_group(measured, close[0].size_bytes)
        if ring.size_bytes < SIZES[-1] and _are_alike(measured.network):
            chosen.append(ring)
            ratios.append(known[place] if known else _GROUP_RATIO)
            continue
        # Of its own messages nothing is known the first time, but that they cost less.
        likely_s = ring.predicted_s * known[place] / _CLOSE if known else ring.predicted_s / _GROUP_CLOSE
        is_tried = likely_s <= close[0].predicted_s and ring.predicted_s <= _WORTH_S
        tried = _tried((*close, ring) if is_tried else close, measure, meet, once=bool(known))
        chosen.append(_best(tried, lambda one: one.measured_s or 0.0))
        if is_tried:
            ratios.append((tried[-1].measured_s or 0.0) / ring.predicted_s)
    return PathPlan(measured.network, tuple(chosen), tuple(ratios) if len(ratios) == len(SIZES) else known)


def predict_paths(measured: MeasuredNetwork, method: CollectiveMethod | None, *, rounds: bool = False) -> PathPlan:
    """Choose paths by what is predicted alone; raises as `plan_paths`."""
    return PathPlan(measured.network, tuple(close[0] for close in priced_paths(measured, method, rounds=rounds)))


def replan_paths(measured: MeasuredNetwork, method: CollectiveMethod | None) -> PathPlan:
    """Choose paths for other workers: by what is predicted, since trials would take long; raises as `plan_paths`."""
    # All wait for it: large blocks are priced in less time, and compare the same.
    measured = replace(measured, block_bytes=max(measured.block_bytes, _COARSE_BYTES))
    if method is not None:
        return predict_paths(measured, method)
    chosen = list(predict_paths(measured, None).chosen)
    for place, ratio in enumerate(measured.group_ratios[: len(chosen)]):
        ring = _by_group(measured, chosen[place].size_bytes)
        ring = ring._replace(predicted_s=ring.predicted_s * ratio)
        chosen[place] = _best((chosen[place], ring), lambda one: one.predicted_s)
    return PathPlan(measured.network, tuple(chosen), measured.group_ratios)


def _are_alike(network: Topology) -> bool:
    """Whether all hosts have one link, to one switch, of about the same rate: little goes around a ring then.

    Trials of a few milliseconds would not find out more than how busy the machines are just then.
    """
    rates = [rate for link in network.links for rate in link.rates_mbps if rate is not None]
    return network.is_fan and (not rates or max(rates) <= _ALIKE * min(rates))


def suited(method: CollectiveMethod | None, network: Topology) -> CollectiveMethod | None:
    """The method that was named, or None, for any, if it does not suit the workers that are left."""
    if method is not None:
        with suppress(PlanError):
            method.plan(network)
            return method
    return None


def _best(close: Sequence[PricedPaths], took_s: Callable[[PricedPaths], float]) -> PricedPaths:
    """The fastest; torch's group, which costs the machine less, if the others are hardly faster."""
    size_bytes = close[0].size_bytes
    worth = _LARGE_WORTH if size_bytes >= SIZES[-1] else _SMALL_WORTH
    return min(close, key=lambda one: took_s(one) / (worth if one.by_group else 1.0))


def _by_group(measured: MeasuredNetwork, size_bytes: int) -> PricedPaths:
    ring = Ring().plan(measured.network)
    return PricedPaths(ring, size_bytes, predicted(ring, measured, size_bytes), by_group=True)


def priced_paths(
    measured: MeasuredNetwork, method: CollectiveMethod | None, *, rounds: bool = False
) -> list[list[PricedPaths]]:
    """The paths of each class of sizes that may be best, the one of which that is predicted first.

    Raises:
        PlanError: if the method cannot be used on this network.
    """
    if method is not None:
        algorithm = _planned(method, measured.network, rounds=rounds)
        return [[PricedPaths(algorithm, SIZES[-1], predicted(algorithm, measured, SIZES[-1], rounds=rounds))]]
    algorithms, found = _algorithms(measured, rounds=rounds), []
    for size_bytes in SIZES:
        priced = sorted(
            (PricedPaths(one, size_bytes, predicted(one, measured, size_bytes, rounds=rounds)) for one in algorithms),
            key=lambda one: one.predicted_s,
        )
        found.append([one for one in priced[:_TRIED] if one.predicted_s <= _CLOSE * priced[0].predicted_s])
    return found


def predicted(algorithm: Algorithm, measured: MeasuredNetwork, size_bytes: int, *, rounds: bool = False) -> float:
    """Predict how long an algorithm takes, in seconds; in rounds as if each began everywhere at once."""
    return cost(
        algorithm, measured.network, size_bytes, block_bytes=measured.block_bytes, overhead_s=measured.message_s,
        lock_step=rounds,
    )  # fmt: skip


def methods_for(network: Topology) -> Sequence[CollectiveMethod]:
    """The methods that are priced for a network: what costs more to price than it can gain is left out."""
    world = len(network.hosts)
    if not network.switches:
        return (RecursiveDoubling(), Ring(by_links=True), MultiTree(), PipelinedTrees(), Greedy())
    pieces = [WaterFilling(pieces) for pieces in (1, 4, 16, 32) if pieces * world <= 512]
    small = (FlatTree(), RecursiveDoubling(), HalvingDoubling(), DoubleBinaryTree())
    return (*small, *pieces, Ring(), BidirectionalRing(), MultiTree())


def _planned(method: CollectiveMethod, network: Topology, *, rounds: bool) -> Algorithm:
    return in_rounds(method.plan(network)) if rounds else method.plan(network)


def _algorithms(measured: MeasuredNetwork, *, rounds: bool) -> list[Algorithm]:
    found: dict[str, Algorithm] = {}
    for method in methods_for(measured.network):
        try:
            algorithm = _planned(method, measured.network, rounds=rounds)
        except PlanError:  # it is for another kind of network
            continue
        found.setdefault(algorithm.digest, algorithm)
    return list(found.values())


def _tried(
    close: Sequence[PricedPaths],
    measure: Callable[[PricedPaths], float],
    meet: Callable[[str], list[str]],
    *,
    once: bool,
) -> list[PricedPaths]:
    """Try each a few times, in turns; each with its shortest time, at the slowest worker."""
    mine, error = [0.0] * len(close), ""
    try:
        times = _QUICK_TIMES if close[0].predicted_s <= _QUICK_S else 1 if once else _TIMES
        took = [[measure(one) for one in close] for _ in range(times)]
        mine = [min(column) for column in zip(*took, strict=True)]
    except NetworkError as failed:  # told, so that all meet as often
        error = str(failed)
    try:
        said = [json.loads(text) for text in meet(json.dumps([mine, error]))]
    except NetworkError as failed:
        raise NetworkError(error or str(failed)) from failed
    if len({len(one) for one, _ in said}) > 1:
        raise NetworkError("Cannot choose paths: the workers try others.")
    if error := next((one for _, one in said if one), ""):
        raise NetworkError(error)
    slowest = [max(column) for column in zip(*(one for one, _ in said), strict=True)]
    return [one._replace(measured_s=took_s) for one, took_s in zip(close, slowest, strict=True)]


def timed(run: Callable[[], object]) -> float:
    """Measure how long it takes, in seconds."""
    began_s = time.monotonic()
    run()
    return time.monotonic() - began_s
