"""Trees of a reduce against a brute force that knows nothing of how they are made."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest

from offbeat.objects.reduce_plan import CALLER, LinkEstimate, ReduceTree, choose, in_order

if TYPE_CHECKING:
    from collections.abc import Iterator

GIGABIT = LinkEstimate(latency_s=0.0002, bytes_per_s=118e6, block_bytes=512 << 10)
TREES = [ReduceTree(n, degree) for n in range(1, 17) for degree in range(1, n + 1)] + [ReduceTree(4000, 1)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.n} by {tree.degree}")
class TestTree:
    def test_each_source_reaches_the_caller_once(self, tree: ReduceTree) -> None:
        assert sorted(itertools.chain(*tree.children.values())) == list(range(tree.n))
        assert all(len(below) <= tree.degree for below in tree.children.values())
        for position in range(tree.n) if tree.n < 100 else [0]:
            path = tree.path_to_caller(position)
            assert len(path) == tree.levels[position] - 1
            assert len(set(path)) == len(path)

    def test_positions_are_numbered_in_order(self, tree: ReduceTree) -> None:
        """A position's first child's subtree ends just before it, and its other subtrees begin just after it."""
        if tree.n > 100:
            assert tree.parents == (*range(1, tree.n), CALLER)
            return

        def subtree(position: int) -> list[int]:
            below = [subtree(child) for child in tree.children[position]]
            return [*(below[0] if below else []), position, *itertools.chain(*below[1:])]

        walked = list(itertools.chain(*(subtree(child) for child in tree.children[CALLER])))
        assert walked == list(range(tree.n))

    def test_it_is_as_flat_as_its_degree_allows(self, tree: ReduceTree) -> None:
        width = rooms = 1
        for _ in range(max(tree.levels) - 1):
            width *= tree.degree
            rooms += width
        assert rooms <= tree.n, "with a level less it would not have had room"


def simulated_s(tree: ReduceTree, blocks: int, link: LinkEstimate) -> float:
    """When the caller has the last block: each node takes in its children's blocks by turns, one after another."""
    arrives: dict[tuple[int, int], float] = {}  # of a position's sum at its parent

    @functools.cache
    def ready_s(position: int, block: int) -> float:
        return max((arrives[child, block] for child in tree.children[position]), default=0.0)

    deepest_first = sorted([*range(tree.n), CALLER], key=lambda p: tree.levels[p] if p != CALLER else 0, reverse=True)
    for parent in deepest_first:
        free_s = 0.0
        for block in range(blocks):
            for child in tree.children[parent]:
                began_s = max(free_s, ready_s(child, block) + link.latency_s)
                free_s = arrives[child, block] = began_s + link.block_bytes / link.bytes_per_s
    return max(arrives[child, blocks - 1] for child in tree.children[CALLER])


@pytest.mark.parametrize("n", range(1, 17))
@pytest.mark.parametrize("blocks", [1, 2, 7, 40])
@pytest.mark.parametrize("latency_s", [0.0, 0.001, 0.05])
def test_the_time_is_that_of_a_pipeline_and_the_cheapest_is_chosen(n: int, blocks: int, latency_s: float) -> None:
    link = LinkEstimate(latency_s, 118e6, 512 << 10)
    size = blocks * link.block_bytes
    trees = [ReduceTree(n, degree) for degree in range(1, n + 1)]
    by_simulation = {tree: simulated_s(tree, blocks, link) for tree in trees}
    for tree, seconds in by_simulation.items():
        # The formula fills each level as if all of its nodes had as many children as the degree says.
        assert seconds <= tree.seconds(size, link) * 1.001 + latency_s
    chosen = choose(n, size, link)
    assert chosen.seconds(size, link) == min(tree.seconds(size, link) for tree in trees)
    assert by_simulation[chosen] <= 1.25 * min(by_simulation.values())


def partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


@functools.cache
def all_shapes(n: int) -> frozenset[tuple[int, int]]:
    """(levels, most children of a node) of every rooted tree with `n` nodes below its root."""
    if not n:
        return frozenset({(0, 0)})
    found = set()
    for sizes in partitions(n, n):
        for below in itertools.product(*(all_shapes(size - 1) for size in sizes)):
            found.add((1 + max(levels for levels, _ in below), max(len(sizes), *(most for _, most in below))))
    return frozenset(found)


@pytest.mark.parametrize("n", range(1, 11))
@pytest.mark.parametrize("size", [1 << 10, 64 << 10, 1 << 20, 100 << 20])
def test_no_tree_of_any_shape_is_cheaper(n: int, size: int) -> None:
    """Of those in which a node's slowest hop and its slowest link count, as in `ReduceTree.seconds`."""
    block = min(size, GIGABIT.block_bytes)
    rate = GIGABIT.bytes_per_s
    least_s = min(
        levels * (GIGABIT.latency_s + most * block / rate) + most * (size - block) / rate
        for levels, most in all_shapes(n)
    )
    assert choose(n, size, GIGABIT).seconds(size, GIGABIT) == pytest.approx(least_s)


def test_what_is_ready_first_is_summed_early() -> None:
    """After t arrivals the first t positions are filled: below each of them nothing is missing on its first child's
    side."""
    tree = ReduceTree(13, 3)
    for arrived in range(1, 14):
        for position in range(arrived):
            first = tree.children[position][:1]
            assert all(child < position for child in first)


def test_sums_with_the_same_bits_add_in_the_order_of_the_sources() -> None:
    small, large = in_order(5, 1 << 10), in_order(5, 1 << 30)
    assert small.children == {CALLER: (0, 1, 2, 3, 4)} | dict.fromkeys(range(5), ())
    assert large.parents == (1, 2, 3, 4, CALLER)


@pytest.mark.parametrize("wrong", [(-1.0, 1.0, 1), (0.0, 0.0, 1), (float("nan"), 1.0, 1), (0.0, 1.0, 0)])
def test_links_that_cannot_be(wrong: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="Cannot plan by"):
        LinkEstimate(*wrong)


def test_trees_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="without sources"):
        choose(0, 10, GIGABIT)
    for n, degree in ((3, 0), (3, 4), (0, 0)):
        with pytest.raises(ValueError, match="Cannot plan a reduce"):
            ReduceTree(n, degree)
