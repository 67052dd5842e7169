"""Tests of scikit-learn estimators for groups: the same as a loop over clones, whoever solves."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor, Ridge, SGDRegressor
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier

from offbeat.groups import Estimator, FittedGroups, Grid, GroupDataError, GroupedTrainer, Poisson, Small
from offbeat.groups.linear_estimators import glm_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FEATURES = ["a", "b", "c"]


def shops(groups: int = 8, seed: int = 0) -> pa.Table:
    """Groups of unequal sizes with a number, a count, two classes and three classes to predict."""
    chance = np.random.default_rng(seed)
    shop = chance.permutation(np.repeat(np.arange(groups), 40 + 7 * np.arange(groups)))
    x = chance.normal(size=(len(shop), 3))
    level = (chance.normal(size=(groups, 3))[shop] * x).sum(1) + chance.normal(size=len(shop))
    columns = {"shop": shop, **dict(zip(FEATURES, x.T, strict=True)), "sold": level}
    columns |= {"count": chance.poisson(np.exp(0.3 * level)), "many": np.where(level > 0, "yes", "no")}
    return pa.table({**columns, "kind": np.array(["few", "some", "lots"])[np.digitize(level, [-0.7, 0.7])]})


def fit(spec: Any, table: pa.Table, target: str, **more: Any) -> FittedGroups:
    return GroupedTrainer(spec, by="shop", target=target, features=FEATURES, **more).fit(table)


def parts_of(table: pa.Table, target: str) -> Iterator[tuple[int, np.ndarray, Any, np.ndarray]]:
    """The rows of each group, with the places of these rows."""
    shop = table["shop"].to_numpy()
    x = np.stack([table[name].to_numpy() for name in FEATURES], 1)
    for group in np.unique(shop):
        rows = np.flatnonzero(shop == group)
        yield int(group), x[rows], table[target].to_numpy()[rows], rows


def objective(estimator: Any, x: np.ndarray, y: np.ndarray) -> float:
    """Return scikit-learn's objective of an estimator; where that is a mean, times the rows."""
    w, margins = np.ravel(estimator.coef_), x @ np.ravel(estimator.coef_) + np.ravel(estimator.intercept_)
    if isinstance(estimator, LogisticRegression):
        return float(np.logaddexp(0, np.where(y == y.max(), -margins, margins)).sum() + w @ w / (2 * estimator.C))
    if isinstance(estimator, PoissonRegressor):
        return float((np.exp(margins) - y * margins).sum() + len(y) * estimator.alpha / 2 * w @ w)
    return float(np.square(margins - y).sum() + getattr(estimator, "alpha", 0.0) * w @ w)


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        (LinearRegression(), "sold"),
        (Ridge(alpha=3.0), "sold"),
        (LogisticRegression(C=0.3, tol=1e-10, max_iter=10_000), "many"),
        (LogisticRegression(C=20, solver="newton-cholesky", tol=1e-10), "many"),
        (PoissonRegressor(alpha=0.2, tol=1e-10, max_iter=10_000), "count"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_known_estimators_are_solved_together_with_the_same_objective(
    estimator: Any, target: str, fit_intercept: bool
) -> None:
    estimator, table = clone(estimator).set_params(fit_intercept=fit_intercept), shops()
    fitted = fit(Estimator(estimator), table, target)
    assert set(fitted.models["solver"].to_pylist()) == {"newton"}
    predictions = fitted.predict(table)
    for group, x, y, rows in parts_of(table, target):
        theirs, ours = clone(estimator).fit(x, y), fitted.records.coefficients[group, 0].estimator
        told, best = objective(ours, x, (y == "yes") if target == "many" else y), objective(theirs, x, y)
        assert told == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert told <= best + 1e-9 * abs(best)
        np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-4, atol=1e-6)
        found = predictions["probability" if target == "many" else "prediction"].to_numpy()[rows]
        expected = theirs.predict_proba(x)[:, 1] if target == "many" else theirs.predict(x)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.predict(x) if target != "many" else ours.predict_proba(x)[:, 1], found)


@pytest.mark.parametrize(
    "estimator",
    [
        Ridge(positive=True, solver="lbfgs"),
        Ridge(alpha=np.ones(3)),
        LinearRegression(positive=True),
        LogisticRegression(class_weight="balanced"),
        LogisticRegression(solver="liblinear"),
        LogisticRegression(l1_ratio=0.5, solver="saga"),
        LogisticRegression(C=-1),
        SGDRegressor(),
    ],
    ids=repr,
)
def test_other_objectives_are_left_to_scikit_learn(estimator: Any) -> None:
    assert glm_of(estimator) is None


@pytest.mark.parametrize("target", ["sold", "many", "kind"])
def test_a_loop_over_clones_predicts_the_same(target: str) -> None:
    table = shops()
    given: Any = (
        RandomForestRegressor(7, random_state=3) if target == "sold" else RandomForestClassifier(7, random_state=3)
    )
    fitted = fit(Estimator(given), table, target)
    assert set(fitted.models["solver"].to_pylist()) == {"scikit-learn"}
    found = np.array(fitted.predict(table)["prediction"].to_pylist())
    classes = np.unique(table[target].to_numpy())
    for _, x, y, rows in parts_of(table, target):
        places = y if target == "sold" else np.searchsorted(classes, y)
        expected = clone(given).fit(x, places).predict(x)
        assert (found[rows] == (expected if target == "sold" else classes[expected])).all()


def test_a_class_that_a_group_lacks_has_no_probability() -> None:
    table = shops().to_pydict()
    table["kind"] = [
        "few" if shop == 2 and kind == "lots" else kind for shop, kind in zip(table["shop"], table["kind"], strict=True)
    ]
    fitted = fit(Estimator(LogisticRegression()), pa.table(table), "kind")
    assert set(fitted.models["solver"].to_pylist()) == {"scikit-learn"}, "there are three classes"
    found = fitted.predict(pa.table(table))
    assert found.column_names == [
        "prediction",
        *(f"probability of {name}" for name in ("few", "lots", "some")),
        "model",
    ]
    is_it = np.array(table["shop"]) == 2
    assert (found["probability of lots"].to_numpy()[is_it] == 0).all()
    total = sum(found[f"probability of {name}"].to_numpy() for name in ("few", "lots", "some"))
    np.testing.assert_allclose(total, 1.0)


def test_a_classifier_without_probabilities() -> None:
    table = shops()
    found = fit(Estimator(LinearSVC()), table, "many").predict(table)
    assert set(found["probability"].to_pylist()) == {0.0, 1.0}
    is_right = np.array(found["prediction"].to_pylist()) == np.array(table["many"].to_pylist())
    assert is_right.mean() > 0.75


class Fragile(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A mean that refuses large targets, as a fit or as a prediction."""

    def __init__(self, most: float = 100.0, at: str = "fit") -> None:
        self.most, self.at = most, at

    def fit(self, X: Any, y: Any) -> Fragile:
        if self.at == "fit" and y.max() > self.most:
            raise RuntimeError("too large a target\nand more")
        self.mean_ = y.mean()
        return self

    def predict(self, X: Any) -> np.ndarray:
        if self.at == "predict" and X.max() > self.most:
            raise RuntimeError("too large a feature")
        return np.full(len(X), self.mean_)


def test_an_estimator_that_fails_in_one_group() -> None:
    table = shops().to_pydict()
    table["sold"][table["shop"].index(3)] = 1000.0
    fitted = fit(Estimator(Fragile()), pa.table(table), "sold")
    rows = {row["shop"]: row for row in fitted.models.to_pylist()}
    assert (rows[3]["status"], rows[3]["error"]) == ("failed", "RuntimeError: too large a target")
    assert {row["status"] for shop, row in rows.items() if shop != 3} == {"ok"}
    assert {row["error"] for shop, row in rows.items() if shop != 3} == {None}
    found = fitted.predict(pa.table(table))["model"].to_pylist()
    assert {model for model, shop in zip(found, table["shop"], strict=True) if shop == 3} == {"none"}
    searched = fit(Estimator(Fragile(), most=Grid(100.0, 5000.0)), pa.table(table), "sold")
    assert searched.models["status"].to_pylist() == ["ok"] * 8, "the other configuration is chosen"
    assert searched.models["most"].to_pylist()[3] == 5000.0


def test_a_failure_of_a_prediction_is_a_warning() -> None:
    table = shops()
    fitted = fit(Estimator(Fragile(at="predict")), table, "sold")
    other = table.to_pydict()
    other["a"][other["shop"].index(2)] = 1000.0
    with pytest.warns(UserWarning, match="1 groups cannot be predicted.*too large a feature"):
        found = fitted.predict(pa.table(other))["prediction"]
    assert found.null_count == other["shop"].count(2)
    encoder = make_pipeline(OneHotEncoder(), Ridge())
    numbers = {**table.to_pydict(), **{name: np.arange(table.num_rows) for name in FEATURES}}
    with pytest.warns(UserWarning, match="Found unknown categories"):
        fit(Estimator(encoder, ridge__alpha=Grid(1, 2)), pa.table(numbers), "sold")


def test_neighbours_that_are_not_there() -> None:
    table = shops().sort_by("shop").slice(0, 43)
    fitted = fit(Estimator(KNeighborsRegressor(5)), table, "sold")
    assert fitted.models["status"].to_pylist() == ["ok", "failed"]
    assert "Expected n_neighbors <= n_samples" in fitted.models["error"].to_pylist()[1]


def test_seeds_are_functions_of_the_key() -> None:
    table = shops()
    spec = Estimator(make_pipeline(StandardScaler(), RandomForestRegressor(3)), seed=5)
    fitted = fit(spec, table, "sold")
    half = table.filter(pa.compute.greater(table["shop"], 4))
    found = fitted.predict(half)
    assert found.equals(fit(spec, half, "sold").predict(half))
    other = Estimator(spec.estimator, seed=6)
    assert not found.equals(fit(other, half, "sold").predict(half))
    seeds = {model.estimator[-1].random_state for model in fitted.records.coefficients[:, 0]}
    assert len(seeds) == 8
    assert spec.estimator[-1].random_state is None, "the given object stays as it is"


def test_a_grid_is_chosen_in_each_group() -> None:
    table = shops()
    fitted = fit(
        Estimator(DecisionTreeClassifier(), max_depth=Grid(1, 3, None), max_features=Grid("sqrt", 1.0)), table, "kind"
    )
    assert fitted.results.num_rows == 8 * 6
    assert set(fitted.results["max_features"].to_pylist()) == {"sqrt", "1.0"}
    chosen = fitted.results.filter(fitted.results["is chosen"])
    for row, model in zip(chosen.to_pylist(), fitted.records.coefficients[:, 0], strict=True):
        assert model.estimator.max_depth == row["max_depth"]
    ridge = fit(Estimator(Ridge(), alpha=Grid(0.1, 10_000)), table, "sold")
    assert ridge.models["alpha"].to_pylist().count(0.1) >= 6
    told = [model.estimator.alpha for model in ridge.records.coefficients[:, 0]]
    assert told == ridge.models["alpha"].to_pylist()


def test_missing_values_reach_estimators_that_take_them() -> None:
    table = shops().to_pydict()
    table["b"][table["shop"].index(1)] = None
    assert fit(Estimator(Ridge()), pa.table(table), "sold").models["status"].to_pylist().count("not finite") == 1
    fitted = fit(Estimator(HistGradientBoostingRegressor(max_iter=3)), pa.table(table), "sold")
    assert set(fitted.models["status"].to_pylist()) == {"ok"}
    assert fitted.predict(pa.table(table))["prediction"].null_count == 0
    table["b"][table["shop"].index(1)] = float("inf")
    assert fit(Estimator(fitted.model.estimator), pa.table(table), "sold").models["status"][1].as_py() == "not finite"  # type: ignore[attr-defined]


@pytest.mark.parametrize("estimator", [LogisticRegression(), SVC()], ids=repr)
def test_one_class_has_a_constant(estimator: Any) -> None:
    table = shops().to_pydict()
    table["many"] = ["yes" if shop == 1 else many for shop, many in zip(table["shop"], table["many"], strict=True)]
    fitted = fit(Estimator(estimator), pa.table(table), "many")
    assert fitted.models["status"][1].as_py() == "one class"
    found = fitted.predict(pa.table(table))["prediction"].to_pylist()
    assert {value for value, shop in zip(found, table["shop"], strict=True) if shop == 1} == {"yes"}


def test_an_estimator_that_does_not_converge() -> None:
    fitted = fit(Estimator(SGDRegressor(max_iter=1, tol=1e-9)), shops(), "sold")
    assert set(fitted.models["status"].to_pylist()) == {"not converged"}


def test_counts_below_zero_fail_alone() -> None:
    table = shops().to_pydict()
    table["count"][table["shop"].index(0)] = -1
    fitted = fit(Estimator(PoissonRegressor()), pa.table(table), "count")
    assert fitted.models["status"].to_pylist() == ["failed", *["ok"] * 7]
    assert fitted.models["error"].to_pylist()[0] == "ValueError: a target is less than 0"


def test_one_model_of_all_rows() -> None:
    table = shops()
    given = PoissonRegressor(alpha=0.5, tol=1e-10, max_iter=10_000)
    x, y = np.stack([table[name].to_numpy() for name in FEATURES], 1), table["count"].to_numpy()
    expected = given.fit(x, y).predict(x)
    unknown = table.set_column(0, "shop", pa.array(np.full(len(y), 99)))
    for spec in (Estimator(given), Poisson(l2=0.5, per_row=True)):
        found = fit(spec, table, "count", small=Small(fallback="global")).predict(unknown)
        assert set(found["model"].to_pylist()) == {"global"}
        np.testing.assert_allclose(found["prediction"].to_numpy(), expected, rtol=1e-5)
    with pytest.raises(GroupDataError, match="Cannot fit one model to the rows of all groups: RuntimeError"):
        fit(Estimator(Fragile(most=-9.0)), table, "sold", small=Small(fallback="global"))


def test_models_are_kept_by_pickle_and_not_by_save(tmp_path: Path) -> None:
    table = shops()
    fitted = fit(Estimator(RandomForestClassifier(3)), table, "kind")
    with pytest.raises(GroupDataError, match=r"Cannot save the models of Estimator.*joblib"):
        fitted.save(tmp_path / "shops.models")
    assert not list(tmp_path.iterdir())
    assert pickle.loads(pickle.dumps(fitted)).predict(table).equals(fitted.predict(table))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (lambda: Estimator(Ridge(), alfa=1), "did you mean 'alpha'"),
        (lambda: Estimator(Ridge), r"pass an object, Ridge\(\)"),
        (lambda: Estimator(StandardScaler()), "no classifier or regressor"),
        (lambda: Estimator(3), "Cannot fit int"),
    ],
)
def test_what_cannot_be_fitted_is_refused(spec: Any, said: str) -> None:
    with pytest.raises(GroupDataError, match=said):
        fit(spec(), shops(), "sold")


def test_too_many_classes_are_no_classes() -> None:
    table = pa.table(
        {"shop": np.zeros(2000, np.int64), **dict.fromkeys(FEATURES, np.zeros(2000)), "y": np.arange(2000)}
    )
    with pytest.raises(GroupDataError, match="Estimator needs 2 to 1000 classes, and there are more"):
        fit(Estimator(SVC()), table, "y")
