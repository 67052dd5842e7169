"""The driver of the plan's controller where there is no server.

All workers learn the same with their exchanges, and keep the same metrics; the first one asks the controller, and
proposes what it decides with the next exchange. When that worker is lost, the next one continues from its own metrics.
Where workers go on at their own pace by a switch's table, nobody exchanges: the first worker reads from the switch how
far all are and how long they have waited, and has the switch carry out what the controller decides. The next one begins
to read when that worker is lost; since when the policy decides, and when it was swapped, it knows already.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from offbeat.control.controller import Reading, Swap
from offbeat.control.round_metrics import RoundMetrics
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from offbeat.control.controller import Controller
    from offbeat.sync import Policy

_log = logging.getLogger("offbeat")
_READ_S = 0.05
_READINGS = 50  # in the time that a controller looks back


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

    def is_due(self, controller: Controller, at_s: float) -> bool:
        """Whether it is time to read the clocks of a table again."""
        return at_s - self._metrics.at_s >= max(_READ_S, controller.looks_back_s / _READINGS)

    def read(
        self, controller: Controller, at_s: float, steps: Mapping[int, int], waited_s: Mapping[int, float], batch: float
    ) -> None:
        """Take in what a switch knows of the workers on its table.

        Args:
            steps, waited_s: as of a `Reading`.
            batch: samples of a step.
        """
        self._step, self._samples = max(steps.values(), default=self._step), 0.0
        reading = Reading(at_s, steps, waited_s)
        self._metrics.read(reading, batch=batch, looks_back_s=controller.looks_back_s)

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

    def begin_anew(self) -> None:
        """Forget the readings: another part of the job tells of the workers from now on."""
        self._metrics.begin_anew()

    def swapped(self, before: Policy, at_s: float, *, by_controller: bool) -> None:
        """Another policy than `before` decides from now on."""
        self._metrics.swapped(before, at_s, by_controller=by_controller)
