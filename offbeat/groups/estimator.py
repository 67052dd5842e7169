"""Any scikit-learn classifier or regressor for each group: a spec.

    Estimator(RandomForestRegressor(), max_depth=Grid(3, 6, None))

It is cloned for each group, fitted to its rows alone, and may fail: that is a row with the error, and the others go on.
Linear models that the batched solver knows (`linear_estimators`) are solved there, all groups together.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xxhash import xxh3_64_intdigest

from offbeat.groups.fitting import BucketFit, BucketTask, GroupStatus, has_model, joined, usable_rows
from offbeat.groups.glm import Glm, Poisson
from offbeat.groups.linear_estimators import MOST_FEATURES, fitted_estimators, glm_of, means_of
from offbeat.groups.mixing import mixed
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
_LEAST_PROBABILITY = float(np.finfo(np.float64).eps)
NEWTON, SCIKIT_LEARN, CONSTANT = "newton", "scikit-learn", "constant"


@dataclass(frozen=True, eq=False)
class EstimatorModel:
    """The model of one group.

    Args:
        estimator: of scikit-learn, fitted; its classes are places among those of the table.
        solver: what has fitted it: "newton", "scikit-learn", or "constant" for a group with one class.
        classes: of the table, of a classification; else 0.
    """

    estimator: Any
    solver: str
    classes: int

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return (rows,): means, or probabilities of the second class; of more classes (rows, classes).

        Probabilities are 0 and 1 if the estimator tells none.
        """
        if not self.classes:
            return np.asarray(self.estimator.predict(features), np.float64).reshape(len(features))
        made = np.zeros((len(features), self.classes))
        if hasattr(self.estimator, "predict_proba"):
            made[:, np.asarray(self.estimator.classes_, np.int64)] = self.estimator.predict_proba(features)
        else:
            made[np.arange(len(made)), np.asarray(self.estimator.predict(features), np.int64)] = 1
        return made[:, 1] if self.classes == 2 else made


@dataclass(frozen=True, init=False)
class Estimator:
    """A scikit-learn estimator for each group.

    Args:
        estimator: a classifier or regressor, or a pipeline that ends with one; it is cloned, and stays as it is.
        seed: each `random_state` that is None is set from it, the group's key and the configuration.
        settings: parameters of the estimator, with `Grid` where values are to be tried; a name that is one of this
            spec's own, such as `seed`, goes here.
        parameters: the same, by keywords.

    >>> from sklearn.linear_model import Ridge
    >>> from offbeat.groups import Grid
    >>> Estimator(Ridge(), alpha=Grid(0.1, 1)).settings
    {'alpha': Grid(0.1, 1)}
    """

    estimator: Any
    settings: Mapping[str, Any] = dataclasses.field(hash=False)
    seed: int
    most_classes: ClassVar[int] = 1000
    dtype: ClassVar[type] = object

    def __init__(
        self, estimator: Any, *, seed: int = 0, settings: Mapping[str, Any] | None = None, **parameters: Any
    ) -> None:
        object.__setattr__(self, "estimator", estimator)
        object.__setattr__(self, "settings", {**(settings or {}), **parameters})
        object.__setattr__(self, "seed", seed)

    @property
    def is_classifier(self) -> bool:
        """Return whether the estimator is a classifier."""
        from sklearn.base import is_classifier

        return bool(is_classifier(self.estimator))

    @property
    def takes_missing(self) -> bool:
        """Return whether the estimator says that it takes NaN."""
        from sklearn.utils import get_tags

        return bool(get_tags(self.estimator).input_tags.allow_nan)

    def check(self) -> None:
        """Check one configuration.

        Raises:
            GroupDataError: if it cannot be used.
        """
        try:
            from sklearn.base import BaseEstimator, is_classifier, is_regressor
        except ModuleNotFoundError as error:
            raise GroupDataError("Cannot fit estimators: `pip install scikit-learn` first.") from error
        kind = self.estimator.__name__ if isinstance(self.estimator, type) else type(self.estimator).__name__
        if isinstance(self.estimator, type):
            raise GroupDataError(f"Cannot fit the class {kind}: pass an object, {kind}().")
        if not isinstance(self.estimator, BaseEstimator) or not (
            is_classifier(self.estimator) or is_regressor(self.estimator)
        ):
            raise GroupDataError(f"Cannot fit {kind} for each group: it is no classifier or regressor of scikit-learn.")
        known = self.estimator.get_params()
        for name in self.settings.keys() - known.keys():
            near = difflib.get_close_matches(name, known, 1)
            way = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}."
            raise GroupDataError(f"Cannot set {name!r}: {kind} has no such parameter; {way}")

    def shown(self, coefficients: np.ndarray, features: Sequence[str]) -> dict[str, np.ndarray]:
        """Return what has fitted each model."""
        return {"solver": np.array([model and model.solver for model in coefficients[:, 0]], object)}

    def width(self, features: int) -> int:
        """Return 1: a model is one object."""
        return 1

    def fit(self, task: BucketTask, configs: Sequence[Estimator]) -> BucketFit:
        """Fit a model for each group of a bucket and each configuration."""
        found = BucketFit.empty(len(task.offsets) - 1, len(configs), 1, object)
        usable = found.mark_unusable(task, is_classifier=self.is_classifier, takes_missing=self.takes_missing)
        together: dict[Glm, list[int]] = {}
        for at, config in enumerate(configs):
            estimator = config.configured()
            glm = glm_of(estimator) if task.classes <= 2 and task.features.shape[1] <= MOST_FEATURES else None
            if glm is None:
                config._fit_each(estimator, task, usable, found, at)
            else:
                together.setdefault(dataclasses.replace(glm, l2=0.0), []).append(at)
        for places in together.values():
            _solve([configs[at].configured() for at in places], task, found, places)
        return found

    def fit_together(self, tasks: Callable[[], Iterable[BucketTask]], config: Estimator) -> np.ndarray:
        """Fit one model to the rows of all groups, which have to be in memory together.

        Raises:
            GroupDataError: if the estimator fails.
        """
        found = config.fit(joined(tasks(), takes_missing=self.takes_missing), [config])
        if found.status[0] == GroupStatus.FAILED:
            raise GroupDataError(f"Cannot fit one model to the rows of all groups: {found.errors[0]}.")
        return np.asarray(found.coefficients[0, 0])

    def margins(self, coefficients: np.ndarray, features: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return what each row's model predicts: a mean, or probabilities; NaN where there is no model, or it fails.

        Args:
            coefficients: (groups, 1), of `EstimatorModel`.
            features: (rows, features).
            groups: (rows,), which of the models.
        """
        groups = groups % len(coefficients)
        known = has_model(coefficients)
        classes = next((model.classes for model in coefficients[known, 0]), 0)
        made = np.full((len(groups), classes) if classes > 2 else len(groups), np.nan)
        which = np.flatnonzero(known[groups] & usable_rows(features, takes_missing=self.takes_missing))
        is_linear = np.array([model is not None and model.solver == NEWTON for model in coefficients[:, 0]], np.bool_)
        if is_linear.any():
            rows, which = which[is_linear[groups[which]]], which[~is_linear[groups[which]]]
            models, places = np.unique(groups[rows], return_inverse=True)
            if len(rows):
                made[rows] = means_of([model.estimator for model in coefficients[models, 0]], features[rows], places)
        which = which[np.argsort(groups[which], kind="stable")]
        failed: list[Exception] = []
        for part in np.split(which, np.flatnonzero(np.diff(groups[which])) + 1) if len(which) else ():
            try:
                made[part] = coefficients[groups[part[0]], 0].predict(features[part])
            except Exception as error:
                failed.append(error)
        if failed:
            warnings.warn(
                f"{len(failed)} groups cannot be predicted. The first error: {_text(failed[0])}.", stacklevel=2
            )
        return made

    def means(self, margins: np.ndarray) -> np.ndarray:
        """Return the margins: they are what is predicted."""
        return margins

    def loss_of(self, margins: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the loss of each row: half of the squared difference, or the log loss."""
        if not self.is_classifier:
            return np.asarray(0.5 * np.square(margins - target))
        if margins.ndim == 1:
            margins = np.stack([1 - margins, margins], 1)
        places = np.nan_to_num(target).astype(np.int64)
        found = margins[np.arange(len(places)), places].clip(_LEAST_PROBABILITY, 1)
        return np.where(np.isnan(target), np.nan, -np.log(found))

    def configured(self) -> Any:
        """Return a clone with the parameters of this configuration."""
        from sklearn.base import clone

        return clone(self.estimator).set_params(**self.settings)

    def _fit_each(self, estimator: Any, task: BucketTask, usable: np.ndarray, found: BucketFit, at: int) -> None:
        """Fit the groups one by one."""
        from sklearn.base import clone
        from sklearn.dummy import DummyClassifier

        target = task.target.astype(np.int64) if task.classes and usable.any() else task.target
        names = [name for name, value in estimator.get_params().items() if _is_open_seed(name, value)]
        digest = xxh3_64_intdigest(repr(sorted(self.settings.items())).encode())
        seeds = mixed(self.seed, task.hashes, digest) >> np.uint64(32)
        told: dict[tuple[type[Warning], str], None] = {}
        for group in np.flatnonzero(usable | (found.status == GroupStatus.ONE_CLASS)):
            rows = slice(*task.offsets[group : group + 2])
            one = clone(estimator).set_params(**dict.fromkeys(names, int(seeds[group])))
            solver = SCIKIT_LEARN
            if not usable[group]:
                one, solver = DummyClassifier(strategy="prior"), CONSTANT
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    one.fit(task.features[rows], target[rows])
                    model = EstimatorModel(one, solver, task.classes)
                    losses = self.loss_of(model.predict(task.features[rows]), task.target[rows])
            except Exception as error:
                found.status[group], found.errors[group] = GroupStatus.FAILED, _text(error)
                continue
            found.coefficients[group, at, 0] = model
            found.losses[group, at] = losses.mean()
            found.steps[group, at] = np.max(getattr(one, "n_iter_", None) or 0)
            for warning in caught:
                if warning.category.__name__ == "ConvergenceWarning":
                    found.status[group] = GroupStatus.NOT_CONVERGED
                else:
                    told[warning.category, str(warning.message)] = None
        for category, text in told:
            warnings.warn(text, category, stacklevel=3)


def _solve(estimators: Sequence[Any], task: BucketTask, found: BucketFit, places: Sequence[int]) -> None:
    """Fit linear models that differ in their penalty alone, all groups together."""
    glms = [glm for glm in map(glm_of, estimators) if glm is not None]
    solved = glms[0].fit(task, glms)
    if isinstance(glms[0], Poisson):
        is_wrong = task.sums(task.target < 0) > 0
        solved.coefficients[is_wrong] = np.nan
        solved.status[is_wrong] = GroupStatus.FAILED
        found.errors[is_wrong] = "ValueError: a target is less than 0"
    found.status[:] = solved.status
    groups = np.flatnonzero(has_model(solved.coefficients[:, 0]))
    group = task.group
    for number, at in enumerate(places):
        coefficients = solved.coefficients[:, number]
        models = fitted_estimators(estimators[number], coefficients[groups], task.features.shape[1])
        for one, model in zip(groups, models, strict=True):
            found.coefficients[one, at, 0] = EstimatorModel(model, NEWTON, task.classes)
        margins = glms[0].margins(coefficients, task.features, group)
        found.losses[:, at] = task.means(glms[0].loss_of(margins, task.target))
        found.steps[:, at] = solved.steps[:, number]


def _is_open_seed(name: str, value: Any) -> bool:
    return value is None and (name == "random_state" or name.endswith("__random_state"))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"
