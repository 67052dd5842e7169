"""Notices for people while a run trains: in the log of this process, and as events of its metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.engine.step_metrics import StepMetrics
    from offbeat.plan import Plan

_log = logging.getLogger("offbeat")


class RunLog:
    """The log of a run: each notice once, by the worker whose log people read.

    Args:
        metrics: where events go.
        step: of this worker, which an event is of.
        is_first: whether this worker says what all have to say alike.
        speaks_for_newcomers: whether it is the first of some that have joined together, whose log has nothing of the
            others'.
    """

    def __init__(
        self,
        metrics: StepMetrics,
        step: Callable[[], int],
        is_first: Callable[[], bool],
        *,
        speaks_for_newcomers: bool,
    ) -> None:
        self._metrics, self._step, self._is_first = metrics, step, is_first
        self.speaks_for_newcomers = speaks_for_newcomers

    def all(self, what: str, text: str, *, plan: Plan | None = None) -> None:
        """Log once what all workers have to say alike.

        Args:
            what: kind of the event.
            plan: that holds from then on, if that is what it is about.
        """
        if self._is_first() or self.speaks_for_newcomers:
            _log.warning("%s", text)
        self._metrics.event(what, text, self._step(), plan="" if plan is None else plan.to_toml())

    def server(self, text: str, waits: bool | None = None) -> None:
        """Log a notice of the server to all workers; where it runs it stands in the log already.

        Args:
            waits: whether it says what all wait for from now on, or that they do not any more; None for another.
        """
        if self.speaks_for_newcomers:
            _log.warning("%s", text)
        what = "server" if waits is None else "pause" if waits else "resumption"
        self._metrics.event(what, text, self._step())

    def own(self, text: str) -> None:
        """Log what this worker has to say about itself."""
        _log.warning("%s", text)
        self._metrics.event("warning", text, self._step())

    def stall(self, text: str) -> None:
        """A wait takes long."""
        _log.warning("%s", text)
        self._metrics.event("stall", text, self._step())

    def newcomers(self, text: str) -> None:
        """Log something about workers that have joined together, once by the first of them."""
        if self.speaks_for_newcomers:
            _log.warning("%s", text)
