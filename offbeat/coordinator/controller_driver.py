"""The driver of the plan's controller: asks it, and has its decision proposed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.control import Swap
from offbeat.coordinator.instructions import ControllerTimer
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.control import Controller, Metrics
    from offbeat.coordinator.instructions import Outbox
    from offbeat.sync import Policy

_OFTEN = 20  # it is asked so often in the time that it looks back, at least
_LEAST_S, _MOST_S = 0.02, 1.0  # between two askings while nothing happens


class ControllerDriver:
    """The controller of one job. It is asked after updates, and at a timer, since a job that stands still has none.

    Args:
        out: what this leads to.
        metrics: what a controller is told; None if nothing is decided yet.
        propose: another policy, and the reason.
        now_s: monotonic seconds.
    """

    def __init__(
        self,
        out: Outbox,
        metrics: Callable[[Controller], Metrics | None],
        propose: Callable[[Policy, str], None],
        now_s: Callable[[], float],
    ) -> None:
        self._out, self._metrics, self._propose, self._now_s = out, metrics, propose, now_s
        self._controller: Controller | None = None
        self._refused: set[Policy] = set()

    def follow(self, controller: Controller | None) -> None:
        """The plan that holds has this controller; None for none."""
        if controller != self._controller:
            self._refused.clear()
        self._controller = controller
        self._ask_later()

    def ask(self) -> None:
        """Ask the controller after an event."""
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
        mine, its = short_name(self._controller), short_name(sync)
        self._out.log(f"{mine} cannot have {its} decide, and does not try again. {why}")

    def on_time(self) -> None:
        """Ask at the timer, and set it again."""
        self._ask_later()
        self.ask()

    def _ask_later(self) -> None:
        at_s = None
        if self._controller is not None:
            at_s = self._now_s() + min(_MOST_S, max(_LEAST_S, self._controller.looks_back_s / _OFTEN))
        self._out.set_timer(ControllerTimer(), at_s)
