"""The part of an algorithm that one rank carries out: what it sends, and what it does with what comes.

What a rank has of a chunk changes with each operation that comes. Version 0 is its own, version k is after the k-th. An
operation that leaves sends one version. Usually all versions are in one memory, that of the vector: a sum is made in
place, and the result overwrites what the rank had sent before, since it can only come because that had arrived. Where
that is not so (in recursive doubling a partner may be slow to take what is sent to it while its own has come) the next
version gets memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.collective.algorithm import Algorithm, Op


class Outgoing(NamedTuple):
    """An operation that leaves: of which version of what the rank has."""

    number: int
    op: Op
    version: int


class Incoming(NamedTuple):
    """An operation that comes, and makes a version.

    Args:
        number, op: it.
        version: that it makes.
        needs_memory: whether that version may not overwrite the one before.
    """

    number: int
    op: Op
    version: int
    needs_memory: bool


@dataclass(frozen=True)
class RankPart:
    """The operations of one rank.

    Args:
        rank: whose part it is.
        outgoing, incoming: in the order of the algorithm.
        versions: by chunk, how many versions come after the rank's own; chunks that nothing comes to are left out.
        most_ahead: see `Algorithm`.
    """

    rank: int
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    versions: dict[int, int]
    most_ahead: int | None


def part_of(algorithm: Algorithm, rank: int, names: Sequence[int] | None = None) -> RankPart:
    """The part of one rank.

    Args:
        names: what each rank of the algorithm is called in the part; None for the same.

    >>> from offbeat.collective import Ring
    >>> from offbeat.topology import Topology
    >>> part = part_of(Ring().plan(Topology.star("ab")), 1)
    >>> [(one.op.kind, one.op.chunk, one.version) for one in part.outgoing]
    [('reduce', 0, 0), ('copy', 1, 1)]
    """
    outgoing, came = [], dict[int, list[int]]()
    ops = algorithm.ops if names is None else [_named(op, names) for op in algorithm.ops]
    rank = rank if names is None else names[rank]
    for number, op in enumerate(ops):
        if op.source == rank:
            outgoing.append(Outgoing(number, op, len(op.after)))
        elif op.destination == rank:
            came.setdefault(op.chunk, []).append(number)
    early: dict[tuple[int, int], int] = {}  # by chunk and version, how many operations send it
    for one in outgoing:
        early[one.op.chunk, one.version] = early.get((one.op.chunk, one.version), 0) + 1
    incoming = []
    for chunk, numbers in came.items():
        sent = 0  # of versions before
        for version, number in enumerate(numbers, 1):
            sent += early.get((chunk, version - 1), 0)
            op = ops[number]
            incoming.append(Incoming(number, op, version, sent > 0 and not (op.kind == "copy" and sent == 1)))
    incoming.sort()
    versions = {chunk: len(numbers) for chunk, numbers in came.items()}
    return RankPart(rank, tuple(outgoing), tuple(incoming), versions, algorithm.most_ahead)


def _named(op: Op, names: Sequence[int]) -> Op:
    return op._replace(source=names[op.source], destination=names[op.destination])
