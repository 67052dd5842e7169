"""The driver of the plan's controller where there is no server.

All workers hear the same in the tails of their exchanges (`step_times`), and keep the same book of it; the first one
asks, and calls all to confer about what the controller decides, as it does about what a person wants (`plan_vote`).
When it is lost, the next one goes on from its own book.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from offbeat.control import RoundMetrics, Swap
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.control import Controller
    from offbeat.plan import Plan
    from offbeat.sync import Policy

_log = logging.getLogger("offbeat")


class RoundController:
    """One worker's part. Call order: `stepped` behind each step; then `ask`, on the first worker.

    Args:
        now_s: the clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._book = RoundMetrics(now_s())
        self._step, self._samples = 0, 0
        self._asked: Policy | None = None
        self._refused: set[Policy] = set()

    def stepped(self, controller: Controller, step: int, samples: int, times: Mapping[int, Sequence[float]]) -> bool:
        """Whether a step is over that it had not been told of.

        Args:
            step: that this worker has made.
            samples: of it.
            times: how long each step took each worker; empty if there was no exchange.
        """
        if step == self._step:  # another model's
            return False
        self._step, self._samples = step, self._samples + samples
        if times:
            self._book.hear(self._now_s(), times, samples=self._samples, looks_back_s=controller.looks_back_s)
            self._samples = 0
        return True

    def ask(self, controller: Controller, sync: Policy) -> Swap | None:
        """Ask the controller for another policy than `sync`; None also for what was refused before."""
        decision = controller.decide(self._book.metrics(sync, self._step))
        if not isinstance(decision, Swap) or decision.sync in self._refused:
            return None
        self._asked = decision.sync
        return decision

    def refused(self, controller: Controller | None) -> None:
        """A worker cannot go by what it wanted last."""
        if self._asked is not None:
            self._refused.add(self._asked)
            _log.warning(
                "%s cannot have %s decide, and does not try again.", short_name(controller), short_name(self._asked)
            )

    def adopts(self, before: Plan, plan: Plan, *, by_controller: bool) -> None:
        """Another plan than `before` holds."""
        if plan.controller != before.controller:
            self._refused.clear()
        if plan.sync != before.sync:
            self._book.swapped(before.sync, self._now_s(), by_controller=by_controller)
