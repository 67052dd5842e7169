"""The check of time slots: where a step begins everywhere at once, no link and no interface is used twice in it.

That two trees do not share an edge in a step is not enough: where switches are between, different edges share links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.collective.paths import Paths
from offbeat.errors import PlanError

if TYPE_CHECKING:
    from offbeat.collective.algorithm import Algorithm
    from offbeat.topology import Topology


def check_slots(algorithm: Algorithm, network: Topology, *, interfaces: int | None = None) -> None:
    """Prove that in lock-step no two operations meet.

    Args:
        algorithm: its steps are the slots, whether it says so (`uses_slots`) or not.
        network: whose routes the operations take.
        interfaces: messages that a host can send at a time, and receive; None is as many as it has links.

    Raises:
        PlanError: with the first step and the first link or host for which two operations are.
    """
    paths = Paths(network)
    most = [interfaces or paths.ranks] * paths.ranks
    links: dict[tuple[int, int], int] = {}
    sends: dict[tuple[int, int], int] = {}
    hears: dict[tuple[int, int], int] = {}
    for number, op in enumerate(algorithm.ops):
        for arc in paths.between(op.source, op.destination):
            other = links.setdefault((op.step, arc), number)
            if other != number:
                ends = paths.arcs[arc]
                raise PlanError(
                    f"Cannot use {algorithm.name} in time slots: in step {op.step} the link from {ends.source!r} to "
                    f"{ends.target!r} is to carry operations {other} and {number}. Use it without slots, where one "
                    "waits for the other."
                )
        for verb, rank, counts in (("send", op.source, sends), ("receive", op.destination, hears)):
            counts[op.step, rank] = counts.get((op.step, rank), 0) + 1
            if counts[op.step, rank] > most[rank]:
                raise PlanError(
                    f"Cannot use {algorithm.name} in time slots: in step {op.step} rank {rank} is to {verb} "
                    f"{counts[op.step, rank]} messages, and it has {most[rank]} interfaces. Plan it for so many."
                )
