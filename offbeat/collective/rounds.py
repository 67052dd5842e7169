"""The rounds of an algorithm: what a data plane carries out that sends whole chunks, in batches that begin together.

NCCL's grouped sends and receives are such a one; lanes, which follow chunks as they grow, need no rounds.

In a round all that is sent is what its source had before it. What comes is added, or takes its place, at the end, in
the order of the operations: so sums have the bits that they have over lanes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.collective.algorithm import Algorithm

_PASSES = 100  # of what is listed in order two or three are enough


class RoundSend(NamedTuple):
    """A chunk that is sent."""

    chunk: int
    destination: int


class RoundReceive(NamedTuple):
    """A chunk that comes.

    Args:
        adds: whether it is added to what is there, or takes its place.
        needs_memory: whether it has to wait elsewhere until the round is over.
    """

    chunk: int
    source: int
    adds: bool
    needs_memory: bool


class RankRound(NamedTuple):
    """The part of one rank in a round; with each other rank in an order that is that one's, too."""

    sends: tuple[RoundSend, ...]
    receives: tuple[RoundReceive, ...]


def in_rounds(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, where `step` is the round of an operation, from 0 on.

    No operation comes before its `step`, so that pieces follow each other over the same links.

    Raises:
        PlanError: if it has no rounds, as a rank would have to send what it had before something came that must come
            first; over lanes such a version is kept.

    >>> from offbeat.collective import DoubleBinaryTree
    >>> from offbeat.topology import Topology
    >>> algorithm = in_rounds(DoubleBinaryTree().plan(Topology.star("abc")))
    >>> [(op.step, op.kind, op.chunk, op.source, op.destination) for op in algorithm.ops][:3]
    [(0, 'reduce', 1, 2, 0), (1, 'reduce', 1, 0, 1), (0, 'reduce', 0, 1, 2)]
    """
    rounds = _rounds_of(algorithm)
    ops = tuple(op._replace(step=number) for op, number in zip(algorithm.ops, rounds, strict=True))
    return replace(algorithm, ops=ops, uses_slots=False, most_ahead=None)


def rank_rounds(algorithm: Algorithm, rank: int) -> list[RankRound]:
    """List the parts of one rank, round by round, of an algorithm that is in rounds; some may be empty."""
    outgoing: list[list[RoundSend]] = [[] for _ in range(algorithm.steps)]
    incoming: list[list[RoundReceive]] = [[] for _ in range(algorithm.steps)]
    for op in algorithm.ops:
        if op.source == rank:
            outgoing[op.step].append(RoundSend(op.chunk, op.destination))
        elif op.destination == rank:
            incoming[op.step].append(RoundReceive(op.chunk, op.source, op.kind == "reduce", needs_memory=False))
    found = []
    for sends, receives in zip(outgoing, incoming, strict=True):
        uses = [one.chunk for one in sends] + [one.chunk for one in receives]
        held = [one._replace(needs_memory=one.adds or uses.count(one.chunk) > 1) for one in receives]
        found.append(RankRound(tuple(sends), tuple(held)))
    return found


def _rounds_of(algorithm: Algorithm) -> list[int]:
    """The round of each operation."""
    ops = algorithm.ops
    rounds = [op.step for op in ops]
    sends: dict[tuple[int, int, int], list[int]] = {}  # by rank, chunk and version, who sends it
    for number, op in enumerate(ops):
        sends.setdefault((op.source, op.chunk, len(op.after)), []).append(number)
    came: dict[tuple[int, int], list[int]] = {}
    least: list[tuple[int, int, int]] = []  # one, another, and by how many rounds that is later at least
    for number, op in enumerate(ops):
        if op.after:  # these come one after the other
            least.append((op.after[-1], number, 1))
        before = came.setdefault((op.destination, op.chunk), [])
        if before:
            least.append((before[-1], number, 0))
        least.extend((one, number, 0) for one in sends.get((op.destination, op.chunk, len(before)), ()))
        before.append(number)
    for _ in range(_PASSES):
        is_settled = True
        for one, other, gap in least:
            if rounds[other] < rounds[one] + gap:
                rounds[other], is_settled = rounds[one] + gap, False
        if is_settled:
            places = {number: place for place, number in enumerate(sorted(set(rounds)))}
            return [places[number] for number in rounds]
    raise PlanError(
        f"Cannot carry out {algorithm.name} in rounds: a rank sends what it had of a chunk after something else has "
        "come to it. Use it over lanes, Routed(...) without grouped=True."
    )
