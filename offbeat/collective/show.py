"""An algorithm as text, for people: in one line, as a table of what each rank sends in each step, and as trees.

>>> from offbeat.collective import Ring
>>> from offbeat.topology import Topology
>>> print(show(Ring().plan(Topology.star("abc"))))
Ring(): all-reduce among 3 ranks, 3 chunks, 12 operations in 4 steps; each sends 1.33 of the vector
<BLANKLINE>
step  rank 0  rank 1  rank 2
   0  +2→1    +0→2    +1→0
   1  +1→1    +2→2    +0→0
   2  0→1     1→2     2→0
   3  2→1     0→2     1→0
<BLANKLINE>
chunk 0, 0 to 1/3 of the vector
sum at rank 0
└─ rank 2, step 1
   └─ rank 1, step 0
spread from rank 0
└─ rank 1, step 2
   └─ rank 2, step 3
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.collective.algorithm import Algorithm, Chunk, Op

MOST_RANKS = 8
"""Columns of a table."""
MOST_STEPS = 40
"""Lines of a table."""


def show(algorithm: Algorithm, chunks: Sequence[int] = (0,)) -> str:
    """All there is to show: a summary, the table, and the trees of some chunks."""
    shown = [number for number in chunks if number < len(algorithm.chunks)]
    return "\n\n".join([summary(algorithm), step_table(algorithm), *(chunk_trees(algorithm, one) for one in shown)])


def summary(algorithm: Algorithm) -> str:
    """One line: what it is, how many steps it has, and how much each rank sends."""
    sent = [float(part) for part in algorithm.sent_parts()]
    low, high = f"{min(sent):.3g}", f"{max(sent):.3g}"
    much = f"each sends {low}" if low == high else f"ranks send {low} to {high}"
    steps = f"{algorithm.steps} {'time slots' if algorithm.uses_slots else 'steps'}"
    return (
        f"{algorithm.name}: {algorithm.collective} among {algorithm.nodes} ranks, {len(algorithm.chunks)} chunks, "
        f"{len(algorithm.ops)} operations in {steps}; {much} of the vector"
    )


def step_table(algorithm: Algorithm, ranks: Sequence[int] | None = None, *, most_steps: int = MOST_STEPS) -> str:
    """A line per step and a column per rank; `+3→1` adds chunk 3 to what rank 1 has, `3→1` gives it to rank 1.

    Args:
        ranks: whose columns to show; None the first ones.
        most_steps: how many lines to show.
    """
    ranks = range(min(algorithm.nodes, MOST_RANKS)) if ranks is None else ranks
    cells: dict[tuple[int, int], list[str]] = {}
    for op in algorithm.ops:
        sign = "+" if op.kind == "reduce" else ""
        cells.setdefault((op.step, op.source), []).append(f"{sign}{op.chunk}→{op.destination}")
    steps = sorted({step for step, _ in cells})
    head = ["step", *(f"rank {rank}" for rank in ranks)]
    rows = [[str(step), *(" ".join(cells.get((step, rank), [])) for rank in ranks)] for step in steps[:most_steps]]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].rjust(widths[0]), *(cell.ljust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]
    left = [f"{algorithm.nodes - len(ranks)} more ranks"] if len(ranks) < algorithm.nodes else []
    left += [f"{len(steps) - most_steps} more steps"] if len(steps) > most_steps else []
    return "\n".join([*(line.rstrip() for line in lines), *(["... " + ", ".join(left)] if left else [])])


def chunk_trees(algorithm: Algorithm, chunk: int) -> str:
    """The trees along which a chunk is summed up and spread; a list of operations, where these are no trees.

    Raises:
        PlanError: if there is no such chunk.
    """
    if not 0 <= chunk < len(algorithm.chunks):
        raise PlanError(f"Cannot show chunk {chunk}: there are chunks 0 to {len(algorithm.chunks) - 1}.")
    place = algorithm.chunks[chunk]
    lines = [f"chunk {chunk}, {place.begin} to {place.end} of the vector"]
    ops = [op for op in algorithm.ops if op.chunk == chunk]
    parents_up = {op.source: (op.destination, op) for op in ops if op.kind == "reduce"}
    parents_down = {op.destination: (op.source, op) for op in ops if op.kind == "copy"}
    if len(parents_up) + len(parents_down) == len(ops) and _is_forest(parents_up) and _is_forest(parents_down):
        lines += _drawn("sum at", parents_up)
        lines += _drawn("spread from", parents_down)
    else:
        for op in ops:
            verb = "adds to" if op.kind == "reduce" else "gives"
            lines.append(f"step {op.step}: rank {op.source} {verb} rank {op.destination}")
    return "\n".join(lines)


def difference(here: Algorithm, there: Algorithm) -> str:
    """The first thing in which two algorithms differ, as when two ranks made different ones; "" if there is none."""
    for what, one, other in (
        ("ranks", here.nodes, there.nodes),
        ("chunks", len(here.chunks), len(there.chunks)),
        ("time slots", here.uses_slots, there.uses_slots),
    ):
        if one != other:
            return f"{what}: {one} and {other}"
    for number, (chunk, chunk_there) in enumerate(zip(here.chunks, there.chunks, strict=True)):
        if chunk != chunk_there:
            return f"chunk {number}: {_chunk(chunk)} and {_chunk(chunk_there)}"
    for number, (op, op_there) in enumerate(zip(here.ops, there.ops, strict=False)):
        if op != op_there:
            return f"operation {number}: {_op(op)} and {_op(op_there)}"
    if len(here.ops) != len(there.ops):
        return f"operations: {len(here.ops)} and {len(there.ops)}"
    return "" if here.name == there.name else f"names: {here.name} and {there.name}"


def _chunk(chunk: Chunk) -> str:
    ends = (
        "" if rank is None else f" {word} rank {rank}" for word, rank in zip(("from", "to"), chunk[2:], strict=True)
    )
    return f"{chunk.begin} to {chunk.end}{''.join(ends)}"


def _op(op: Op) -> str:
    after = f" after {', '.join(map(str, op.after))}" if op.after else ""
    verb = "adds to" if op.kind == "reduce" else "gives"
    return f"rank {op.source} {verb} rank {op.destination} chunk {op.chunk} in step {op.step}{after}"


def _is_forest(parents: Mapping[int, tuple[int, Op]]) -> bool:
    """Whether the way up from each child ends somewhere."""
    ends: set[int] = set()
    for child in parents:
        way = [child]
        while way[-1] in parents and way[-1] not in ends and len(way) <= len(parents):
            way.append(parents[way[-1]][0])
        if len(way) > len(parents) + 1 or (way[-1] in parents and way[-1] not in ends):
            return False
        ends.update(way)
    return True


def _drawn(title: str, parents: Mapping[int, tuple[int, Op]]) -> list[str]:
    """Trees as text, from the parent of each child."""
    children: dict[int, list[int]] = {}
    for child, (parent, _) in parents.items():
        children.setdefault(parent, []).append(child)
    lines = []
    for root in children:
        if root in parents:
            continue
        lines.append(f"{title} rank {root}")
        todo = [(child, "") for child in reversed(children[root])]
        while todo:
            rank, indent = todo.pop()
            parent, op = parents[rank]
            is_last = rank == children[parent][-1]
            lines.append(f"{indent}{'└─' if is_last else '├─'} rank {rank}, step {op.step}")
            indent += "   " if is_last else "│  "
            todo += [(child, indent) for child in reversed(children.get(rank, []))]
    return lines
