"""The shortest tour: an order of all ranks for rings whose slowest hop is as fast as it can be, and short besides.

A ring goes round as fast as its slowest hop lets it. Among tours with the same slowest hop the one is best that takes
the least in all: fewer links, which less often cross. That is the travelling-salesman problem over measured links, as
PCCL solves it (Keiblinger et al., "Prime Collective Communications Library", arXiv 2505.14065). Up to `EXACT` ranks the
answer is exact (Held and Karp, 1962); above it is what no 2-opt or Or-opt move makes any better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.routing import DimensionOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.collective.paths import Paths
    from offbeat.topology import Topology

EXACT = 12
_MESSAGE_BYTES = 1 << 20
_LONGEST_SEGMENT = 3  # that an Or-opt move takes elsewhere


def shortest_tour(network: Topology, paths: Paths) -> tuple[int, ...]:
    """An order of the ranks, from rank 0 on; their own, if none is better."""
    ranks = range(paths.ranks)
    hops = [[paths.message_s(a, b, _MESSAGE_BYTES) if a != b else 0.0 for b in ranks] for a in ranks]
    hop_NN = np.array(hops)  # from, to
    if not hop_NN.any():
        hop_NN = np.array([[len(paths.between(a, b)) if a != b else 0.0 for b in ranks] for a in ranks])
    found = best_tour(hop_NN) if paths.ranks <= EXACT else _search(hop_NN, list(_starts(network, paths, hop_NN)))
    in_order = tuple(ranks)
    return in_order if _length(hop_NN, in_order) <= _length(hop_NN, found) else found


def best_tour(hop_NN: np.ndarray) -> tuple[int, ...]:
    """The best tour of all, for few ranks; from time or length of each hop, from one rank (row) to another."""
    if len(hop_NN) <= 2:
        return tuple(range(len(hop_NN)))
    slowest = hop_NN[_edges(_held_karp(hop_NN, np.maximum))].max()
    return _held_karp(np.where(hop_NN > slowest, np.inf, hop_NN), np.add)


def _edges(tour: Sequence[int]) -> tuple[list[int], list[int]]:
    """The places of the hops of a tour in a matrix."""
    return list(tour), [*tour[1:], tour[0]]


def _length(hop_NN: np.ndarray, tour: Sequence[int]) -> tuple[float, float]:
    hops = hop_NN[_edges(tour)]
    return float(hops.max()), float(hops.sum())


def _held_karp(hop_NN: np.ndarray, add: np.ufunc) -> tuple[int, ...]:
    """The best tour of all, where hops are put together by `add`: to a sum, or to the slowest.

    For each set of ranks without rank 0, and each of its ranks, the best way from rank 0 through the set that ends
    there. A set is a number with a bit for each rank but 0.
    """
    others = len(hop_NN) - 1
    best = np.full((1 << others, others), np.inf)
    before = np.zeros((1 << others, others), dtype=int)
    for rank in range(others):
        best[1 << rank, rank] = hop_NN[0, rank + 1]
    inner = hop_NN[1:, 1:]
    for chosen in range(1, 1 << others):
        ways = add(best[chosen][:, None], inner)  # last one so far, next one
        last, length = ways.argmin(axis=0), ways.min(axis=0)
        for rank in range(others):
            more = chosen | 1 << rank
            if more != chosen and length[rank] < best[more, rank]:
                best[more, rank], before[more, rank] = length[rank], last[rank]
    chosen = (1 << others) - 1
    rank = int(add(best[chosen], hop_NN[1:, 0]).argmin())
    tour = []
    for _ in range(others):
        tour.append(rank + 1)
        chosen, rank = chosen & ~(1 << rank), int(before[chosen, rank])
    return (0, *reversed(tour))


def _starts(network: Topology, paths: Paths, hop_NN: np.ndarray) -> Iterator[list[int]]:
    """Tours to begin with: the order of ranks, the nearest one each time, and to and fro in a grid."""
    yield list(range(paths.ranks))
    nearest = [0]
    while len(nearest) < paths.ranks:
        ahead = hop_NN[nearest[-1]].copy()
        ahead[nearest] = np.inf
        nearest.append(int(ahead.argmin()))
    yield nearest
    grid = network.routing
    if isinstance(grid, DimensionOrder):
        numbers = {name: rank for rank, name in enumerate(paths.names)}
        for snake in _snakes(grid.dims):
            yield [numbers[grid.hosts[grid.number(place)]] for place in snake]


def _snakes(dims: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Ways to and fro through a grid, among them those that come back where they began, if there are any."""
    places: list[tuple[int, ...]] = [()]
    for size in reversed(dims[1:]):
        places = [(at, *place) for at in range(size) for place in (reversed(places) if at % 2 else places)]
    # Along the first axis stand rows, each of which is a way through all other axes.
    rows, columns = dims[0], len(places)
    yield [(row, *place) for row in range(rows) for place in (reversed(places) if row % 2 else places)]
    if rows % 2 == 0 and columns > 1:
        yield [(row, *places[column]) for row, column in _round_trip(rows, columns)]
    if columns % 2 == 0 and rows > 1:
        yield [(row, *places[column]) for column, row in _round_trip(columns, rows)]


def _round_trip(rows: int, columns: int) -> list[tuple[int, int]]:
    """Along all rows but for their first places, to and fro, and back along these."""
    ahead = range(1, columns)
    out = [(row, at) for row in range(rows) for at in (reversed(ahead) if row % 2 else ahead)]
    return [*out, *((row, 0) for row in reversed(range(rows)))]


def _search(hop_NN: np.ndarray, starts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Improve all of them, then forbid the slowest hop of the best, again and again, while there is a way round it."""
    tours = [_improve(hop_NN, start) for start in starts]
    best = min(tours, key=lambda tour: _length(hop_NN, tour))
    while True:
        slowest, total = _length(hop_NN, best)
        # One that is forbidden costs more than any tour without.
        dear_NN = hop_NN + np.where(hop_NN >= slowest, total, 0.0)
        better = min((_improve(dear_NN, tour) for tour in (best, *tours)), key=lambda tour: _length(hop_NN, tour))
        if _length(hop_NN, better)[0] >= slowest:
            at = best.index(0)
            return (*best[at:], *best[:at])
        best = better


def _improve(hop_NN: np.ndarray, start: Sequence[int]) -> list[int]:
    """Make the best 2-opt or Or-opt move while there is one that makes the tour shorter."""
    tour = np.array(start)
    least = 1e-9 * max(hop_NN.max(), 1e-12)
    while True:
        moves = [_two_opt(hop_NN, tour), *(_or_opt(hop_NN, tour, size) for size in range(1, _LONGEST_SEGMENT + 1))]
        gain, better = max(moves, key=lambda move: move[0])
        if gain <= least:
            return [int(rank) for rank in tour]
        tour = better


def _two_opt(hop_NN: np.ndarray, tour: np.ndarray) -> tuple[float, np.ndarray]:
    """The part of the tour that it pays most to turn round; hops may differ in both directions."""
    after = np.roll(tour, -1)
    there, back = hop_NN[tour, after], hop_NN[after, tour]
    sums = np.concatenate([[0.0], np.cumsum(back - there)])
    first, last = np.triu_indices(len(tour), 1)  # turn round places first + 1 to last
    change = (
        hop_NN[tour[first], tour[last]]
        + hop_NN[after[first], after[last]]
        - there[first]
        - there[last]
        + sums[last]
        - sums[first + 1]
    )
    best = int(change.argmin())
    begin, end = first[best] + 1, last[best] + 1
    return -float(change[best]), np.concatenate([tour[:begin], tour[begin:end][::-1], tour[end:]])


def _or_opt(hop_NN: np.ndarray, tour: np.ndarray, size: int) -> tuple[float, np.ndarray]:
    """The part of so many ranks that it pays most to take elsewhere, as it is."""
    count = len(tour)
    places = np.arange(count)
    head, tail = tour, tour[(places + size - 1) % count]
    ahead, behind = tour[places - 1], tour[(places + size) % count]
    saved = hop_NN[ahead, head] + hop_NN[tail, behind] - hop_NN[ahead, behind]
    after = np.roll(tour, -1)
    # Of each part (row) between each place and the next one (column) outside of it.
    put = hop_NN[tour[None, :], head[:, None]] + hop_NN[tail[:, None], after[None, :]] - hop_NN[tour, after][None, :]
    away = (places[None, :] - places[:, None]) % count
    gain = np.where((away >= size) & (away < count - 1), saved[:, None] - put, -np.inf)
    row, column = np.unravel_index(int(gain.argmax()), gain.shape)
    part = tour[(row + np.arange(size)) % count]
    rest = tour[(row + size + np.arange(count - size)) % count]
    cut = int((column - row - size) % count) + 1
    return float(gain[row, column]), np.concatenate([rest[:cut], part, rest[cut:]])
