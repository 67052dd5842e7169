"""The driver of the plan's controller where there is no server.

All workers learn the same with their exchanges, and keep the same metrics; the first one asks the controller, and
proposes what it decides with the next exchange. When that worker is lost, the next one continues from its own metrics.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from offbeat.control.controller import Swap
from offbeat.control.round_metrics import RoundMetrics
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from offbeat.control.controller import Controller
    from offbeat.sync import Policy

_log = logging.getLogger("offbeat")


class RoundController:
    """One worker's part. Call order: `stepped` behind each step; then `ask`, on the first worker.

    Args:
        at_s: when the first policy began to decide, in clock seconds.
    """

    def __init__(self, at_s: float = 0.0) -> None:
        self._metrics = RoundMetrics(at_s)
        self._step, self._samples = 0, 0.0
        self._asked: Policy | None = None
        self._refused: set[Policy] = set()

    def stepped(
        self,
        controller: Controller,
        step: int,
        samples: float,
        times: Mapping[int, Sequence[float]],
        at_s: float,
        *,
        late: Collection[int] = (),
    ) -> bool:
        """Whether a step is over that it had not been told of.

        Args:
            step: that this worker has made.
            samples: of it.
            times: by rank, how many seconds each step since the last exchange took; empty if there was no exchange.
            at_s: now.
            late: ranks of those who came too late for the exchange.
        """
        if step == self._step:  # another model's
            return False
        self._step, self._samples = step, self._samples + samples
        if times:
            self._metrics.hear(at_s, times, samples=self._samples, looks_back_s=controller.looks_back_s, late=late)
            self._samples = 0.0
        return True

    def ask(self, controller: Controller, sync: Policy) -> Swap | None:
        """Ask the controller for another policy than `sync`; None also for what was refused before."""
        decision = controller.decide(self._metrics.metrics(sync, self._step))
        if not isinstance(decision, Swap) or decision.sync in self._refused:
            return None
        self._asked = decision.sync
        return decision

    def refused(self, controller: Controller | None) -> None:
        """A worker cannot go by what the controller wanted last."""
        if self._asked is not None:
            self._refused.add(self._asked)
            _log.warning(
                "%s cannot have %s decide, and does not try again.", short_name(controller), short_name(self._asked)
            )

    def replaced(self) -> None:
        """Forget what was refused: another controller is asked from now on."""
        self._refused.clear()

    def swapped(self, before: Policy, at_s: float, *, by_controller: bool) -> None:
        """Another policy than `before` decides from now on."""
        self._metrics.swapped(before, at_s, by_controller=by_controller)
