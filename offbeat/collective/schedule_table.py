"""The schedule table of one rank, as a network interface would hold it: what it sends when, and what it waits for.

Huang et al., ISCA 2021, figure 5: a row per step and flow. A flow is a chunk. A row that reduces names the children
that it waits for, and the parent that it sends to; one that gathers the parent that it waits for, and the children. A
step in which nothing leaves has a row that does nothing (NOP).

>>> from offbeat.collective import Ring
>>> from offbeat.topology import Topology
>>> for row in schedule_table(Ring().plan(Topology.star("abc")), 1):
...     print(row.step, row.op, row.flow, row.parent, row.children)
0 Reduce 0 2 ()
1 Reduce 2 2 (0,)
2 Gather 1 None (2,)
3 Gather 0 0 (2,)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.collective.algorithm import Algorithm


class ScheduleRow(NamedTuple):
    """A row.

    Args:
        flow: the chunk; None of a NOP.
        parent: where a sum goes, or where a result is from; None at a root, and of a NOP.
        children: whose sums it waits for, or to whom a result goes.
    """

    step: int
    op: Literal["Reduce", "Gather", "NOP"]
    flow: int | None = None
    parent: int | None = None
    children: tuple[int, ...] = ()


def schedule_table(algorithm: Algorithm, rank: int) -> list[ScheduleRow]:
    """All rows of a rank, by step, and of a step in the order of the algorithm.

    Raises:
        PlanError: if there is no such rank.
    """
    if not 0 <= rank < algorithm.nodes:
        raise PlanError(f"Cannot show the table of rank {rank}: there are ranks 0 to {algorithm.nodes - 1}.")
    reduces: list[ScheduleRow] = []
    gathers: dict[tuple[int, int], ScheduleRow] = {}
    for op in algorithm.ops:
        if op.source != rank:
            continue
        waits = [algorithm.ops[number] for number in op.after]
        if op.kind == "reduce":
            reduces.append(ScheduleRow(op.step, "Reduce", op.chunk, op.destination, tuple(one.source for one in waits)))
            continue
        parent = next((one.source for one in reversed(waits) if one.kind == "copy"), None)
        before = gathers.get((op.step, op.chunk), ScheduleRow(op.step, "Gather", op.chunk, parent))
        gathers[op.step, op.chunk] = before._replace(children=(*before.children, op.destination))
    busy = {row.step for row in reduces} | {step for step, _ in gathers}
    idle = [ScheduleRow(step, "NOP") for step in range(algorithm.steps) if step not in busy]
    return sorted([*reduces, *gathers.values(), *idle], key=lambda row: row.step)


def table_lines(algorithm: Algorithm, rank: int) -> str:
    """The table of a rank as text."""
    lines = [f"schedule table of rank {rank}", "step  op      flow  parent  children"]
    for row in schedule_table(algorithm, rank):
        told = ["" if one is None else str(one) for one in (row.flow, row.parent)]
        children = " ".join(map(str, row.children))
        lines.append(f"{row.step:4}  {row.op:<6}  {told[0]:>4}  {told[1]:>6}  {children}".rstrip())
    return "\n".join(lines)
