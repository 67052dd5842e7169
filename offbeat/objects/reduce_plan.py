"""The tree along which the sources of a reduce are summed.

    caller           six sources, degree 2
    ├── 1
    │   ├── 0        A position adds what its children send to its own source, and sends that to its parent. The caller,
    │   └── 2        above all positions, keeps the sum.
    └── 4
        ├── 3
        └── 5

The tree is a complete d-ary one with the caller as its root, from a chain (d = 1) to a star (d = n). Everything is
pipelined in blocks: a chain costs a hop per source and the object's bytes once, a star one hop and the bytes of all
sources through the caller's link. `choose` takes the cheapest by the latency and the bandwidth that were measured.

Positions are numbered by a generalised in-order walk: the first child's subtree, then the position itself, then its
other children's subtrees. Sources take positions in the order in which they become ready, so whole subtrees are summed
early, and what a position waits for is usually there before it.

After Zhuang et al., "Hoplite: Efficient and Fault-Tolerant Collective Communication for Task-Based Distributed
Systems", SIGCOMM 2021, section 4.3, where the degrees 1, 2 and n are compared; here all are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

CALLER = -1
"""The parent of the positions that send to the caller."""


@dataclass(frozen=True)
class LinkEstimate:
    """An estimate of the links between stores.

    Args:
        latency_s: seconds from one store to another, as blocks of no size take.
        bytes_per_s: that the link of one store carries each way.
        block_bytes: in which objects travel.
    """

    latency_s: float
    bytes_per_s: float
    block_bytes: int

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0 and self.block_bytes > 0):
            raise ValueError(
                f"Cannot plan by {self}: a latency of 0 or more, and a rate and blocks above 0, are needed."
            )


@dataclass(frozen=True)
class ReduceTree:
    """A complete tree of `n` positions below a caller, whose nodes have at most `degree` children.

    Args:
        n: sources, each at one position.
        degree: children of a node, the caller among them; 1 is a chain, `n` a star.

    >>> ReduceTree(6, 2).parents
    (1, -1, 1, 4, -1, 4)
    >>> ReduceTree(4, 1).parents, ReduceTree(4, 4).parents
    ((1, 2, 3, -1), (-1, -1, -1, -1))
    """

    n: int
    degree: int

    def __post_init__(self) -> None:
        if not 1 <= self.degree <= self.n:
            raise ValueError(f"Cannot plan a reduce of {self.n} sources with {self.degree} children a node.")

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Return the parent of each position: the one that it sends to, or `CALLER`."""
        numbers = self._numbers
        return tuple(parent for _, parent in sorted((numbers[i], numbers[(i - 1) // self.degree]) for i in self._nodes))

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Return the children of each position and of the caller, in the order in which they are added."""
        found: dict[int, list[int]] = {position: [] for position in (CALLER, *range(self.n))}
        for position, parent in enumerate(self.parents):
            found[parent].append(position)
        return {position: tuple(below) for position, below in found.items()}

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Return the hops of each position from the caller: 1 for those that send to it."""
        levels = {CALLER: 0}
        for i in self._nodes:  # a parent comes before its children
            levels[self._numbers[i]] = levels[self._numbers[(i - 1) // self.degree]] + 1
        return tuple(levels[position] for position in range(self.n))

    def path_to_caller(self, position: int) -> list[int]:
        """The positions that what `position` sends goes through, from its parent on, without the caller."""
        path = []
        while (position := self.parents[position]) != CALLER:
            path.append(position)
        return path

    def seconds(self, size_bytes: int, link: LinkEstimate, inner_factor: float = 1.0) -> float:
        """The time until the caller has the sum of objects that are all ready.

        A block goes to the next node once it is there whole; a node's children share its link.

        Args:
            size_bytes: of a source on its way.
            link: that each node has.
            inner_factor: how many times these bytes a partial sum has.
        """
        block_bytes = min(size_bytes, link.block_bytes)
        busiest = self.busiest(inner_factor)
        hop_s = link.latency_s + busiest * block_bytes / link.bytes_per_s
        return max(self.levels) * hop_s + busiest * (size_bytes - block_bytes) / link.bytes_per_s

    def busiest(self, inner_factor: float) -> float:
        """Return how many times the bytes of a source the node takes in that takes in most."""
        if inner_factor == 1.0:
            return self.degree
        takes = {at: inner_factor if below else 1.0 for at, below in self.children.items()}
        return max(sum(takes[child] for child in below) for below in self.children.values())

    @property
    def _nodes(self) -> range:
        """The positions as a heap has them, level by level; 0 is the caller."""
        return range(1, self.n + 1)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The in-order number of each of the heap's nodes."""
        numbers, at = {0: CALLER}, 0
        # Without recursion: a chain of 4,000 is 4,000 deep. A node is there twice, before and after its first subtree.
        ahead = [(0, False)]
        while ahead:
            node, is_half_done = ahead.pop()
            below = [child for child in range(node * self.degree + 1, (node + 1) * self.degree + 1) if child <= self.n]
            if not is_half_done:
                ahead += [(child, False) for child in reversed(below[1:])]
                ahead.append((node, True))
                ahead += [(child, False) for child in below[:1]]
            elif node:
                numbers[node] = at
                at += 1
        return numbers


def choose(n: int, size_bytes: int, link: LinkEstimate, inner_factor: float = 1.0) -> ReduceTree:
    """Choose the tree that sums `n` sources of so many bytes first; of equal ones that of the least degree.

    Args:
        n, size_bytes, link: as said.
        inner_factor: as of `ReduceTree.seconds`.

    >>> link = LinkEstimate(latency_s=0.0002, bytes_per_s=118e6, block_bytes=512 << 10)
    >>> [choose(8, size, link).degree for size in (1 << 10, 32 << 10, 1 << 20, 100 << 20)]
    [8, 3, 2, 1]

    Raises:
        ValueError: if there is no source.
    """
    if n < 1:
        raise ValueError("Cannot plan a reduce without sources.")
    trees = (ReduceTree(n, degree) for degree in _degrees(n))
    return min(trees, key=lambda tree: tree.seconds(size_bytes, link, inner_factor))


def ring(n: int, inner_factor: float = 1.0) -> ReduceTree:
    """Choose the tree of one stripe of a sum whose other stripes are made by its `n` sources.

    Each node has as much to do as the others, in a chain as in a star. Where partial sums are wider than sources no
    partial sum travels: each stripe's node gets it from all sources.
    """
    return ReduceTree(n, n if inner_factor > 1 else 1)


def in_order(n: int, size_bytes: int) -> ReduceTree:
    """Choose the tree of a reduce whose sum has the same bits each time: ((first + second) + third) + ...

    A star adds in this order and a chain, too, so the network may not be asked: small objects take the star.
    """
    return ReduceTree(n, n if size_bytes <= _STAR_BYTES else 1)


_STAR_BYTES = 256 << 10


def _degrees(n: int) -> list[int]:
    """Each degree that is the least with its number of levels: a larger one of the same depth only costs more."""
    found, depth = [], 0
    for degree in range(n, 0, -1):
        levels = depth_of(n, degree)
        if levels != depth:
            found.append(degree)
            depth = levels
        else:
            found[-1] = degree
    return sorted(found)


def depth_of(n: int, degree: int) -> int:
    """The levels of a complete tree of `n` positions below the caller.

    >>> [depth_of(6, degree) for degree in (1, 2, 3, 6)]
    [6, 2, 2, 1]
    """
    depth, room, width = 0, 0, 1
    while room < n:
        width *= degree
        room += width
        depth += 1
    return depth
