"""Batches that are all alike: what becomes of them when workers come and go. A choice of the plan (`Plan(keeps=...)`).

* "local_batch": each worker keeps its batch, so the global batch changes with their number. It always fits into memory.
* "global_batch": the batches add up to what they did at the beginning, so the learning rate stays right.

The learning rate is not touched in either case: it is the user's. Means are weighted by samples, so a step moves the
parameters as far as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Collection

Keeps = Literal["local_batch", "global_batch"]
KEEPS: tuple[Keeps, ...] = get_args(Keeps)


def even_batches(batch: int, world: int, workers: Collection[int], keeps: Keeps) -> dict[int, int]:
    """The batch of each of these workers.

    Args:
        batch: of each of the `world` workers that the job began with.

    >>> even_batches(32, 4, [0, 1, 3], "local_batch")
    {0: 32, 1: 32, 3: 32}
    >>> even_batches(32, 4, [0, 1, 3], "global_batch")
    {0: 43, 1: 43, 3: 42}
    """
    if keeps == "local_batch":
        return dict.fromkeys(sorted(workers), batch)
    each, more = divmod(batch * world, len(workers))
    return {worker: max(1, each + (place < more)) for place, worker in enumerate(sorted(workers))}


def what_changes(keeps: Keeps) -> str:
    """Say what becomes of batches and learning rate, in words for people."""
    if keeps == "local_batch":
        return (
            "each keeps its batch, so that a step has as many samples more or fewer; the learning rate stays as it is"
        )
    return "their batches add up to the same as before, and the learning rate stays as it is"
