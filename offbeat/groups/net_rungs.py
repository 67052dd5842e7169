"""Nets that are trained for some epochs at a time: those that go no further are taken out of the stacked tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.groups.fitting import BucketFit
    from offbeat.groups.net_training import NetModels, NetState, NetTraining, Trial


def runs_of(
    training: NetTraining, trial: Trial, models: NetModels, groups: np.ndarray, configs: np.ndarray
) -> Iterator[NetRun]:
    """Return models in parts that are trained together and have taken equally many steps at the end of each epoch.

    Args:
        groups, configs: (models,), of which they are.
    """
    steps = training.steps_an_epoch(models, trial)
    for count in np.unique(steps):
        for part in training.parts(models, np.flatnonzero(steps == count), trial):
            yield NetRun(training, trial, models[part], groups[part], configs[part])


@dataclass
class NetRun:
    """Models in the middle of their training.

    Args:
        groups, configs: (models,), of which they are.
        epochs: that are over.
    """

    training: NetTraining
    trial: Trial
    models: NetModels
    groups: np.ndarray
    configs: np.ndarray
    state: NetState | None = None
    epochs: int = 0

    def advance(self, epochs: int, goes_on: np.ndarray, found: BucketFit) -> None:
        """Train those that go on.

        Args:
            epochs: for so many.
            goes_on: (groups, configs).
            found: where they are written.
        """
        which = np.flatnonzero(goes_on[self.groups, self.configs])
        self.models, self.groups, self.configs = self.models[which], self.groups[which], self.configs[which]
        if not len(which):
            return
        state = None if self.state is None else self.state.part(which)
        models = dataclasses.replace(self.models, epochs=np.full(len(which), epochs))
        try:
            self.state = self.training.visit(models, self.trial, state, self.epochs)
            made = self.state.models(self.training.module).numpy()
            found.steps[self.groups, self.configs] = self.state.steps
        except (RuntimeError, ValueError):  # of one group's rows: the module's own errors came in the trial
            if not self.trial.obstacle:
                raise
            found.coefficients[self.groups, self.configs] = np.nan
            self.models, self.groups, self.configs = self.models[:0], self.groups[:0], self.configs[:0]
            return
        self.epochs += epochs
        made[~np.isfinite(made).all(1)] = np.nan
        found.coefficients[self.groups, self.configs] = made
