"""The computing time of each step of each worker: from the scenario, with the same jitter and stragglers as the lab's
workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.scenario import Replay
from offbeat.straggler_model import Straggler, jitter

if TYPE_CHECKING:
    from offbeat.scenario import Scenario


class ComputeTimes:
    """One worker's steps.

    Args:
        scenario: to be played.
        rank: of the worker.
        compute_s: its mean computation, for the batch of the scenario.
    """

    def __init__(self, scenario: Scenario, rank: int, compute_s: float) -> None:
        self._scenario = scenario
        self._replay = scenario.workload if isinstance(scenario.workload, Replay) else None
        self._straggler = Straggler(scenario.straggle, rank)
        self._rank, self._compute_s = rank, compute_s
        self._step = 0

    def of_another(self, rank: int) -> ComputeTimes:
        """The times of a worker on a machine like this one's, from its first step on."""
        return ComputeTimes(self._scenario, rank, self._compute_s)

    def next_s(self, samples: int | None = None) -> tuple[float, float]:
        """Seconds of the next step: computing, and then lost.

        Args:
            samples: of its batch; None for as many as the scenario says.
        """
        computing_s = self._compute_s
        if self._replay is not None:
            computing_s *= jitter(self._replay.jitter, self._rank, self._step)
            computing_s *= 1.0 if samples is None else self._replay.work_of(samples)
        self._step += 1
        return computing_s, self._straggler.lost_s(self._compute_s)
