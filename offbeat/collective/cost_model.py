"""The cost of an algorithm: how long it takes on a network that carries nothing else.

Each arc carries one block at a time. Of those that wait for it, one of the earliest step is next, of these one that is
earliest in its chunk, of these that of the operation listed first. An operation sends block b of its chunk as soon as
block b of all that it is after has come, as the data plane does. On a way of several arcs the packets of a block follow
each other: a block is on all of its arcs at once, and takes as long as on the slowest. Each message, which is a block,
costs its sender an overhead, and each arc adds its latency. Adding and copying cost nothing.

That is the model of LogGP (Alexandrov et al., 1995) with queues where ways cross. Times are whole picoseconds inside,
so that what is equal by construction is equal, and an order does not hang on a rounding.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

from offbeat.collective.paths import InterfacePaths, Paths
from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology

BLOCK_BYTES = 1 << 20
_PER_S = 10**12
_BLOCKS = 1 << 24  # of one operation, at most
_ARRIVED, _QUEUED, _FREED = range(3)


class Occupancy(NamedTuple):
    """An arc that carries a block of an operation.

    Args:
        arc: its number among the arcs of the network.
        op: number of the operation.
        block: of its chunk.
        begin_s, end_s: from when to when.
    """

    arc: int
    op: int
    block: int
    begin_s: float
    end_s: float


def cost(
    algorithm: Algorithm,
    network: Topology,
    size_bytes: float,
    *,
    block_bytes: float = BLOCK_BYTES,
    overhead_s: float = 0.0,
    lock_step: bool = False,
    interfaces: int | None = None,
) -> float:
    """Time that a vector of so many bytes takes, in seconds.

    Args:
        algorithm: verified, for as many ranks as the network has hosts.
        network: whose links carry nothing else.
        size_bytes: of the vector.
        block_bytes: that are sent on as soon as they have come; `math.inf` sends on whole chunks.
        overhead_s: of each message, at its sender.
        lock_step: whether a step begins only when the one before has ended everywhere.
        interfaces: of each host, each as fast as its fastest link; None for as many as it has a use for.

    Raises:
        PlanError: if the network has another number of hosts, or a size cannot be.
    """
    paths = _checked(algorithm, network, size_bytes, block_bytes, overhead_s, interfaces)
    if lock_step:
        return _lock_step(algorithm, paths, size_bytes, overhead_s)
    return _simulate(algorithm, paths, size_bytes, block_bytes, overhead_s, None)


def occupancies(
    algorithm: Algorithm,
    network: Topology,
    size_bytes: float,
    *,
    block_bytes: float = BLOCK_BYTES,
    overhead_s: float = 0.0,
) -> list[Occupancy]:
    """List what each arc carries when, in the order in which that begins. For arguments see `cost`."""
    seen: list[Occupancy] = []
    paths = _checked(algorithm, network, size_bytes, block_bytes, overhead_s)
    _simulate(algorithm, paths, size_bytes, block_bytes, overhead_s, seen)
    return seen


def _checked(
    algorithm: Algorithm,
    network: Topology,
    size_bytes: float,
    block_bytes: float,
    overhead_s: float,
    interfaces: int | None = None,
) -> Paths:
    if algorithm.nodes != len(network.hosts):
        raise PlanError(
            f"Cannot price {algorithm.name}: it is for {algorithm.nodes} ranks, and the network has "
            f"{len(network.hosts)} hosts. Make it for this network."
        )
    if not 0 <= size_bytes < math.inf or not block_bytes > 0 or not 0 <= overhead_s < math.inf:
        raise PlanError(
            f"Cannot price {size_bytes} bytes in blocks of {block_bytes} bytes and {overhead_s} s: a size and an "
            "overhead are 0 or more, a block is above 0."
        )
    return Paths(network) if interfaces is None else InterfacePaths(network, interfaces)


def _lock_step(algorithm: Algorithm, paths: Paths, size_bytes: float, overhead_s: float) -> float:
    """Sum up what the busiest arc of each step takes."""
    busy_s: dict[int, dict[int, float]] = {}
    latency_s: dict[int, float] = {}
    parts = [float(chunk.end - chunk.begin) * size_bytes for chunk in algorithm.chunks]
    for op in algorithm.ops:
        arcs, load = paths.between(op.source, op.destination), busy_s.setdefault(op.step, {})
        for place, arc in enumerate(arcs):
            load[arc] = load.get(arc, 0.0) + parts[op.chunk] * paths.byte_s[arc] + (0.0 if place else overhead_s)
        late_s = sum(paths.latency_s[arc] for arc in arcs)
        latency_s[op.step] = max(latency_s.get(op.step, 0.0), late_s)
    return sum(max(load.values()) + latency_s[step] for step, load in busy_s.items())


def _simulate(
    algorithm: Algorithm,
    paths: Paths,
    size_bytes: float,
    block_bytes: float,
    overhead_s: float,
    seen: list[Occupancy] | None,
) -> float:
    ops = algorithm.ops
    counts, lengths = _cut(algorithm, size_bytes, block_bytes)
    byte_ps = [one * _PER_S for one in paths.byte_s]
    latency_ps = [round(one * _PER_S) for one in paths.latency_s]
    overhead_ps = round(overhead_s * _PER_S)
    ways = [paths.between(op.source, op.destination) for op in ops]
    joins, feeds = _joins(algorithm, counts)
    waiting: list[list[tuple[int, int, int, int]]] = [[] for _ in byte_ps]  # by arc: step, block, operation, hop
    is_busy = [False] * len(byte_ps)
    # What happens when: an operation's block has arrived, or is at the next arc of its way; an arc is free.
    events: list[tuple[int, int, int, int, int]] = [
        (0, _QUEUED, number, block, 0)
        for join in joins
        if not join.needs
        for number in join.ops
        for block in range(counts[ops[number].chunk])
    ]
    heapq.heapify(events)
    push, pop = heapq.heappush, heapq.heappop
    now = 0
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, kind, number, block, hop = pop(events)
            if kind == _FREED:
                is_busy[number] = False
                touched.add(number)
            elif kind == _QUEUED:
                arc = ways[number][hop]
                push(waiting[arc], (ops[number].step, block, number, hop))
                touched.add(arc)
            else:
                for join in feeds[number]:
                    join.missing[block] -= 1
                    if not join.missing[block]:
                        for other in join.ops:
                            arc = ways[other][0]
                            push(waiting[arc], (ops[other].step, block, other, 0))
                            touched.add(arc)
        for arc in touched:
            if is_busy[arc] or not waiting[arc]:
                continue
            _, block, number, hop = pop(waiting[arc])
            way = ways[number]
            length = lengths[ops[number].chunk]
            first = now if hop else now + overhead_ps
            end = first + round(length * byte_ps[arc])
            is_busy[arc] = True
            push(events, (end, _FREED, arc, 0, 0))
            if hop + 1 == len(way):
                push(events, (end + latency_ps[arc], _ARRIVED, number, block, hop))
            else:
                # The next arc need not begin before it can go on to the end without a pause.
                on_ps = max(first, end - round(length * byte_ps[way[hop + 1]]))
                push(events, (on_ps + latency_ps[arc], _QUEUED, number, block, hop + 1))
            if seen is not None:
                seen.append(Occupancy(arc, number, block, now / _PER_S, end / _PER_S))
    return now / _PER_S


class _Join:
    """Operations that are after the same ones.

    Args:
        needs: how many these are.
        missing: of these, by block, those that have not come.
    """

    def __init__(self, needs: int, blocks: int) -> None:
        self.needs = needs
        self.missing = [needs] * blocks
        self.ops: list[int] = []


def _joins(algorithm: Algorithm, counts: list[int]) -> tuple[list[_Join], list[list[_Join]]]:
    """All groups of operations after the same ones, and those to which each operation belongs."""
    found: dict[tuple[int, int, int], _Join] = {}
    feeds: list[list[_Join]] = [[] for _ in algorithm.ops]
    for number, op in enumerate(algorithm.ops):
        # What an operation is after is a prefix of what came to its source.
        key = (op.source, op.chunk, len(op.after))
        if key not in found:
            found[key] = _Join(len(op.after), counts[op.chunk])
            for other in op.after:
                feeds[other].append(found[key])
        found[key].ops.append(number)
    return list(found.values()), feeds


def _cut(algorithm: Algorithm, size_bytes: float, block_bytes: float) -> tuple[list[int], list[float]]:
    """The number of blocks of each chunk, and the bytes of each of them."""
    sizes = [float(chunk.end - chunk.begin) * size_bytes for chunk in algorithm.chunks]
    counts = [min(max(1, math.ceil(size / block_bytes)), _BLOCKS) for size in sizes]
    return counts, [size / count for size, count in zip(sizes, counts, strict=True)]
