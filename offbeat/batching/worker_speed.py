"""The measured speed of the workers' machines, and their present batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.batching.balance import CycleCost
from offbeat.batching.cost_model import CostFit


@dataclass(frozen=True)
class WorkerSpeed:
    """The measured speed of one worker; immutable.

    Args:
        most: samples that fit into its memory, as far as is known.
        compute: how long it computes.
        transfer: how long it pushes and pulls, which has nothing to do with the batch.
        batch: its present one; 0 before the first.
        every: it takes part in every such round.
        blocked: steps in a row in which it waited for too long.
    """

    most: int
    compute: CostFit = field(default_factory=CostFit)
    transfer: CostFit = field(default_factory=CostFit)
    batch: int = 0
    every: int = 1
    blocked: int = 0

    @property
    def transfer_s(self) -> float:
        """Seconds that it pushes and pulls."""
        return self.transfer.predict(1) if self.transfer.known else 0.0

    def cycle_s(self, batch: float) -> float:
        """Seconds from one pull to the next, if it never waits."""
        return self.compute.predict(batch) + self.transfer_s

    def cost(self, least: int, most: int) -> CycleCost:
        """The same as a line, for batches in these bounds."""
        return CycleCost(self.compute.fixed_s + self.transfer_s, self.compute.per_sample_s, least, most)


@dataclass(frozen=True)
class TuningState:
    """All workers; immutable.

    Args:
        total: samples of a round, all workers together.
        machines: the workers that take part.
        round: the last that was planned; -1 before the first.
        changed: whether workers or their bounds have changed since.
        probing: whether nobody is known, and batches are varied to learn what they cost.
        plans: how often batches have changed.
        together: whether all wait for all in every round.
        floor: no batch is smaller, whatever else is asked for.
    """

    total: int
    machines: dict[int, WorkerSpeed] = field(default_factory=dict)
    round: int = -1
    changed: bool = True
    probing: bool = False
    plans: int = 0
    together: bool = False
    floor: int = 1
