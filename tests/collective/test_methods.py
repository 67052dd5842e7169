"""All methods: each is an all-reduce on each network, the same each time, and adds what it should."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pytest

from offbeat.collective import (
    HDRM,
    Algorithm,
    BidirectionalRing,
    DoubleBinaryTree,
    FlatTree,
    Greedy,
    HalvingDoubling,
    MultiTree,
    PipelinedTrees,
    RecursiveDoubling,
    Ring,
    Ring2D,
    WaterFilling,
    bound,
    cost,
)
from offbeat.errors import PlanError, ScenarioError
from offbeat.topology import Link, Topology
from tests.collective.networks import MB_S, drawn, star, with_rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Method(Protocol):
    def plan(self, network: Topology) -> Algorithm: ...


ANYWHERE: list[Method] = [
    Ring(),
    Ring(by_links=True),
    BidirectionalRing(),
    BidirectionalRing(by_links=True),
    Ring2D(),
    Ring2D(rows=1),
    HalvingDoubling(),
    DoubleBinaryTree(),
    RecursiveDoubling(),
    FlatTree(),
    MultiTree(),
    MultiTree(split=3),
    MultiTree(released=True),
    MultiTree(interfaces=1),
    Greedy(split=2, seeds=2),
    PipelinedTrees(8),
]
AT_SWITCH: list[Method] = [WaterFilling(), WaterFilling(1)]
ON_BIGRAPH: list[Method] = [HDRM()]

NETWORKS = {
    **{f"star {hosts}": star(*[MB_S] * hosts) for hosts in (1, 2, 3, 4, 7)},
    "star of unequal links": star(MB_S, MB_S / 3, MB_S / 8, MB_S, 2 * MB_S),
    "star of links that differ there and back": with_rates(star(8, 8, 8, 8), [(8, 2), (4, 8), (8, 8), (3, 1)]),
    "star not shaped": star(*[None] * 4),
    "ring 2": Topology.ring(2, rate_mbps=MB_S),
    "ring 5": Topology.ring(5, rate_mbps=MB_S),
    "mesh 3x3": Topology.mesh(3, 3, rate_mbps=MB_S, latency_ms=1),
    "torus 3x4": Topology.torus(3, 4, rate_mbps=MB_S),
    "torus 2x2x2 not shaped": Topology.torus(2, 2, 2),
    "torus with parallel links": Topology.torus(2, 3, rate_mbps=MB_S, parallel=True),
    "fat tree 2, 3": Topology.fat_tree(2, 3, rate_mbps=MB_S),
    "bigraph 2, 4": Topology.bigraph(2, 4, rate_mbps=MB_S),
    **{f"drawn {seed}": drawn(seed) for seed in range(4)},
}
CASES = [(method, name) for name in NETWORKS for method in ANYWHERE]
CASES += [(method, name) for name in NETWORKS if name.startswith("star") for method in AT_SWITCH]
CASES += [(method, "bigraph 2, 4") for method in ON_BIGRAPH]
every_case = pytest.mark.parametrize(
    ("method", "name"), CASES, ids=[f"{method!r}-{name}".replace(" ", "_") for method, name in CASES]
)


NAMED = r"operation \d+.*rank \d+.*chunk \d+|rank \d+ lacks the contribution.*chunk \d+"


def carried_out(algorithm: Algorithm, vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What ranks have in the end: each operation sends what was there after the last one of its `after`."""
    own = [vector.copy() for vector in vectors]
    held: dict[tuple[int, int, int], np.ndarray] = {}  # by rank, chunk and how many came
    count: dict[tuple[int, int], int] = {}
    for op in algorithm.ops:
        place = algorithm.chunks[op.chunk].place(len(vectors[0]))
        sent = held[op.source, op.chunk, len(op.after)] if op.after else own[op.source][place]
        number = count.get((op.destination, op.chunk), 0)
        before = held[op.destination, op.chunk, number] if number else own[op.destination][place]
        count[op.destination, op.chunk] = number + 1
        held[op.destination, op.chunk, number + 1] = before + sent if op.kind == "reduce" else sent
    for (rank, chunk), number in count.items():
        own[rank][algorithm.chunks[chunk].place(len(vectors[0]))] = held[rank, chunk, number]
    return own


@every_case
def test_it_is_an_all_reduce(method: Method, name: str) -> None:
    """It adds up vectors of any length to the same bits everywhere, is the same each time, and breaks no bound."""
    network = NETWORKS[name]
    made = method.plan(network)
    made.verify()
    assert made.nodes == len(network.hosts)
    assert made.collective == "all-reduce"
    assert eval(made.name, {type(method).__name__: type(method)}) == method

    written = made.to_bytes()
    assert method.plan(network).to_bytes() == written
    assert Algorithm.from_bytes(written) == made

    draw = random.Random(name)
    for numel in (0, 1, draw.randrange(2, 50), draw.randrange(1000, 2000)):
        numbers = np.random.default_rng(numel)
        vectors = [numbers.standard_normal(numel) for _ in range(made.nodes)]
        results = carried_out(made, vectors)
        assert all(result.tobytes() == results[0].tobytes() for result in results)
        np.testing.assert_allclose(results[0], np.sum(vectors, axis=0), atol=1e-9)

    assert cost(made, network, 1e6, block_bytes=1e5) >= least_s(name) * (1 - 1e-6)


@functools.cache
def least_s(name: str) -> float:
    return bound(NETWORKS[name], 1e6).any_method_s


def changes(made: Algorithm, draw: random.Random) -> Iterator[Algorithm]:
    """The same with one thing wrong."""

    def changed(number: int, **wrong: object) -> Algorithm:
        ops = list(made.ops)
        ops[number] = ops[number]._replace(**wrong)  # type: ignore[arg-type]
        return Algorithm(made.name, made.nodes, made.chunks, tuple(ops), made.uses_slots)

    reduces = [number for number, op in enumerate(made.ops) if op.kind == "reduce"]
    later = [number for number, op in enumerate(made.ops) if op.kind == "reduce" and op.after]
    yield changed(draw.choice(reduces), kind="copy")
    yield changed(draw.choice(reduces), destination=made.ops[reduces[0]].source)
    yield changed(draw.choice(reduces), chunk=len(made.chunks))
    yield changed(draw.choice(reduces), step=-1)
    yield changed(draw.choice(reduces), after=(len(made.ops) - 1,))
    yield Algorithm(made.name, made.nodes, made.chunks, made.ops[:-1])
    yield Algorithm(made.name, made.nodes, made.chunks, (*made.ops, made.ops[reduces[-1]]))
    if later:
        yield changed(draw.choice(later), after=())
        yield changed(draw.choice(later), after=(reduces[-1],))
    if len(made.chunks) > 1:
        yield changed(draw.choice(reduces), chunk=(made.ops[reduces[0]].chunk + 1) % len(made.chunks))


@pytest.mark.parametrize("method", [*ANYWHERE, *AT_SWITCH], ids=repr)
@pytest.mark.parametrize("hosts", [3, 6])
def test_a_changed_schedule_is_refused_by_name(method: Method, hosts: int) -> None:
    made, draw = method.plan(star(*[MB_S] * hosts)), random.Random(hosts)
    refused = 0
    for wrong in changes(made, draw):
        if wrong.ops == made.ops:
            continue
        with pytest.raises(
            PlanError, match=r"operation \d+.*rank \d+.*chunk \d+|rank \d+ lacks the contribution.*chunk \d+"
        ):
            wrong.verify()
        refused += 1
    assert refused >= 6


@pytest.mark.parametrize("method", [*ANYWHERE, *AT_SWITCH], ids=repr)
def test_a_link_that_carries_nothing_is_refused(method: Method) -> None:
    """As a measurement may say; a file with such a rate is refused when it is read."""
    network = star(*[MB_S] * 3)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ScenarioError, match="Cannot shape a link to"):
            with_rates(network, [(rate, MB_S)] * 3)
        wrong = star(*[MB_S] * 3)
        object.__setattr__(wrong, "links", tuple(Link(link.a, link.b, rate) for link in network.links))
        with pytest.raises(PlanError, match=r"Cannot plan over the link from 'h0' to 'switch' at .* Mbit/s"):
            method.plan(wrong)


@pytest.mark.parametrize("method", ANYWHERE, ids=repr)
def test_hosts_that_are_not_connected_are_refused(method: Method) -> None:
    with pytest.raises(ScenarioError, match="Cannot find a way from 'a' to 'c'"):
        Topology.from_table([("a", "b", 8.0, None, 0.0), ("c", "d", 8.0, None, 0.0)])
    network = Topology.from_table([("a", "b", 8.0, None, 0.0), ("b", "c", 8.0, None, 0.0)])
    object.__setattr__(network, "links", network.links[:1])
    with pytest.raises(PlanError, match="Cannot plan among 3 hosts: no way leads from 'a' to 'c'"):
        method.plan(network)


def test_a_root_is_a_rank() -> None:
    with pytest.raises(PlanError, match="Cannot take rank 5 as the root: there are ranks 0 to 3"):
        FlatTree(5).plan(star(*[MB_S] * 4))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Greedy(split=0), "Cannot plan Greedy with split=0"),
        (lambda: Greedy(seeds=0), "Cannot plan Greedy with seeds=0"),
        (lambda: Greedy(size_bytes=float("nan")), "Cannot plan Greedy with size_bytes=nan"),
        (lambda: PipelinedTrees(0), "Cannot plan PipelinedTrees with count=0"),
        (lambda: Ring2D(rows=0), "Cannot plan Ring2D with rows=0"),
        (lambda: Ring(by_links=1), "Cannot plan Ring with by_links=1: choose True or False"),  # type: ignore[arg-type]
        (lambda: FlatTree(-1), "Cannot plan FlatTree with root=-1"),
        (lambda: PipelinedTrees(2.5), "with count=2.5: choose a whole number"),  # type: ignore[arg-type]
        (lambda: Greedy(split=True), r"with split=True.* - at `plan\.collective\.split`"),
        (lambda: Ring2D(rows=3).plan(star(*[MB_S] * 4)), "with rows=3 for 4 hosts: rows are equally long"),
        (lambda: HDRM().plan(star(*[MB_S] * 4)), "Cannot plan HDRM for 4 hosts and 1 switches"),
        (lambda: HDRM().plan(Topology.bigraph(3, 4)), "Cannot plan HDRM for 12 hosts and 4 switches"),
        (lambda: HDRM().plan(Topology.bigraph(4, 4)), "no more hosts at a switch than switches in a layer"),
        (lambda: HDRM().plan(Topology.torus(2, 2)), "Cannot plan HDRM for 4 hosts and 0 switches"),
        (lambda: HDRM().plan(Topology.fat_tree(2, 3)), "Cannot plan HDRM for 8 hosts and 12 switches"),
    ],
)
def test_what_a_method_cannot_do(make: object, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()  # type: ignore[operator]
