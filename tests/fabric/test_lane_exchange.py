"""Algorithms carried out over lanes: the bits of the same operations one by one, whatever links do meanwhile."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.collective import Algorithm, Chunk, Op, Ring, WaterFilling
from offbeat.collective.rank_part import part_of
from offbeat.collective.trees import Edge, SpanningTree, all_reduce, gather_up, spread
from offbeat.errors import NetworkError
from offbeat.fabric.lane_exchange import LaneExchange
from offbeat.testing.chaos_proxy import Damage
from offbeat.topology import Topology
from offbeat.wire.lane import StagingPool
from tests.wire.meshes import in_loop, meshes

if TYPE_CHECKING:
    from offbeat.wire.mesh import PeerMesh

WHOLE = (Chunk(Fraction(0), Fraction(1)),)


def add(out: memoryview, own: memoryview, received: bytearray) -> None:
    np.add(np.frombuffer(own, np.float32), np.frombuffer(received, np.float32), out=np.frombuffer(out, np.float32))


def one_by_one(algorithm: Algorithm, vectors: list[np.ndarray]) -> list[np.ndarray]:
    """The operations of an algorithm in the order of its list; a chunk that a rank has no part in is as it was."""
    numel = len(vectors[0])
    results = [vector.copy() for vector in vectors]
    for number, chunk in enumerate(algorithm.chunks):
        place = chunk.place(numel)
        has = {(rank, 0): vectors[rank][place] for rank in range(algorithm.nodes)}
        come = dict.fromkeys(range(algorithm.nodes), 0)
        for op in (op for op in algorithm.ops if op.chunk == number):
            sent, at = has[op.source, len(op.after)], (op.destination, come[op.destination])
            come[op.destination] += 1
            has[op.destination, come[op.destination]] = has[at] + sent if op.kind == "reduce" else sent
        for rank in range(algorithm.nodes):
            results[rank][place] = has[rank, come[rank]]
    return results


def random_trees(nodes: int, chunks: int, seed: int) -> list[SpanningTree]:
    draw, made = random.Random(seed), []
    for _ in range(chunks):
        ranks = draw.sample(range(nodes), nodes)
        steps = {ranks[0]: -1}
        edges: list[Edge] = []
        for place, rank in enumerate(ranks[1:], 1):
            parent = draw.choice(ranks[:place])
            steps[rank] = max(steps[parent] + 1, edges[-1].step if edges else 0)
            edges.append(Edge(parent, rank, steps[rank]))
        made.append(SpanningTree(ranks[0], tuple(edges)))
    return made


def recursive_doubling() -> Algorithm:
    """Four ranks that exchange all they have with one partner and then with another."""
    ops: list[Op] = []
    for step, distance in enumerate((1, 2)):
        before = len(ops)
        ops += [Op("reduce", 0, rank, rank ^ distance, step, () if step == 0 else (rank ^ 1,)) for rank in range(4)]
        assert len(ops) == before + 4
    return Algorithm("doubling", 4, WHOLE, tuple(ops))


ALGORITHMS = [
    *(Ring().plan(Topology.star([f"h{i}" for i in range(n)])) for n in (2, 3, 4)),
    *(all_reduce("trees", 4, random_trees(4, 3, seed)) for seed in range(3)),
    spread("broadcast", 4, random_trees(4, 1, 7)),
    gather_up("reduce", 3, random_trees(3, 1, 8)),
    recursive_doubling(),
    WaterFilling(4).plan(Topology.star(["h0", "h1", "h2"])),
]


class Run:
    """One algorithm on all ranks, each with a vector of its own."""

    def __init__(self, made: list[PeerMesh], algorithm: Algorithm, numel: int, number: int = 0) -> None:
        algorithm.verify()
        self.vectors = [np.random.default_rng(rank).standard_normal(numel, np.float32) for rank in range(len(made))]
        self.expected = one_by_one(algorithm, self.vectors)
        self.results = [vector.copy() for vector in self.vectors]
        self.exchanges = [
            LaneExchange(
                one.channel(0),
                number,
                part_of(algorithm, rank),
                f"a sum of {numel} float32",
                [
                    memoryview(self.results[rank].data).cast("B")[4 * place.start : 4 * place.stop]
                    for place in (chunk.place(numel) for chunk in algorithm.chunks)
                ],
                add,
                StagingPool(),
            )
            for rank, one in enumerate(made)
        ]

    async def until_over(self, timeout_s: float = 20) -> None:
        async with asyncio.timeout(timeout_s):
            while not all(one.done() for one in self.exchanges):
                await asyncio.sleep(0.005)
        for one in self.exchanges:
            assert one.wait(timedelta(0))


@pytest.mark.parametrize("numel", [0, 1, 2, 1000, 700_001])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: f"{one.name}-{one.nodes}-{one.digest[:4]}")
@in_loop
async def test_the_bits_of_one_by_one(algorithm: Algorithm, numel: int) -> None:
    async with meshes(algorithm.nodes) as (made, _):
        run = Run(made, algorithm, numel)
        for exchange in run.exchanges:
            exchange.begin()
        await run.until_over()
        for got, expected in zip(run.results, run.expected, strict=True):
            assert np.array_equal(got, expected)


@in_loop
async def test_many_at_a_time_do_not_mix() -> None:
    async with meshes(3) as (made, _):
        runs = [Run(made, ALGORITHMS[1], 10_000 * (number + 1), number) for number in range(8)]
        for rank in (2, 0, 1):
            for run in runs:
                run.exchanges[rank].begin()
            await asyncio.sleep(0.01)
        for run in runs:
            await run.until_over()
            assert all(np.array_equal(*pair) for pair in zip(run.results, run.expected, strict=True))


@pytest.mark.parametrize("kind", ["cut", "flip", "drop", "repeat", "swap"])
@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_nothing_is_lost_when_links_break(kind: str, seed: int) -> None:
    """Each link breaks, or is damaged, in the middle of what goes over it; the sum has the same bits."""
    draw = random.Random(seed)
    damages = {
        pair: [
            Damage(kind, at=draw.randrange(5_000, 600_000), size=draw.randrange(1, 2000), up=up) for up in (True, False)
        ]
        for pair in ((0, 1), (1, 2), (0, 2))
    }
    async with meshes(3, proxied=damages, timeout_s=4) as (made, _):
        for number in range(4):
            run = Run(made, all_reduce("trees", 3, random_trees(3, 4, seed)), 400_000, number)
            for exchange in run.exchanges:
                exchange.begin()
            await run.until_over()
            assert all(np.array_equal(*pair) for pair in zip(run.results, run.expected, strict=True))
        assert any(damage.fired for both in damages.values() for damage in both)


@in_loop
async def test_what_is_owed_is_told() -> None:
    async with meshes(2) as (made, _):
        run = Run(made, ALGORITHMS[0], 1000)
        run.exchanges[0].begin()
        await asyncio.sleep(0.05)
        owed = run.exchanges[0].owed()
        assert {(one.rank, one.have_bytes, one.size_bytes) for one in owed} == {(1, 0, 2000)}
        assert all(0.03 < one.silent_s < 5 for one in owed)
        run.exchanges[1].begin()
        await run.until_over()
        assert not run.exchanges[0].owed()


@in_loop
async def test_a_lost_rank_is_named() -> None:
    async with meshes(3) as (made, _):
        run = Run(made, ALGORITHMS[1], 1000)
        run.exchanges[0].begin()
        made[2].abort()
        async with asyncio.timeout(3):
            while not run.exchanges[0].done():
                await asyncio.sleep(0.01)
        with pytest.raises(NetworkError, match="Cannot continue without rank 2"):
            run.exchanges[0].wait(timedelta(0))
