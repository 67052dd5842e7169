"""Rarest first: chunks spread over unequal links, each link by itself, as in a swarm.

Whenever a link is free, it carries the chunk that the fewest ranks have, of those that its end lacks and its beginning
has; ties are drawn. So the way of each chunk grows link by link, and time is that of each link, not of steps. TACOS
matches links and chunks in a similar way over an expanded network (Won et al., MICRO 2024).

A link so slow that its end would have all it lacks from other links before the chunk came is left alone.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

from offbeat.collective.trees import Edge, SpanningTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.collective.paths import Paths

_PER_S = 10**12
_ARRIVED, _FREED = range(2)


class _Way:
    """The arcs from one rank to another that none stands between: how long each is busy with a chunk."""

    def __init__(self, source: int, target: int, busy: list[tuple[int, int]], latency: int) -> None:
        self.source, self.target = source, target
        self.busy = busy  # arcs, and times
        self.length = max((time for _, time in busy), default=0)
        self.takes = self.length + latency


def spread_times(
    paths: Paths, sources: Sequence[int], chunk_bytes: float, *, seed: int, reverse: bool = False
) -> tuple[float, list[list[tuple[float, int, int]]]]:
    """Let each link carry the rarest chunk, until all ranks have all.

    Args:
        sources: of the chunks, which are equally large.
        seed: of the draws.
        reverse: over the arcs turned round.

    Returns:
        the time of all, in seconds, and of each chunk when it left which rank for which.
    """
    swarm = _Swarm(paths, sources, chunk_bytes, seed, reverse=reverse)
    swarm.run()
    return swarm.now / _PER_S, [[(begin / _PER_S, a, b) for begin, a, b in one] for one in swarm.sent]


def trees_of(sent: Sequence[Sequence[tuple[float, int, int]]], sources: Sequence[int]) -> list[SpanningTree]:
    """The trees along which chunks spread; the steps are the times at which something left, in order."""
    steps = {begin: step for step, begin in enumerate(sorted({begin for one in sent for begin, _, _ in one}))}
    return [
        SpanningTree(source, tuple(Edge(a, b, steps[begin]) for begin, a, b in one))
        for source, one in zip(sources, sent, strict=True)
    ]


class _Swarm:
    """Chunks on their way. Sets of chunks are integers, a bit for each."""

    def __init__(self, paths: Paths, sources: Sequence[int], chunk_bytes: float, seed: int, *, reverse: bool) -> None:
        self.random = random.Random(seed)
        self.everything = (1 << len(sources)) - 1
        self.have = [0] * paths.ranks
        for chunk, source in enumerate(sources):
            self.have[source] |= 1 << chunk
        self.expected = list(self.have)  # what a rank has or what is on its way there
        self.copies = [1] * len(sources)
        self.by_copies = [0] * (paths.ranks + 1)
        self.by_copies[1] = self.everything
        self.free_at = [0] * len(paths.arcs)
        self.ways = self._ways(paths, chunk_bytes, reverse=reverse)
        self.out: list[list[_Way]] = [[] for _ in range(paths.ranks)]
        self.into: list[list[_Way]] = [[] for _ in range(paths.ranks)]
        self.over: list[list[_Way]] = [[] for _ in paths.arcs]
        self.left_alone: list[set[_Way]] = [set() for _ in range(paths.ranks)]
        for way in self.ways:
            self.out[way.source].append(way)
            self.into[way.target].append(way)
            for arc, _ in way.busy:
                self.over[arc].append(way)
        self.sent: list[list[tuple[int, int, int]]] = [[] for _ in sources]
        self.events: list[tuple[int, int, int, int]] = []
        self.now = 0

    def run(self) -> None:
        """Go on until all ranks have all chunks."""
        self._try_all(self.ways)
        while any(have != self.everything for have in self.have):
            if not self.events:
                self._try_all(self.ways, force=True)
            self.now = self.events[0][0]
            # What happens at the same time is seen as a whole, before links choose.
            ways: dict[_Way, None] = {}
            while self.events and self.events[0][0] == self.now:
                _, kind, number, chunk = heapq.heappop(self.events)
                if kind == _FREED:
                    ways.update(dict.fromkeys(self.over[number]))
                else:
                    self.have[number] |= chunk
                    ways.update(dict.fromkeys(self.out[number]))
                    ways.update(dict.fromkeys(way for way in self.into[number] if way in self.left_alone[number]))
                    self.left_alone[number].clear()
            self._try_all(list(ways))

    def _try_all(self, ways: Sequence[_Way], *, force: bool = False) -> None:
        """Let free links choose; those that are slow choose last, those that are equal in a drawn order."""
        free = [way for way in ways if self._is_free(way) and self.have[way.source] & ~self.expected[way.target]]
        for way in sorted(free, key=lambda way: (way.takes, self.random.random())):
            if not self._is_free(way) or not (chunks := self.have[way.source] & ~self.expected[way.target]):
                continue
            if not force and self._comes_sooner(way):
                self.left_alone[way.target].add(way)
            else:
                self._send(way, self._rarest(chunks))

    def _is_free(self, way: _Way) -> bool:
        return all(self.free_at[arc] <= self.now for arc, _ in way.busy)

    def _rarest(self, chunks: int) -> int:
        """Draw one of the chunks that the fewest ranks have or will have."""
        found = next(chunks & same for same in self.by_copies if chunks & same)
        # The first bit at or above a drawn place, or from the beginning.
        place = self.random.randrange(found.bit_length())
        above = found >> place
        return (above & -above) << place if above else found & -found

    def _comes_sooner(self, way: _Way) -> bool:
        """Whether other links bring a rank all it lacks before this one would have brought a chunk."""
        lacking = (self.everything & ~self.expected[way.target]).bit_count()
        end = self.now + way.takes
        for other in self.into[way.target]:
            if other is not way and other.takes < way.takes:
                begin = max(self.now, *(self.free_at[arc] for arc, _ in other.busy))
                lacking -= max(0, end - begin) // max(1, other.length)
        return lacking <= 0

    def _send(self, way: _Way, bit: int) -> None:
        chunk = bit.bit_length() - 1
        self.expected[way.target] |= bit
        self.by_copies[self.copies[chunk]] ^= bit
        self.copies[chunk] += 1
        self.by_copies[self.copies[chunk]] |= bit
        self.sent[chunk].append((self.now, way.source, way.target))
        for arc, time in way.busy:
            self.free_at[arc] = self.now + time
            heapq.heappush(self.events, (self.now + time, _FREED, arc, 0))
        heapq.heappush(self.events, (self.now + way.takes, _ARRIVED, way.target, bit))

    def _ways(self, paths: Paths, chunk_bytes: float, *, reverse: bool) -> list[_Way]:
        # Where no link is shaped, all are alike.
        byte_s = paths.byte_s if any(paths.byte_s) else [1e-9] * len(paths.arcs)
        found = []
        for source in range(paths.ranks):
            for target in paths.neighbours[source]:
                arcs = paths.between(source, target)
                busy = [(arc, round(chunk_bytes * byte_s[arc] * _PER_S)) for arc in arcs]
                latency = round(sum(paths.latency_s[arc] for arc in arcs) * _PER_S)
                ends = (target, source) if reverse else (source, target)
                found.append(_Way(*ends, busy, latency))
        return found
