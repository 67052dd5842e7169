"""Algorithms from trees: each chunk is summed up along a tree to its root, and spread along one from there.

Where every chunk has a tree of its own, and no link is in two trees at the same time, that is all that there is to an
all-reduce (Huang et al., "Communication algorithm-architecture co-design for distributed deep learning", ISCA 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from offbeat.collective.algorithm import Algorithm, Chunk, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Edge(NamedTuple):
    """A child that hears from its parent in a step, or is heard by it."""

    parent: int
    child: int
    step: int = 0


@dataclass(frozen=True)
class SpanningTree:
    """A tree that reaches all ranks.

    Args:
        root: where it begins.
        edges: in an order in which each parent is there before its children; steps do not go down along a path.
    """

    root: int
    edges: tuple[Edge, ...]

    @property
    def steps(self) -> int:
        return max((edge.step for edge in self.edges), default=-1) + 1


def equal_parts(count: int) -> list[tuple[Fraction, Fraction]]:
    """Begin and end of so many equal parts."""
    return [(Fraction(i, count), Fraction(i + 1, count)) for i in range(count)]


def all_reduce(
    name: str,
    nodes: int,
    trees: Sequence[SpanningTree],
    *,
    parts: Sequence[tuple[Fraction, Fraction]] | None = None,
    reduce_trees: Sequence[SpanningTree] | None = None,
    uses_slots: bool = False,
) -> Algorithm:
    """Sum each chunk up along its tree, from the last step to the first, and spread it along the same tree again.

    Args:
        name: of the method.
        nodes: how many ranks there are.
        trees: one per chunk.
        parts: of the vector, one per chunk; equal ones if None.
        reduce_trees: to sum up along other trees, with the same roots.
        uses_slots: whether steps are time slots, in which no link is used twice.
    """
    reduce_trees = trees if reduce_trees is None else reduce_trees
    parts = equal_parts(len(trees)) if parts is None else parts
    ups = max(tree.steps for tree in reduce_trees)
    ops: list[Op] = []
    heard: list[dict[int, tuple[int, ...]]] = [{} for _ in trees]  # by chunk and rank: what has come to it
    for step, chunk, edge in _in_order(reduce_trees, last_first=True):
        here = heard[chunk]
        came = here.get(edge.child, ())
        here[edge.parent] = (*here.get(edge.parent, ()), len(ops))
        ops.append(Op("reduce", chunk, edge.child, edge.parent, ups - 1 - step, came))
    for step, chunk, edge in _in_order(trees, last_first=False):
        here = heard[chunk]
        came = here.get(edge.parent, ())
        here[edge.child] = (*here.get(edge.child, ()), len(ops))
        ops.append(Op("copy", chunk, edge.parent, edge.child, ups + step, came))
    chunks = tuple(Chunk(*part) for part in parts)
    return Algorithm(name, nodes, chunks, tuple(ops), uses_slots)


def spread(name: str, nodes: int, trees: Sequence[SpanningTree], *, uses_slots: bool = False) -> Algorithm:
    """Spread each chunk from the root of its tree: a broadcast, or an all-gather."""
    heard: list[dict[int, int]] = [{} for _ in trees]
    ops: list[Op] = []
    for step, chunk, edge in _in_order(trees, last_first=False):
        came = heard[chunk].get(edge.parent)
        heard[chunk][edge.child] = len(ops)
        ops.append(Op("copy", chunk, edge.parent, edge.child, step, () if came is None else (came,)))
    chunks = tuple(Chunk(*part, source=tree.root) for part, tree in zip(equal_parts(len(trees)), trees, strict=True))
    return Algorithm(name, nodes, chunks, tuple(ops), uses_slots)


def gather_up(name: str, nodes: int, trees: Sequence[SpanningTree], *, uses_slots: bool = False) -> Algorithm:
    """Sum each chunk up to the root of its tree: a reduce, or a reduce-scatter."""
    heard: list[dict[int, list[int]]] = [{} for _ in trees]
    ops: list[Op] = []
    ups = max(tree.steps for tree in trees)
    for step, chunk, edge in _in_order(trees, last_first=True):
        came = tuple(heard[chunk].get(edge.child, ()))
        heard[chunk].setdefault(edge.parent, []).append(len(ops))
        ops.append(Op("reduce", chunk, edge.child, edge.parent, ups - 1 - step, came))
    chunks = tuple(Chunk(*part, target=tree.root) for part, tree in zip(equal_parts(len(trees)), trees, strict=True))
    return Algorithm(name, nodes, chunks, tuple(ops), uses_slots)


def _in_order(trees: Sequence[SpanningTree], *, last_first: bool) -> Iterable[tuple[int, int, Edge]]:
    """All edges, by step, then chunk, then their order in the tree; in the reverse order if so."""
    by_step: list[list[tuple[int, Edge]]] = [[] for _ in range(max((tree.steps for tree in trees), default=0))]
    for chunk, tree in enumerate(trees):
        for edge in tree.edges:
            by_step[edge.step].append((chunk, edge))
    steps = list(enumerate(by_step))
    for step, edges in reversed(steps) if last_first else steps:
        for chunk, edge in reversed(edges) if last_first else edges:
            yield step, chunk, edge
