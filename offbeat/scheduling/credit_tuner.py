"""A search for slice and credit of `Credit`, on the timeline of the profile that all workers share.

Bayesian optimization by the tree-structured Parzen estimator of `optuna` (Akiba et al., KDD 2019), from a fixed seed:
all workers find the same, and no step is lost to what is tried. The published program tunes while it trains, about 100
steps for each of 15 points, and sees what a timeline does not know.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

_SEED = 0


def check_library(part: object) -> None:
    """Check that what searches is installed.

    Raises:
        PlanError: if it is not.
    """
    if importlib.util.find_spec("optuna") is None:
        raise PlanError(
            f"Cannot tune {part!r}: optuna is not installed. Install it on every host: pip install 'offbeat[tune]'; or "
            "give slice_bytes and credit_bytes, and trials=0 - at `plan.scheduling.trials`."
        )


def best_sizes(
    step_s: Callable[[int, int], float], first: tuple[int, int], *, least: int, most: int, trials: int
) -> tuple[int, int]:
    """The slice and credit with the shortest step of those that are tried; the same for the same steps.

    Args:
        step_s: the time that a step takes with a slice and a credit of so many bytes.
        first: that are tried first, so that nothing worse is found.
        least, most: bytes of a slice; a credit is of one slice at least, and of two of the largest at most.
        trials: so many are tried.
    """
    import optuna

    tried: list[tuple[float, tuple[int, int]]] = [(step_s(*first), first)]

    def objective(trial: optuna.Trial) -> float:
        slice_bytes = trial.suggest_int("slice_bytes", least, most, log=True)
        credit_bytes = trial.suggest_int("credit_bytes", least, 2 * most, log=True)
        sizes = (slice_bytes, max(slice_bytes, credit_bytes))
        tried.append((step_s(*sizes), sizes))
        return tried[-1][0]

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=_SEED))
        study.optimize(objective, n_trials=trials - 1)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return min(tried, key=lambda one: one[0])[1]
