"""Asks the controller of the plan that holds, and has what it decides proposed."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from offbeat.control import Swap
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.control import Controller, Metrics
    from offbeat.sync import Policy

_OFTEN = 20  # it is asked so often in the time that it looks back, at least
_LEAST_S, _MOST_S = 0.02, 1.0  # between two askings while nothing happens
_log = logging.getLogger("offbeat")


class ControllerDriver:
    """Of one job. It is asked after updates, and at a timer, since a job that stands still has none.

    Args:
        metrics: what a controller is told; None if nothing is decided yet.
        propose: another policy, and the reason.
    """

    def __init__(self, metrics: Callable[[Controller], Metrics | None], propose: Callable[[Policy, str], None]) -> None:
        self._metrics, self._propose = metrics, propose
        self._controller: Controller | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refused: set[Policy] = set()

    def follow(self, controller: Controller | None) -> None:
        """The plan that holds has this controller; None for none."""
        if controller != self._controller:
            self._refused.clear()
        self._controller = controller
        self._ask_later()

    def ask(self) -> None:
        """Something has happened."""
        controller = self._controller
        metrics = None if controller is None else self._metrics(controller)
        if controller is None or metrics is None:
            return
        decision = controller.decide(metrics)
        if isinstance(decision, Swap) and decision.sync not in self._refused:
            self._propose(decision.sync, decision.reason)

    def refused(self, sync: Policy, why: str) -> None:
        """A worker cannot go by that policy; it is not proposed again."""
        self._refused.add(sync)
        _log.warning(
            "%s cannot have %s decide, and does not try again. %s", short_name(self._controller), short_name(sync), why
        )

    def _ask_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._controller is not None:
            every_s = min(_MOST_S, max(_LEAST_S, self._controller.looks_back_s / _OFTEN))
            self._timer = asyncio.get_running_loop().call_later(every_s, self._on_time)

    def _on_time(self) -> None:
        self._ask_later()
        self.ask()
