"""A small cluster in virtual time that trains in rounds, all waiting for all, with tuned batches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.batching.balance import CycleCost, shares

if TYPE_CHECKING:
    from offbeat.batching import BatchTuning, TuningState


@dataclass
class Cluster:
    """What is true of it, and unknown to the tuning.

    Args:
        slowness: of each worker, 1 for the usual one.
        fixed_s, sample_s: of the usual worker.
        noise: relative standard deviation of computation.
        late: part of the steps that take three times as long.
    """

    slowness: dict[int, float]
    tuning: BatchTuning
    total: int = 512
    fixed_s: float = 0.01
    sample_s: float = 0.001
    transfer_s: float = 0.02
    noise: float = 0.0
    late: float = 0.0
    seed: int = 0
    state: TuningState = field(init=False)
    round: int = -1
    round_s: float = 0.0
    batches: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.luck = random.Random(self.seed)
        self.state = self.tuning.init(self.total)
        for worker in self.slowness:
            self.state = self.tuning.join(self.state, worker)

    def play(self, rounds: int) -> list[float]:
        """How long each took. Who takes part in every m-th round has m rounds for its step."""
        return [self.play_one() for _ in range(rounds)]

    def play_one(self) -> float:
        self.round += 1
        self.state, self.batches = self.tuning.plan(self.state, self.round)
        took_s = {}
        for worker, batch in self.batches.items():
            luck = self.luck.lognormvariate(0, self.noise) * (3 if self.luck.random() < self.late else 1)
            took_s[worker] = self.compute_s(worker, batch) * luck
        every = {worker: self.state.machines[worker].every for worker in took_s}
        self.round_s = max((took_s[w] + self.transfer_s) / every[w] for w in took_s)
        for worker, compute_s in took_s.items():
            blocked_s = max(0.0, self.round_s * every[worker] - compute_s - self.transfer_s)
            self.state = self.tuning.observe(
                self.state, worker, self.batches[worker], compute_s, self.transfer_s, blocked_s
            )
        return self.round_s

    def compute_s(self, worker: int, batch: int) -> float:
        return (self.fixed_s + self.sample_s * batch) * self.slowness[worker]

    def cycles_s(self) -> dict[int, float]:
        """True cycles with the present batches, without noise, for each round that the worker is in."""
        machines = self.state.machines
        return {w: (self.compute_s(w, m.batch) + self.transfer_s) / m.every for w, m in machines.items()}

    def best_s(self) -> float:
        """The shortest round there can be, without noise, if all take part in each."""
        costs = [
            CycleCost(self.fixed_s * slow + self.transfer_s, self.sample_s * slow, 1, self.total)
            for slow in self.slowness.values()
        ]
        return max(cost.cycle_s(share) for cost, share in zip(costs, shares(costs, self.total), strict=True))

    def unevenness(self) -> float:
        cycles_s = self.cycles_s().values()
        return max(cycles_s) / min(cycles_s) - 1

    def explain(self) -> str:
        return self.tuning.explain(self.state)
