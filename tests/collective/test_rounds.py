"""Rounds: carried out one after the other they are the same collective, and add in the same order."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from offbeat.collective import Algorithm, Chunk, Op
from offbeat.collective.programs import broadcast
from offbeat.collective.rounds import in_rounds, rank_rounds
from offbeat.errors import PlanError
from tests.collective.networks import star
from tests.collective.test_methods import NETWORKS, every_case

if TYPE_CHECKING:
    from tests.collective.test_methods import Method


def one_by_one(algorithm: Algorithm) -> list[list[str]]:
    """What each rank has of each chunk in the end, as terms in the order in which they were added."""
    sent: list[str] = []
    held = [[str(rank) for _ in algorithm.chunks] for rank in range(algorithm.nodes)]
    versions = [[[text] for text in row] for row in held]
    for op in algorithm.ops:
        sent.append(versions[op.source][op.chunk][len(op.after)])
        mine = versions[op.destination][op.chunk]
        mine.append(f"({mine[-1]}+{sent[-1]})" if op.kind == "reduce" else sent[-1])
    return [[one[-1] for one in row] for row in versions]


def in_batches(algorithm: Algorithm) -> list[list[str]]:
    """The same, by the rounds of each rank, where memory that need not be kept is written to at once."""
    held = [[str(rank) for _ in algorithm.chunks] for rank in range(algorithm.nodes)]
    rounds = [rank_rounds(algorithm, rank) for rank in range(algorithm.nodes)]
    for number in range(algorithm.steps):
        ways: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for rank, mine in enumerate(rounds):
            for send in mine[number].sends:
                ways.setdefault((rank, send.destination), []).append((send.chunk, held[rank][send.chunk]))
        for rank, mine in enumerate(rounds):
            came = []
            for receive in mine[number].receives:
                chunk, text = ways[receive.source, rank].pop(0)  # a way keeps the order
                assert chunk == receive.chunk
                came.append((receive, text))
            # Last come, first written: who needs no memory may come at any time.
            came.sort(key=lambda one: one[0].needs_memory)
            for receive, text in came:
                old = held[rank][receive.chunk]
                held[rank][receive.chunk] = f"({old}+{text})" if receive.adds else text
        assert not any(ways.values())
    return held


@every_case
def test_rounds_are_the_same_collective(method: Method, name: str) -> None:
    algorithm = method.plan(NETWORKS[name])
    rounded = in_rounds(algorithm)
    rounded.verify()
    assert in_rounds(rounded) == rounded
    assert all(op.step >= 0 for op in rounded.ops)
    assert in_batches(rounded) == one_by_one(algorithm)


def test_a_broadcast_in_rounds() -> None:
    algorithm = broadcast(star(8, 8, 8, 8), 2, pieces=4)
    assert in_batches(in_rounds(algorithm)) == one_by_one(algorithm)


def test_what_sends_an_old_version_has_no_rounds() -> None:
    """Rank 1 is to send to rank 0 what it had before rank 0's came, behind what hangs on that."""
    ops = (
        Op("reduce", 0, 0, 1),
        Op("reduce", 0, 1, 2, after=(0,)),
        Op("copy", 0, 2, 0, after=(1,)),
        Op("reduce", 0, 1, 0),
    )
    with pytest.raises(PlanError, match=r"Cannot carry out odd in rounds: a rank sends"):
        in_rounds(Algorithm("odd", 3, (Chunk(Fraction(0), Fraction(1)),), ops))
