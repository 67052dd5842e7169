"""Algorithms as text and as pictures."""

from __future__ import annotations

import builtins
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.collective import (
    Algorithm,
    Chunk,
    CollectiveMethod,
    DoubleBinaryTree,
    MultiTree,
    Op,
    PipelinedTrees,
    RecursiveDoubling,
    Ring,
    WaterFilling,
)
from offbeat.collective.draw import draw_time_line, draw_trees, node_places
from offbeat.collective.schedule_table import schedule_table
from offbeat.collective.show import chunk_trees, difference, show, step_table, summary
from offbeat.errors import PlanError
from offbeat.topology import Topology
from tests.collective.networks import MB_S, star

if TYPE_CHECKING:
    from pathlib import Path

TORUS = Topology.torus(4, 4, rate_mbps=MB_S)


def test_one_line() -> None:
    assert summary(MultiTree().plan(TORUS)) == (
        "MultiTree(): all-reduce among 16 ranks, 64 chunks, 1920 operations in 30 time slots; each sends 1.88 of the "
        "vector"
    )
    assert "ranks send 1 to 1.67 of the vector" in summary(WaterFilling(2).plan(star(200, 200, 200, 50)))
    assert summary(Ring().plan(star(1))) == (
        "Ring(): all-reduce among 1 ranks, 1 chunks, 0 operations in 0 steps; each sends 0 of the vector"
    )


def test_a_table_of_steps_and_ranks() -> None:
    assert step_table(RecursiveDoubling().plan(star(1, 1, 1))).splitlines() == [
        "step  rank 0  rank 1  rank 2",
        "   0                  +0→0",
        "   1  +0→1    +0→0",
        "   2  0→2",
    ]
    assert step_table(Ring().plan(star(1))) == "step  rank 0"


def test_a_large_table_says_what_is_left_out() -> None:
    lines = step_table(MultiTree().plan(TORUS), most_steps=10).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "... 8 more ranks, 20 more steps"
    assert step_table(MultiTree().plan(TORUS), [15, 3], most_steps=1).startswith("step")


@pytest.mark.parametrize("chunk", range(0, 64, 21))
def test_trees_have_all_ranks_twice(chunk: int) -> None:
    lines = chunk_trees(MultiTree().plan(TORUS), chunk).splitlines()
    for part in (lines[1:17], lines[17:]):
        assert {line.split("rank ")[1].split(",")[0] for line in part} == {str(rank) for rank in range(16)}


def test_what_is_no_tree_is_a_list() -> None:
    assert chunk_trees(RecursiveDoubling().plan(star(1, 1)), 0).splitlines() == [
        "chunk 0, 0 to 1 of the vector",
        "step 0: rank 0 adds to rank 1",
        "step 0: rank 1 adds to rank 0",
    ]


def test_long_ways_are_drawn() -> None:
    whole = (Chunk(Fraction(0), Fraction(1), source=0),)
    ops = tuple(Op("copy", 0, rank, rank + 1, rank, (rank - 1,) if rank else ()) for rank in range(3000))
    lines = chunk_trees(Algorithm("chain", 3001, whole, ops), 0).splitlines()
    assert lines[-1].endswith("└─ rank 3000, step 2999")


def test_the_first_difference_is_named() -> None:
    ring, made = Ring().plan(star(1, 1, 1)), MultiTree().plan(star(1, 1, 1))
    assert difference(ring, ring) == ""
    assert difference(ring, Ring().plan(star(1, 1))) == "ranks: 3 and 2"
    assert difference(ring, MultiTree(split=2).plan(star(1, 1, 1))) == "chunks: 3 and 6"
    assert difference(ring, made) == "time slots: False and True"
    other = Algorithm("Ring()", 3, ring.chunks, (*ring.ops[:3], ring.ops[3]._replace(step=7), *ring.ops[4:]))
    words = "rank 1 adds to rank 2 chunk 2 in step {} after 0"
    assert difference(ring, other) == f"operation 3: {words.format(1)} and {words.format(7)}"
    assert difference(ring, Algorithm("Ring()", 3, ring.chunks, ring.ops[:-1])) == "operations: 12 and 11"
    assert difference(ring, Algorithm("mine", 3, ring.chunks, ring.ops)) == "names: Ring() and mine"
    moved = (Chunk(Fraction(0), Fraction(1, 4)), Chunk(Fraction(1, 4), Fraction(2, 3), target=1), ring.chunks[2])
    assert difference(ring, Algorithm("Ring()", 3, moved, ring.ops)) == "chunk 0: 0 to 1/3 and 0 to 1/4"
    ends = (ring.chunks[0], ring.chunks[1]._replace(target=1), ring.chunks[2])
    assert difference(ring, Algorithm("Ring()", 3, ends, ring.ops)) == "chunk 1: 1/3 to 2/3 and 1/3 to 2/3 to rank 1"


def test_all_there_is_to_show() -> None:
    made = MultiTree().plan(TORUS)
    assert show(made, chunks=(1, 2, 99)).split("\n\n") == [
        summary(made),
        step_table(made),
        chunk_trees(made, 1),
        chunk_trees(made, 2),
    ]


@pytest.mark.parametrize("chunk", [-1, 64])
def test_no_such_chunk(chunk: int, tmp_path: Path) -> None:
    made = MultiTree().plan(TORUS)
    with pytest.raises(PlanError, match=f"chunk {chunk}: there are chunks 0 to 63"):
        chunk_trees(made, chunk)
    with pytest.raises(PlanError, match=f"chunk {chunk}: there are chunks 0 to 63"):
        draw_trees(made, TORUS, tmp_path / "trees.png", [chunk])


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [TORUS, star(*[MB_S] * 4), Topology.torus(2, 2, 3, rate_mbps=MB_S), Topology.bigraph(1, 4, rate_mbps=MB_S)],
    ids=["torus", "star", "torus 3-D", "bigraph"],
)
def test_pictures(network: Topology, tmp_path: Path) -> None:
    made: Algorithm = PipelinedTrees(6).plan(network)
    draw_trees(made, network, tmp_path / "trees.png", chunks=range(6))
    draw_time_line(made, network, 1e6, tmp_path / "time.png", block_bytes=1e5)
    for name in ("trees.png", "time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    places = node_places(network)
    assert set(places) == set(network.nodes)
    assert len(set(places.values())) == len(places)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    made = Ring().plan(TORUS)
    with pytest.raises(PlanError, match=r"Cannot draw an algorithm: .*pip install 'offbeat\[plot\]'"):
        draw_trees(made, TORUS, tmp_path / "none.png")
    with pytest.raises(PlanError, match=r"Cannot draw an algorithm: .*pip install 'offbeat\[plot\]'"):
        draw_time_line(made, TORUS, 1e6, tmp_path / "none.png")


@pytest.mark.parametrize("method", [MultiTree(), Ring(), DoubleBinaryTree()], ids=repr)
def test_schedule_tables_hold_all_that_is_sent(method: CollectiveMethod) -> None:
    algorithm = method.plan(Topology.torus(3, 3))
    tables = [schedule_table(algorithm, rank) for rank in range(algorithm.nodes)]
    sent = {
        (row.step, rank, end, row.flow)
        for rank, rows in enumerate(tables)
        for row in rows
        for end in ((row.parent,) if row.op == "Reduce" else row.children if row.op == "Gather" else ())
    }
    assert sent == {(op.step, op.source, op.destination, op.chunk) for op in algorithm.ops}
    for rows in tables:
        assert {row.step for row in rows} == set(range(algorithm.steps)), "a step without a transfer is a NOP"
        assert all(row.children or row.parent is not None for row in rows if row.op != "NOP")


def test_a_table_of_no_rank() -> None:
    with pytest.raises(PlanError, match="table of rank 3: there are ranks 0 to 2"):
        schedule_table(Ring().plan(Topology.star("abc")), 3)
