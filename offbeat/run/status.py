"""The status of a run's training, as `offbeat top` shows it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from offbeat.engine import happenings, named_values, shortened
from offbeat.protocol.worker_status import MOST_NUMBER, TrainingStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.engine.model_registry import ModelRegistry
    from offbeat.engine.worker_context import WorkerContext
    from offbeat.loading.manager import LoaderManager
    from offbeat.run.plan_manager import PlanManager


class RunStatus:
    """Collects the status of one worker.

    Args:
        context: of this worker.
        models, data, plans: of its run.
        was_told: whether it has left, because it was told to.
    """

    def __init__(
        self,
        context: WorkerContext,
        models: ModelRegistry,
        data: LoaderManager,
        plans: PlanManager,
        was_told: Callable[[], bool],
    ) -> None:
        self._context, self._models, self._data, self._plans, self._was_told = context, models, data, plans, was_told
        self._total_epochs, self._total_steps = 0.0, 0
        self._began_s = self._waited_before_s = 0.0

    def expect(self, epochs: float, steps: int) -> None:
        """The run is to end at so many epochs or steps; 0 for unknown."""
        self._total_epochs, self._total_steps = epochs, steps

    @property
    def has_begun(self) -> bool:
        """Whether a model was prepared."""
        return self._began_s > 0

    def begin(self) -> None:
        """The first model is prepared."""
        if not self.has_begun:
            context = self._context
            self._began_s, self._waited_before_s = context.clock.now_s(), context.waiter.waited_s

    def collect(self) -> TrainingStatus:
        """The present status; asked for on another thread."""
        context, models = self._context, self._models
        metrics, loaders, plan = context.metrics, self._data.loaders, self._plans.plan
        used = metrics.resources.sample()
        return TrainingStatus(
            host=os.uname().nodename[:64],
            step=models.step,
            exchanges=context.waiter.witness.exchanges,
            models=max(1, len(models)),
            samples=metrics.total_samples,
            waited_s=context.waiter.waited_s - self._waited_before_s,
            computed_s=metrics.total_own_s,
            here_s=context.clock.now_s() - self._began_s if self.has_begun else 0.0,
            epochs=loaders[0].progress if loaders else -1.0,
            total_epochs=self._total_epochs,
            total_steps=self._total_steps,
            cpu_cores=used.cpu_cores if used is not None else 0.0,
            memory_bytes=used.memory_bytes if used is not None else 0,
            sent_bytes_per_s=used.sent_bytes_per_s if used is not None else 0.0,
            values=named_values({} if context.is_validator else dict(metrics.values)),  # of data that is nobody else's
            policy=shortened(repr(plan.sync)),
            fabric=shortened(repr(plan.fabric)),
            residual=self._unsent_norm(),
            events=happenings(tuple(metrics.events)),
            left=self._was_told(),
            clocks=self._plans.clocks(),
        )

    def _unsent_norm(self) -> float:
        """The norm of what this worker has computed and not sent, of all models; 0 if it is no number."""
        norm = math.hypot(*(one.unsent_norm for one in self._models.synchronizers))
        return norm if norm < MOST_NUMBER else 0.0
