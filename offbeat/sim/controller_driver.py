"""The driver of a controller in a row without a server.

As in `offbeat.engine.round_controller`.

The controller and its book are the workers' own. What it decides behind a step is called out in the next exchange, and
holds behind that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.control import RoundMetrics, Swap
from offbeat.sync import LocalSGD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.control import Controller
    from offbeat.sync import Policy
    from offbeat.sync.policy import Contributes


class SimulatedController:
    """The controller of one row. Call order, for each step: `contributes`, `stepped`, perhaps `exchanged`, `ask`.

    Args:
        policy: that decides at the beginning.
        controller: of the plan; None if there is none.
    """

    def __init__(self, policy: Policy, controller: Controller | None) -> None:
        self.policy = policy
        self._controller, self._book = controller, RoundMetrics()
        self._ahead = 0  # steps that the policy counts more
        self._times: dict[int, list[float]] = {}
        self._samples = 0.0
        self._wanted: Swap | None = None

    def contributes(self, step: int) -> Contributes:
        """The kind of contribution that every worker makes of this step."""
        return self.policy.contributes(step + self._ahead)

    def stepped(self, own_s: Mapping[int, float], samples: float) -> None:
        """Record that these workers have computed for so long, `samples` each on average."""
        self._times = {rank: [*self._times.get(rank, []), took_s] for rank, took_s in own_s.items()}
        self._samples += samples

    def exchanged(self, at_s: float) -> Swap | None:
        """An exchange is over; what all confer about behind it."""
        if self._controller is None:
            return None
        looks_back_s = self._controller.looks_back_s
        whole = max(map(len, self._times.values()), default=0)
        times = {rank: own for rank, own in self._times.items() if len(own) == whole}
        self._book.hear(at_s, times, samples=self._samples, looks_back_s=looks_back_s)
        self._times, self._samples = {}, 0.0
        wanted, self._wanted = self._wanted, None
        return wanted

    def adopt(self, swap: Swap, step: int, at_s: float) -> None:
        """Adopt the swap from this step on."""
        self._book.swapped(self.policy, at_s, by_controller=True)
        self.policy = swap.sync
        self._ahead = swap.sync.step_of(step) - step if isinstance(swap.sync, LocalSGD) else 0

    def ask(self, steps: int) -> None:
        """Ask the controller behind so many steps."""
        if self._controller is not None and self._wanted is None:
            decision = self._controller.decide(self._book.metrics(self.policy, steps))
            self._wanted = decision if isinstance(decision, Swap) else None
