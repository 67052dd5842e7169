"""The driver of a controller in a row without a server, as workers have it (`offbeat.control.round_controller`).

What it decides behind a step is proposed with the next exchange, and holds behind that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.control import RoundController
from offbeat.sync import StepsLocally

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from offbeat.control import Controller, Swap
    from offbeat.sync import Policy
    from offbeat.sync.policy import Contributes


class SimulatedController:
    """The controller of one row. Call order, for each step: `contributes`, `stepped`, perhaps `adopt`, `ask`.

    Args:
        policy: that decides at the beginning.
        controller: of the plan; None if there is none.
    """

    def __init__(self, policy: Policy, controller: Controller | None) -> None:
        self.policy = policy
        self._controller, self._driver = controller, RoundController()
        self._ahead = 0  # steps that the policy counts more
        self._times: dict[int, list[float]] = {}
        self._wanted: Swap | None = None

    def contributes(self, step: int) -> Contributes:
        """The kind of contribution that every worker makes of this step."""
        return self.policy.contributes(step + self._ahead)

    def stepped(
        self,
        steps: int,
        own_s: Mapping[int, float],
        samples: float,
        exchanged_at_s: float | None,
        late: Collection[int] = (),
    ) -> Swap | None:
        """Record a step; returns the swap that all vote on behind its exchange.

        Args:
            steps: made so far.
            own_s: by rank, for how long each worker has computed in this one.
            samples: of each, on average.
            exchanged_at_s: when its exchange was over; None without one.
            late: those that came too late for it, of whose times nobody hears.
        """
        if self._controller is None:
            return None
        self._times = {rank: [*self._times.get(rank, []), took_s] for rank, took_s in own_s.items()}
        if exchanged_at_s is None:
            self._driver.stepped(self._controller, steps, samples, {}, 0.0)
            return None
        whole = max(map(len, self._times.values()), default=0)
        times = {rank: own for rank, own in self._times.items() if len(own) == whole and rank not in late}
        self._driver.stepped(self._controller, steps, samples, times, exchanged_at_s, late=late)
        self._times = {}
        wanted, self._wanted = self._wanted, None
        return wanted

    def adopt(self, swap: Swap, step: int, at_s: float) -> None:
        """Adopt the swap from this step on."""
        self._driver.swapped(self.policy, at_s, by_controller=True)
        self.policy = swap.sync
        self._ahead = swap.sync.step_of(step) - step if isinstance(swap.sync, StepsLocally) else 0

    def ask(self) -> None:
        """Ask the controller behind a step."""
        if self._controller is not None and self._wanted is None:
            self._wanted = self._driver.ask(self._controller, self.policy)
