"""Estimators of scikit-learn that have one model for each group: scikit-lego's, by a change of one import.

    GroupedClassifier(LogisticRegression(C=0.5), groups="store").fit(frame, frame_of_classes)

They are for what scikit-learn does with an estimator: pipelines, `GridSearchCV`, `clone`. The rows are in memory, and
groups are columns of X. Linear models that Newton's method knows (`linear_estimators`) are solved for all groups at
once; others are cloned and fitted one by one, with the columns of a frame as they are.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import issparse
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    MetaEstimatorMixin,
    RegressorMixin,
    clone,
    is_classifier,
    is_regressor,
)
from sklearn.dummy import DummyClassifier
from sklearn.exceptions import FitFailedWarning
from sklearn.utils import _safe_indexing, check_array, column_or_1d, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from offbeat.groups.estimator import Estimator
from offbeat.groups.fitting import BucketTask
from offbeat.groups.group_index import GroupIndex
from offbeat.groups.linear_estimators import MOST_FEATURES, glm_of
from offbeat.groups.shrinkage import Weights, weights_by
from offbeat.groups.split_rows import SplitRows, place_of
from offbeat.groups.table_input import GroupDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class GroupLevel:
    """The groups by the first columns of the key, and their models.

    Args:
        index: of the groups; None where all rows are one group.
        models: by the number of the group; None where it could not be fitted.
        sizes: their rows.
    """

    index: GroupIndex | None
    models: list[Any]
    sizes: np.ndarray

    def numbers_of(self, rows: SplitRows) -> np.ndarray:
        """Return (rows,): the number of each row's group that has a model; else -1."""
        if self.index is None:
            return np.zeros(len(rows), np.int64)
        numbers = self.index.numbers_of(rows.keys)
        return np.where(np.array([model is not None for model in self.models])[numbers], numbers, -1)

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        """Return the key of each group."""
        return [()] if self.index is None else [tuple(row.values()) for row in self.index.keys.to_pylist()]


class GroupedEstimator(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """The common part of `GroupedClassifier` and `GroupedRegressor`."""

    estimator: Any
    groups: Any
    use_global_model: bool
    check_X: bool
    fallback_: Any
    _levels: list[GroupLevel]
    _places: list[int]

    def predict(self, X: Any) -> np.ndarray:
        """Predict by the model of each row's group.

        Raises:
            ValueError: if a group is not known, and no model of all rows is there.
        """
        return self._by_group(self._rows(X), self._predict_one)

    @property
    def estimators_(self) -> dict[tuple[Any, ...], Any]:
        """Return the fitted estimator of each group, by its key; with `shrinkage` also of the levels above."""
        return {
            key: model
            for level in self._levels
            for key, model in zip(level.keys, level.models, strict=True)
            if model is not None
        }

    @property
    def groups_(self) -> list[tuple[Any, ...]]:
        """Return the keys of the groups."""
        return self._levels[-1].keys

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.input_tags.allow_nan = not self.check_X and inner.input_tags.allow_nan
        tags.classifier_tags, tags.regressor_tags = inner.classifier_tags, inner.regressor_tags
        return tags

    def _fit(self, X: Any, y: np.ndarray, levels: Sequence[int] | None) -> None:
        """Fit the groups of each level, and one model of all rows where it is asked for.

        Args:
            levels: how many columns of the key each has; None for all of them alone.
        """
        given = [] if self.groups is None else self.groups if isinstance(self.groups, list | tuple) else [self.groups]
        rows = self._rows(X, given)
        count = rows.keys.num_columns
        check_consistent_length(rows.features, y)
        self._levels = [self._fit_level(rows, y, by) for by in ([count] if levels is None else levels)]
        leaves = self._levels[-1]
        failed = [key for key, model in zip(leaves.keys, leaves.models, strict=True) if model is None]
        self.fallback_ = None
        if count and levels is None and self.use_global_model:
            self.fallback_ = clone(self.estimator).fit(rows.features, y)
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(leaves.models)} groups cannot be fitted, and are predicted by the model of all "
                f"rows. The first is {failed[0]}: {self._first_error}.",
                FitFailedWarning,
                stacklevel=3,
            )

    def _fit_level(self, rows: SplitRows, y: np.ndarray, by: int) -> GroupLevel:
        keys = rows.keys.select(range(by))
        index = GroupIndex.count([keys], keys.column_names, keys.schema) if by else None
        numbers = np.zeros(len(y), np.int64) if index is None else index.numbers_of(keys)
        sizes = np.bincount(numbers)
        order = np.argsort(numbers, kind="stable")
        models = self._fit_together(rows, y, order, sizes) or []
        ends = np.cumsum(sizes)
        may_fail = by > 0 and by == rows.keys.num_columns and self.use_global_model and not self._is_shrunk
        for begin, end in () if models else zip(ends - sizes, ends, strict=True):
            at = order[begin:end]
            model = clone(self.estimator)
            try:
                models.append(model.fit(_safe_indexing(rows.features, at), y[at]))
            except Exception as error:
                if is_classifier(self) and by and len(set(y[at].tolist())) == 1:
                    models.append(DummyClassifier(strategy="prior").fit(np.zeros((len(at), 1)), y[at]))
                    continue
                if index is None:
                    raise
                text = f"{type(error).__name__}: {error}"
                if not may_fail:
                    key = index.keys.slice(len(models), 1).to_pylist()[0]
                    raise GroupDataError(f"Cannot fit the group {tuple(key.values())}: {text}") from error
                if None not in models:
                    self._first_error = text
                models.append(None)
        return GroupLevel(index, models, sizes)

    @property
    def _is_shrunk(self) -> bool:
        return getattr(self, "shrinkage", None) is not None

    def _fit_together(self, rows: SplitRows, y: np.ndarray, order: np.ndarray, sizes: np.ndarray) -> list[Any] | None:
        """The models of all groups at once, where the objective is one that Newton's method knows."""
        spec = Estimator(self.estimator)
        if glm_of(self.estimator) is None or spec.is_classifier != is_classifier(self):
            return None
        features = rows.numbers
        classes = np.unique(y) if is_classifier(self) else np.zeros(0)
        if features is None or not 0 < features.shape[1] <= MOST_FEATURES or len(classes) not in (0, 2):
            return None
        target = np.searchsorted(classes, y) if len(classes) else y
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        hashes = np.zeros(len(sizes), np.uint64)
        task = BucketTask(features[order], target[order].astype(np.float64), offsets, hashes, len(classes))
        found = spec.fit(task, [spec]).coefficients[:, 0, 0]
        if any(model is None for model in found):
            return None
        models = [model.estimator for model in found]
        for model in models:
            if len(classes):
                model.classes_ = classes
            if hasattr(rows.features, "columns") and all(isinstance(name, str) for name in rows.features.columns):
                model.feature_names_in_ = np.asarray(rows.features.columns, object)
        return models

    def _rows(self, X: Any, groups: Sequence[int | str] | None = None) -> SplitRows:
        """The features and keys of rows.

        Args:
            groups: in a fit, the columns of the keys.
        """
        is_fit = groups is not None
        if not is_fit:
            check_is_fitted(self, "_levels")
        if issparse(X):
            raise TypeError("Sparse data were passed, but dense data are needed: call X.toarray().")
        if not hasattr(X, "columns"):
            has_groups = bool(groups) if is_fit else bool(self._places)
            X = check_array(
                X,
                dtype=None if has_groups or not self.check_X else "numeric",
                ensure_all_finite=self.check_X and not has_groups,
                estimator=self,
                input_name="X",
            )
        X = validate_data(self, X, skip_check_array=True, reset=is_fit)
        if is_fit:
            self._places = [place_of(X, name) for name in groups or ()]
        return SplitRows.of(X, self._places, self, is_checked=self.check_X)

    def _by_group(
        self, rows: SplitRows, predict: Callable[[Any, Any], np.ndarray], level: GroupLevel | None = None
    ) -> np.ndarray:
        """The predictions of rows, each by its group's model."""
        level = level or self._levels[-1]
        numbers = level.numbers_of(rows)
        if (numbers < 0).any() and self.fallback_ is None:
            key = rows.keys.slice(int(np.argmax(numbers < 0)), 1).to_pylist()[0]
            raise GroupDataError(
                f"Cannot predict for the group {tuple(key.values())}: it was not there in `fit`. Set use_global_model."
            )
        made: np.ndarray | None = None
        for at in _parts(numbers):
            model = level.models[numbers[at[0]]] if numbers[at[0]] >= 0 else self.fallback_
            found = predict(model, _safe_indexing(rows.features, at))
            if made is None:
                made = np.empty((len(numbers), *found.shape[1:]), found.dtype)
            made[at] = found
        assert made is not None
        return made

    def _predict_one(self, model: Any, features: Any) -> np.ndarray:
        return np.asarray(model.predict(features))


class GroupedRegressor(RegressorMixin, GroupedEstimator):  # type: ignore[misc]
    """A regressor for each group: an estimator of scikit-learn with scikit-lego's parameters.

    Args:
        estimator: a regressor, cloned for each group.
        groups: the column of X, or columns, of the keys: a name, or a place; None for one group of all rows. Others are
            the features.
        shrinkage: None: a group predicts by itself; else the predictions of all rows' model (with `use_global_model`),
            of the groups by the first column, by the first two, and so on are averaged. Weights: "constant",
            (1 - alpha) for a group and alpha for what the level above predicts; "relative", the rows of each level;
            "min_n_obs", 1 for the deepest level with at least so many rows; "equal"; or a function of the levels' rows.
            A group that was not there in `fit` is averaged without that level, where scikit-lego refuses it.
        use_global_model: whether one model of all rows predicts for groups that were not there in `fit`, or could not
            be fitted; with `shrinkage` it is the first level.
        check_X: whether X has to be finite numbers; if not, the estimator is given what is there.
        alpha: of "constant".
        min_n_obs: of "min_n_obs".
    """

    def __init__(
        self,
        estimator: Any,
        groups: Any = None,
        shrinkage: str | Weights | None = None,
        use_global_model: bool = True,
        check_X: bool = True,
        alpha: float | None = None,
        min_n_obs: int | None = None,
    ) -> None:
        self.estimator, self.groups, self.shrinkage = estimator, groups, shrinkage
        self.use_global_model, self.check_X = use_global_model, check_X
        self.alpha, self.min_n_obs = alpha, min_n_obs

    def fit(self, X: Any, y: Any) -> GroupedRegressor:
        """Fit the regressor of each group.

        Raises:
            ValueError: if the data cannot be used, or a group cannot be fitted and no model of all rows is there.
        """
        if not is_regressor(self.estimator):
            raise GroupDataError(f"Cannot regress by {type(self.estimator).__name__}: it is no regressor.")
        target = _target(y, self, is_number=True)
        levels = None
        if self.shrinkage is not None:
            weights_by(self.shrinkage, self.alpha, self.min_n_obs)
            columns = len(self.groups) if isinstance(self.groups, list | tuple) else int(self.groups is not None)
            levels = list(range(0 if self.use_global_model or not columns else 1, columns + 1))
        self._fit(X, target, levels)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predict by the models of each row's groups.

        Raises:
            ValueError: if a group is not known, and no model of all rows is there.
        """
        rows = self._rows(X)
        if self.shrinkage is None:
            return self._by_group(rows, self._predict_one)
        weigh = weights_by(self.shrinkage, self.alpha, self.min_n_obs)
        numbers = np.stack([level.numbers_of(rows) for level in self._levels], 1)
        known = (numbers >= 0).sum(1)
        if not known.all():
            raise GroupDataError("Cannot predict for a group that was not there in `fit`. Set use_global_model.")
        kinds, kind = np.unique(numbers, axis=0, return_inverse=True)
        weights = np.zeros(kinds.shape)
        for at, one in enumerate(kinds):
            sizes = [int(level.sizes[place]) for level, place in zip(self._levels, one, strict=True) if place >= 0]
            found = np.asarray(weigh(sizes), np.float64)
            weights[at, : len(sizes)] = found / found.sum()
        made = np.zeros(len(numbers))
        for at, level in enumerate(self._levels):
            share = weights[kind.ravel(), at]
            which = np.flatnonzero(share)
            if len(which):
                made[which] += share[which] * self._by_group(rows.take(which), self._predict_one, level)
        return made


class GroupedClassifier(ClassifierMixin, GroupedEstimator):  # type: ignore[misc]
    """A classifier for each group: an estimator of scikit-learn with scikit-lego's parameters.

    A group may lack some of the classes; their probability is 0 there. A group with one class, which many classifiers
    refuse, predicts that class.

    Args:
        estimator: a classifier, cloned for each group.
        groups: the column of X, or columns, of the keys: a name, or a place; None for one group of all rows. Others are
            the features.
        use_global_model: whether one model of all rows predicts for groups that were not there in `fit`, or could not
            be fitted.
        check_X: whether X has to be finite numbers; if not, the estimator is given what is there.
        shrinkage: None; only regressors can be averaged.
    """

    def __init__(
        self,
        estimator: Any,
        groups: Any = None,
        use_global_model: bool = True,
        check_X: bool = True,
        *,
        shrinkage: None = None,
    ) -> None:
        self.estimator, self.groups, self.use_global_model = estimator, groups, use_global_model
        self.check_X, self.shrinkage = check_X, shrinkage

    def fit(self, X: Any, y: Any) -> GroupedClassifier:
        """Fit the classifier of each group.

        Raises:
            ValueError: if the data cannot be used, or a group cannot be fitted and no model of all rows is there.
        """
        if not is_classifier(self.estimator):
            raise GroupDataError(f"Cannot classify by {type(self.estimator).__name__}: it is no classifier.")
        if self.shrinkage is not None:
            raise GroupDataError("Cannot shrink a classification: only regressors are averaged. Set shrinkage=None.")
        target = _target(y, self, is_number=False)
        self.classes_ = np.unique(target)
        self._fit(X, target, None)
        return self

    @available_if(lambda self: hasattr(self.estimator, "predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> np.ndarray:
        """Return (rows, classes): probabilities by the model of each row's group."""
        return self._by_group(self._rows(X), self._probabilities_one)

    @available_if(lambda self: hasattr(self.estimator, "decision_function"))  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> np.ndarray:
        """Return (rows,), or (rows, classes) of more than two: scores by the model of each row's group.

        A class that a group lacks scores 1 less than the others there.
        """
        found = self._by_group(self._rows(X), self._scores_one)
        return found[:, 0] if len(self.classes_) <= 2 else found

    def _probabilities_one(self, model: Any, features: Any) -> np.ndarray:
        made = np.zeros((len(features), len(self.classes_)))
        made[:, np.searchsorted(self.classes_, model.classes_)] = model.predict_proba(features)
        return made

    def _scores_one(self, model: Any, features: Any) -> np.ndarray:
        count, places = len(features), np.searchsorted(self.classes_, model.classes_)
        scores = np.zeros(count) if len(places) == 1 else np.asarray(model.decision_function(features), np.float64)
        if len(self.classes_) <= 2:
            return (scores if len(places) == 2 else np.full(count, 1.0 if places[0] else -1.0))[:, None]
        if len(places) == 2:
            scores = np.stack([-scores, scores], 1)
        scores = scores.reshape(count, -1)
        if len(places) == len(self.classes_):
            return scores  # one for each class, or for each pair of them
        made = np.repeat(scores.min(1, keepdims=True) - 1, len(self.classes_), 1)
        made[:, places] = scores
        return made


def _parts(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of each number."""
    order = np.argsort(numbers, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _target(y: Any, owner: GroupedEstimator, *, is_number: bool) -> np.ndarray:
    if y is None:
        raise GroupDataError(f"{type(owner).__name__} requires y to be passed, but the target y is None.")
    if is_number:
        found = check_array(y, ensure_2d=False, dtype="numeric", input_name="y", estimator=owner)
        return np.asarray(column_or_1d(found, warn=True))
    check_classification_targets(y)
    return np.asarray(column_or_1d(y, warn=True))
