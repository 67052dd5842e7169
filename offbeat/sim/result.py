"""The result of a simulated row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.fault_spec import Fault
    from offbeat.sync import Policy, Push


@dataclass(frozen=True)
class SimResult:
    """The result of a row.

    Args:
        step_s: of each worker, its steps.
        samples: of each worker, in each of them.
        waited_s: of each worker, what its steps took beyond computation.
        staleness: of each worker, that of its contributions; empty where nothing can be stale.
        swaps: what controllers decided: when, for which policy, and why.
        updates: of a server, in order: when each was made everywhere, of which contributions, and which part of a round
            it is.
        read: of each contribution of a server, how many updates were in the parameters it was computed on.
        struck: which faults did, and when, in order.
        ended: workers that did not come to the end.
    """

    step_s: list[list[float]]
    samples: list[list[int]]
    waited_s: list[list[float]]
    staleness: list[list[int]]
    swaps: list[tuple[float, Policy, str]] = field(default_factory=list)
    updates: list[tuple[float, tuple[Push, ...], float]] = field(default_factory=list)
    read: dict[Push, int] = field(default_factory=dict)
    struck: list[tuple[float, Fault]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, world: int) -> SimResult:
        """The empty result of so many workers."""
        ranks = range(world)
        return cls([[] for _ in ranks], [[] for _ in ranks], [[] for _ in ranks], [[] for _ in ranks])
