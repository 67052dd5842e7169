"""scikit-learn's linear models that the batched solver fits, all groups at once: the objective is the same.

An estimator goes there if all parameters that change the objective are as usual; the optimum is found to the last
digits, so `tol`, `max_iter` and `solver` have no effect.

| scikit-learn                 | `offbeat.groups`                   |
| ---------------------------- | ---------------------------------- |
| `LinearRegression()`         | `Linear(l2=0)`                     |
| `Ridge(alpha)`               | `Linear(l2=alpha)`                 |
| `LogisticRegression(C)`      | `Logistic(l2=1 / C)`, two classes  |
| `PoissonRegressor(alpha)`    | `Poisson(l2=alpha, per_row=True)`  |
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.groups.glm import Glm, Linear, Logistic, Poisson

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_FEATURES = 256  # a Hessian has as many numbers as their square
_FREE = {"copy_X", "fit_intercept", "intercept_scaling", "max_iter", "n_jobs", "random_state", "tol", "verbose"}
_FREE |= {"warm_start", "solver"}
_AS_USUAL = {"penalty": ("l2", "deprecated"), "l1_ratio": (0.0, None)}


def glm_of(estimator: Any) -> Glm | None:
    """Return the spec with the same objective as a scikit-learn estimator; None if there is none."""
    from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor, Ridge

    strengths = {LinearRegression: None, LogisticRegression: "C", PoissonRegressor: "alpha", Ridge: "alpha"}
    kind = type(estimator)
    if kind not in strengths:
        return None
    given, usual, strength = estimator.get_params(), kind().get_params(), strengths[kind]
    for name in given.keys() - _FREE - {strength}:
        allowed = (usual[name], *_AS_USUAL.get(name, ()))
        if not isinstance(given[name], bool | int | float | str | None) or given[name] not in allowed:
            return None
    value = 0.0 if strength is None else given[strength]
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    # liblinear penalizes the intercept, too.
    if not is_number or value < 0 or given.get("solver") == "liblinear" or not isinstance(given["fit_intercept"], bool):
        return None
    if kind is LogisticRegression:
        return Logistic(l2=float(1 / value), intercept=given["fit_intercept"]) if value > 0 else None
    if not np.isfinite(value):
        return None
    if kind is PoissonRegressor:
        return Poisson(l2=float(value), intercept=given["fit_intercept"], per_row=True)
    return Linear(l2=float(value), intercept=given["fit_intercept"])


def fitted_estimators(estimator: Any, coefficients: np.ndarray, features: int) -> Iterator[Any]:
    """Yield scikit-learn estimators that have these coefficients.

    Args:
        estimator: that `glm_of` knows.
        coefficients: (models, features) or, with an intercept, (models, features + 1).
        features: how many there are.
    """
    from sklearn.linear_model import LogisticRegression

    # Fitted to made-up rows for all attributes that a fit sets, whatever the version; then each gets its own numbers.
    rows = np.random.default_rng(0).normal(size=(2 * features + 2, features))
    usual = type(estimator)(fit_intercept=estimator.fit_intercept).fit(rows, np.arange(len(rows)) % 2)
    usual.set_params(**estimator.get_params())
    is_classifier = type(estimator) is LogisticRegression
    for row in coefficients:
        made = copy.copy(usual)
        intercept = float(row[features]) if estimator.fit_intercept else 0.0
        made.coef_ = row[None, :features].copy() if is_classifier else row[:features].copy()
        made.intercept_ = np.array([intercept]) if is_classifier else intercept
        yield made


def means_of(estimators: Sequence[Any], features: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return what estimators of one class predict, all rows at once.

    Args:
        estimators: that `fitted_estimators` has made.
        features: (rows, features).
        groups: (rows,), which of the estimators.
    """
    coefficients = np.stack([np.append(one.coef_, one.intercept_) for one in estimators])
    glm = glm_of(estimators[0])
    assert glm is not None
    glm = dataclasses.replace(glm, intercept=True)
    return glm.means(glm.margins(coefficients, features, groups))
