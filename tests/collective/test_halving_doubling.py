"""Halving and doubling, HDRM, and the trees for small vectors: how much each rank sends, in how many steps."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest

from offbeat.collective import HDRM, DoubleBinaryTree, FlatTree, HalvingDoubling, RecursiveDoubling, Ring, Ring2D, cost
from offbeat.collective.paths import Paths
from offbeat.topology import Topology
from tests.collective.networks import MB_S, star

HOSTS = [2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 33]


@pytest.mark.parametrize("hosts", HOSTS)
def test_halving_and_doubling_sends_no_more_than_a_ring(hosts: int) -> None:
    """For any number of ranks, in twice as many steps as it takes to reach all of them by doubling."""
    network = star(*[MB_S] * hosts)
    made = HalvingDoubling().plan(network)
    assert made.sent_parts() == [Fraction(2 * (hosts - 1), hosts)] * hosts
    assert made.steps == 2 * math.ceil(math.log2(hosts))
    least_s = 2 * (hosts - 1) / hosts
    assert cost(made, network, 1e6, block_bytes=math.inf) == pytest.approx(least_s)


@pytest.mark.parametrize("hosts", [4, 8, 16])
def test_partners_exchange_where_they_can(hosts: int) -> None:
    pairs = {(op.step, op.source, op.destination) for op in HalvingDoubling().plan(star(*[MB_S] * hosts)).ops}
    assert all((step, b, a) in pairs for step, a, b in pairs)
    assert len(pairs) == 2 * hosts * int(math.log2(hosts))


@pytest.mark.parametrize(("hosts", "switches"), [(1, 2), (1, 4), (2, 4), (2, 8), (4, 8), (4, 16), (8, 16)])
def test_hdrm_crosses_nobody(hosts: int, switches: int) -> None:
    """In a step no link carries the messages of two hosts, and each passes both layers."""
    network = Topology.bigraph(hosts, switches, rate_mbps=MB_S)
    made, paths = HDRM().plan(network), Paths(network)
    users: dict[tuple[int, int], tuple[int, int]] = {}
    for op in made.ops:
        way = paths.between(op.source, op.destination)
        assert len(way) == 3
        for arc in way:
            assert users.setdefault((op.step, arc), (op.source, op.destination)) == (op.source, op.destination)
    nodes = hosts * switches
    assert cost(made, network, 1e6, block_bytes=math.inf) == pytest.approx(2 * (nodes - 1) / nodes)
    if nodes >= 32:
        assert cost(HalvingDoubling().plan(network), network, 1e6, block_bytes=math.inf) > 1.1 * 2 * (nodes - 1) / nodes


@pytest.mark.parametrize("hosts", HOSTS)
def test_no_rank_is_an_inner_node_of_both_binary_trees(hosts: int) -> None:
    """But for the two roots, which have one child each."""
    made = DoubleBinaryTree().plan(star(*[MB_S] * hosts))
    inner, roots = [], set()
    for tree in (0, 1):
        edges = [(op.source, op.destination) for op in made.ops if op.chunk == tree and op.kind == "copy"]
        children = Counter(parent for parent, _ in edges)
        (root,) = set(children) - {child for _, child in edges}
        assert children[root] == 1
        assert max(children.values()) <= 2
        roots.add(root)
        inner.append(set(children))
    assert inner[0] & inner[1] <= roots
    assert max(made.sent_parts()) <= 2


@pytest.mark.parametrize("hosts", [4, 16, 33])
def test_binary_trees_take_about_twice_the_vector(hosts: int) -> None:
    network = star(*[MB_S] * hosts)
    assert cost(DoubleBinaryTree().plan(network), network, 1e6, block_bytes=1e6 / 256) <= 2.1


@pytest.mark.parametrize("hosts", [4, 8, 16, 12])
def test_small_vectors_take_the_fewest_messages_one_after_the_other(hosts: int) -> None:
    """1 kB, where a message costs 1 ms: log2 N steps against 2 log2 N or 2 (N - 1)."""
    network = star(*[1000.0] * hosts)

    def took(method: RecursiveDoubling | DoubleBinaryTree | HalvingDoubling | Ring) -> float:
        return cost(method.plan(network), network, 1e3, overhead_s=1e-3)

    levels = math.ceil(math.log2(hosts)) + (0 if hosts & hosts - 1 == 0 else 1)
    assert took(RecursiveDoubling()) == pytest.approx(levels * 1e-3, rel=0.05)
    assert took(RecursiveDoubling()) < min(took(DoubleBinaryTree()), took(HalvingDoubling()), took(Ring()))


def test_a_flat_tree_has_two_steps() -> None:
    made = FlatTree(root=2).plan(star(*[MB_S] * 4))
    assert made.steps == 2
    assert made.sent_parts() == [1, 1, 3, 1]


@pytest.mark.parametrize("dims", [(4, 4), (3, 3), (2, 4), (4, 8)])
def test_a_2d_ring_keeps_all_links_of_a_torus_busy(dims: tuple[int, int]) -> None:
    network = Topology.torus(*dims, rate_mbps=MB_S, parallel=True)
    made = Ring2D().plan(network)
    nodes = math.prod(dims)
    assert made.sent_parts() == [Fraction(2 * (nodes - 1), nodes)] * nodes
    assert made.steps == 2 * (sum(dims) - 2)
    if dims[0] == dims[1]:
        took = cost(made, network, 1e6, block_bytes=1e6 / 512)
        assert took <= 1.01 * 2 * (nodes - 1) / nodes / 4
