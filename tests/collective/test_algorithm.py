"""Algorithms as data: their proof, and what it says of those that are wrong."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from offbeat.collective import Algorithm, Chunk, Op, Ring
from offbeat.errors import PlanError
from offbeat.topology import Topology

WHOLE = (Chunk(Fraction(0), Fraction(1)),)


def ring(nodes: int) -> Algorithm:
    return Ring().plan(Topology.star([f"h{i}" for i in range(nodes)]))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 16])
def test_a_ring_is_an_all_reduce(nodes: int) -> None:
    made = ring(nodes)
    made.verify()
    assert made.collective == "all-reduce"
    assert made.sent_parts() == [Fraction(2 * (nodes - 1), nodes)] * nodes
    assert Algorithm.from_bytes(made.to_bytes()) == made


def test_chunks_are_cut_exactly() -> None:
    for numel in (0, 1, 2, 7, 1000):
        places = [chunk.place(numel) for chunk in ring(7).chunks]
        assert [i for place in places for i in range(numel)[place]] == list(range(numel))


def test_equal_algorithms_have_equal_digests() -> None:
    assert ring(4).digest == ring(4).digest != ring(5).digest


@pytest.mark.parametrize("after", [(1,), (0, 1), (7,)])
def test_bytes_keep_what_is_wrong(after: tuple[int, ...]) -> None:
    """Else a wrong algorithm would become another one on its way."""
    made = ring(3)
    wrong = Algorithm("mine", 3, made.chunks, (*made.ops[:-1], made.ops[-1]._replace(after=after)))
    assert wrong.digest != Algorithm("mine", 3, made.chunks, made.ops).digest
    with pytest.raises(PlanError, match=f"operation {len(made.ops) - 1}"):
        Algorithm.from_bytes(wrong.to_bytes())


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_schedule_is_refused_by_name(seed: int) -> None:
    """Whatever is left out of a ring, doubled or sent elsewhere: one of rank, chunk and operation is named."""
    draw = random.Random(seed)
    made = ring(draw.randrange(2, 7))
    ops, place = list(made.ops), draw.randrange(len(made.ops))
    change = draw.choice(["drop", "twice", "chunk", "after"])
    if change == "drop":
        ops[place] = ops[place]._replace(kind="copy") if ops[place].kind == "reduce" else ops[place]._replace(after=())
    elif change == "twice":
        ops.append(ops[place]._replace(kind="reduce"))
    elif change == "chunk":
        ops[place] = ops[place]._replace(chunk=(ops[place].chunk + 1) % made.nodes)
    else:
        ops[place] = ops[place]._replace(after=(len(ops) - 1,))
    wrong = Algorithm(made.name, made.nodes, made.chunks, tuple(ops))
    if wrong.ops == made.ops or (change == "drop" and not made.ops[place].after and made.ops[place].kind == "copy"):
        return
    with pytest.raises(PlanError, match=r"operation \d+.*rank \d+.*chunk \d+|rank \d+ lacks the contribution"):
        wrong.verify()


@pytest.mark.parametrize(
    ("ops", "says"),
    [
        ([], "in the end rank 0 lacks the contribution of rank 1 to chunk 0. It is no all-reduce"),
        ([Op("reduce", 0, 1, 0)], "in the end rank 1 lacks the contribution of rank 0 to chunk 0"),
        (
            [Op("reduce", 0, 1, 0), Op("reduce", 0, 1, 0)],
            "operation 1, by which rank 1 adds to rank 0 chunk 0 in step 0, is wrong: the contribution of rank 1 is "
            "added twice",
        ),
        ([Op("copy", 0, 1, 0)], "the contribution of rank 0 is lost"),
        ([Op("reduce", 0, 1, 1)], "a rank sends nothing to itself"),
        ([Op("reduce", 0, 1, 2)], "rank 2 is none of 2"),
        ([Op("reduce", 1, 1, 0)], "there are 1 chunks"),
        ([Op("reduce", 0, 1, 0, -1)], "there is no step -1"),
        ([Op("reduce", 0, 1, 0, 0, (5,))], "after operation 5, which does not exist"),
        (
            [Op("reduce", 0, 1, 0, 0, (1,)), Op("copy", 0, 0, 1, 1, (0,))],
            "it is after operation 1, listed later: a cycle of operations 0, 1",
        ),
        (
            [Op("reduce", 0, 0, 1, 0, (1,)), Op("reduce", 0, 1, 0)],
            "it is after operation 1, listed later: list it first",
        ),
        (
            [Op("reduce", 0, 1, 0), Op("copy", 0, 1, 0, 1, (0,))],
            "it is after operation 0, which brings rank 1 nothing of the chunk",
        ),
    ],
)
def test_what_is_no_all_reduce(ops: list[Op], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        Algorithm("mine", 2, WHOLE, tuple(ops)).verify()


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ((), "its chunks end at 0 of the vector"),
        ((Chunk(Fraction(0), Fraction(1, 2)),), "its chunks end at 1/2"),
        ((Chunk(Fraction(1, 2), Fraction(1)),), "chunk 0 is from 1/2 to 1 of the vector, and the one before ends at 0"),
        ((Chunk(Fraction(0), Fraction(1), source=2),), "chunk 0 is at rank 2, and there are 2 ranks"),
    ],
)
def test_what_is_no_cut(chunks: tuple[Chunk, ...], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        Algorithm("mine", 2, chunks, ()).verify()


def test_what_came_is_sent_in_its_order() -> None:
    """Of three that come to rank 0 an operation may send the first ones, and no others."""
    come = [Op("reduce", 0, rank, 0) for rank in (1, 2, 3)]
    made = Algorithm("mine", 4, WHOLE, (*come, Op("copy", 0, 0, 1, 1, (0, 2))))
    with pytest.raises(PlanError, match="it is after operations 0, 2; at rank 0 there come, in order, 0, 1, 2"):
        made.verify()


def test_a_slot_comes_after_those_before_it() -> None:
    ops = (Op("reduce", 0, 1, 0, 0), Op("copy", 0, 0, 1, 0, (0,)))
    Algorithm("mine", 2, WHOLE, ops).verify()
    with pytest.raises(PlanError, match="it is in step 0, and after operation 0 of no earlier one"):
        Algorithm("mine", 2, WHOLE, ops, uses_slots=True).verify()


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x93\x01\x02\x03", Ring().plan(Topology.star("ab")).to_bytes()[:-1]])
def test_bytes_that_are_no_algorithm(data: bytes) -> None:
    with pytest.raises(PlanError, match="Cannot read an algorithm"):
        Algorithm.from_bytes(data)


@pytest.mark.parametrize(
    ("ends", "name"),
    [
        ([(None, None)] * 3, "all-reduce"),
        ([(1, None)] * 3, "broadcast"),
        ([(0, None), (1, None), (2, None)], "all-gather"),
        ([(None, 1)] * 3, "reduce"),
        ([(None, 0), (None, 1), (None, 2)], "reduce-scatter"),
        ([(0, 0), (1, 0), (2, 0)], "gather"),
        ([(0, 0), (0, 1), (0, 2)], "scatter"),
        ([(0, 1), (1, 2), (2, 0)], "all-to-all"),
        ([(None, None), (0, 1), (2, 0)], "none"),
    ],
)
def test_chunks_say_what_it_is(ends: list[tuple[int | None, int | None]], name: str) -> None:
    chunks = [Chunk(Fraction(i, 3), Fraction(i + 1, 3), *one) for i, one in enumerate(ends)]
    assert Algorithm("mine", 3, tuple(chunks), ()).collective == name


def test_who_may_not_be_ahead_has_steps_in_order() -> None:
    ops = (Op("reduce", 0, 1, 0, 0), Op("copy", 0, 0, 1, 0, (0,)))
    with pytest.raises(PlanError, match="it is in step 0, and after operation 0 of no earlier one"):
        Algorithm("mine", 2, WHOLE, ops, most_ahead=2).verify()
    with pytest.raises(PlanError, match="nobody could send if at most 0 steps ahead"):
        Algorithm("mine", 2, WHOLE, (ops[0], ops[1]._replace(step=1)), most_ahead=0).verify()
