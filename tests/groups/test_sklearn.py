"""Tests of the estimators that have a model for each group: what scikit-learn expects, and what scikit-lego does."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pandas
import polars
import pytest
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import FitFailedWarning
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor
from sklearn.utils.estimator_checks import check_estimator

from offbeat.groups.sklearn import GroupedClassifier, GroupedRegressor

ESTIMATORS = [
    GroupedClassifier(LogisticRegression()),
    GroupedClassifier(DecisionTreeClassifier(random_state=0)),
    GroupedRegressor(Ridge()),
    GroupedRegressor(DecisionTreeRegressor(random_state=0)),
    GroupedRegressor(LinearRegression(), shrinkage="equal"),
]
NOT_FOR_KEYS = {
    "check_estimators_nan_inf": "the column that is not finite is a key, and keys may be missing",
    "check_dtype_object": "the column that holds a dictionary is a key, which is refused in other words",
    "check_fit2d_1feature": "the only column is the key, so there is no feature",
}


def check(estimator: Any, expected: dict[str, str]) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks' own
        return list(check_estimator(estimator, on_skip=None, on_fail=None, expected_failed_checks=expected))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize("groups", [None, [0]], ids=["all rows", "by a column"])
def test_the_checks_of_scikit_learn(estimator: Any, groups: Any) -> None:
    exceptions = {} if groups is None else NOT_FOR_KEYS
    found = check(clone(estimator).set_params(groups=groups), exceptions)
    assert len(found) > 45
    failed = {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}
    assert not failed
    assert {one["check_name"] for one in found if one["status"] == "xfail"} == set(exceptions)


def frame(seed: int = 0) -> tuple[Any, np.ndarray, np.ndarray]:
    """Rows of stores in two countries, with a number and classes to predict."""
    chance = np.random.default_rng(seed)
    country = chance.choice(["DE", "FR"], 300)
    store = chance.choice(["north", "south", "west"], 300)
    x = chance.normal(size=(300, 2))
    slope = np.where(country == "DE", 1.0, -1.0) + np.where(store == "north", 0.5, 0.0)
    y = slope * x[:, 0] + x[:, 1] + 0.3 * chance.normal(size=300)
    made = pandas.DataFrame({"country": country, "a": x[:, 0], "store": store, "b": x[:, 1]})
    return made, y, np.array(["few", "some", "many"])[np.digitize(y, [-0.7, 0.7])]


def groups_of(X: Any, by: list[str]) -> list[tuple[Any, np.ndarray]]:
    return sorted((key, np.sort(rows)) for key, rows in X.groupby(by).indices.items())


@pytest.mark.parametrize("inner", [LinearRegression(), RandomForestRegressor(5, random_state=1)], ids=repr)
def test_a_regressor_is_a_loop_over_groups(inner: Any) -> None:
    X, y, _ = frame()
    model = GroupedRegressor(inner, groups=["country", "store"]).fit(X, y)
    found = model.predict(X)
    for key, rows in groups_of(X, ["country", "store"]):
        part = X.loc[rows, ["a", "b"]]
        expected = clone(inner).fit(part, y[rows])
        np.testing.assert_allclose(found[rows], expected.predict(part), rtol=1e-8)
        np.testing.assert_allclose(model.estimators_[tuple(key)].predict(part), expected.predict(part), rtol=1e-8)
    assert model.score(X, y) > 0.8
    assert model.groups_ == sorted(model.estimators_)


@pytest.mark.parametrize("inner", [LogisticRegression(tol=1e-8), RandomForestClassifier(5, random_state=1)], ids=repr)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_is_a_loop_over_groups(inner: Any, classes: int) -> None:
    X, _, y = frame()
    y = np.where(y == "some", "few", y) if classes == 2 else y
    y[X["store"] == "west"] = "few"
    y[(X["store"] == "south") & (y == "many")] = "few"
    model = GroupedClassifier(inner, groups=["store", "country"]).fit(X, y)
    found, labels = model.predict_proba(X), model.predict(X)
    assert (model.classes_ == np.unique(y)).all()
    np.testing.assert_allclose(found.sum(1), 1.0)
    for _, rows in groups_of(X, ["store", "country"]):
        part = X.loc[rows, ["a", "b"]]
        if len(set(y[rows])) == 1:
            assert set(labels[rows]) == set(y[rows])
            continue
        expected = clone(inner).fit(part, y[rows])
        places = np.searchsorted(model.classes_, expected.classes_)
        np.testing.assert_allclose(found[np.ix_(rows, places)], expected.predict_proba(part), atol=1e-4)
        assert (labels[rows] == expected.predict(part)).mean() > 0.98


def test_scores_of_classes() -> None:
    X, _, y = frame()
    y[X["store"] == "west"] = "few"
    y[(X["store"] == "south") & (y == "many")] = "few"
    model = GroupedClassifier(SVC(), groups=["store"]).fit(X[["a", "b", "store"]], y)
    found = model.decision_function(X[["a", "b", "store"]])
    assert found.shape == (300, 3)
    assert (model.classes_[found.argmax(1)] == model.predict(X[["a", "b", "store"]])).mean() > 0.98
    assert not hasattr(model, "predict_proba")
    two = GroupedClassifier(SVC(), groups="store").fit(X[["a", "b", "store"]], np.where(y == "some", "few", y))
    found = two.decision_function(X[["a", "b", "store"]])
    assert found.shape == (300,)
    assert (two.classes_[(found > 0).astype(int)] == two.predict(X[["a", "b", "store"]])).all()


def test_groups_that_are_not_known() -> None:
    X, y, _ = frame()
    X = X.drop(columns="country")
    new = X.assign(store="east")
    model = GroupedRegressor(LinearRegression(), groups="store").fit(X, y)
    expected = LinearRegression().fit(X[["a", "b"]], y).predict(X[["a", "b"]])
    np.testing.assert_allclose(model.predict(new), expected)
    alone = GroupedRegressor(LinearRegression(), groups="store", use_global_model=False).fit(X, y)
    assert alone.fallback_ is None
    with pytest.raises(ValueError, match=r"Cannot predict for the group \('east',\)"):
        alone.predict(new)


def test_missing_keys_are_keys() -> None:
    X, y, _ = frame()
    X.loc[X["store"] == "west", "store"] = None
    model = GroupedRegressor(LinearRegression(), groups=["store"], use_global_model=False).fit(
        X.drop(columns="country"), y
    )
    assert sorted(map(str, model.estimators_)) == ["('north',)", "('south',)", "(None,)"]


class TestShrinkage:
    """Predictions of all levels are averaged; the weights are scikit-lego's, worked out by hand for each rule."""

    SIZES = (300, 157, 61)

    def data(self) -> tuple[Any, np.ndarray]:
        X, y, _ = frame()
        order = np.r_[np.arange(61), np.arange(61) + 61, np.arange(35) + 122, np.arange(143) + 157]
        X["country"], X["store"] = ["DE"] * 157 + ["FR"] * 143, ["north"] * 61 + ["south"] * 61 + ["west"] * 178
        return X.iloc[order], y

    @pytest.mark.parametrize(
        ("shrinkage", "weights"),
        [
            ({"shrinkage": "constant", "alpha": 0.25}, [0.0625, 0.1875, 0.75]),
            ({"shrinkage": "relative"}, [300 / 518, 157 / 518, 61 / 518]),
            ({"shrinkage": "min_n_obs", "min_n_obs": 100}, [0, 1, 0]),
            ({"shrinkage": "min_n_obs", "min_n_obs": 61}, [0, 0, 1]),
            ({"shrinkage": "equal"}, [1 / 3, 1 / 3, 1 / 3]),
            ({"shrinkage": lambda sizes: 1 / np.asarray(sizes)}, None),
        ],
        ids=["constant", "relative", "country", "store", "equal", "function"],
    )
    @pytest.mark.parametrize("inner", [Ridge(), DecisionTreeRegressor(max_depth=2, random_state=0)], ids=repr)
    def test_weights(self, shrinkage: dict[str, Any], weights: list[float] | None, inner: Any) -> None:
        X, y = self.data()
        model = clone(GroupedRegressor(inner, groups=["country", "store"], **shrinkage)).fit(X, y)
        rows = np.arange(61)
        parts = [np.arange(300), np.arange(157), rows]
        levels = [clone(inner).fit(X[["a", "b"]].iloc[at], y[at]).predict(X[["a", "b"]].iloc[rows]) for at in parts]
        if weights is None:
            weights = [1 / size / sum(1 / other for other in self.SIZES) for size in self.SIZES]
        expected = sum(weight * level for weight, level in zip(weights, levels, strict=True))
        np.testing.assert_allclose(model.predict(X)[rows], expected, rtol=1e-8)
        assert set(model.estimators_) >= {(), ("DE",), ("DE", "north")}

    def test_a_new_store_of_a_known_country(self) -> None:
        X, y = self.data()
        model = GroupedRegressor(Ridge(), groups=["country", "store"], shrinkage="equal").fit(X, y)
        new = X.iloc[:1].assign(store="east")
        expected = [model.estimators_[key].predict(new[["a", "b"]]) for key in [(), ("DE",)]]
        np.testing.assert_allclose(model.predict(new), np.mean(expected, 0))
        alone = model.set_params(use_global_model=False).fit(X, y)
        np.testing.assert_allclose(alone.predict(new), expected[1])
        with pytest.raises(ValueError, match="not there in `fit`"):
            alone.predict(new.assign(country="IT"))

    @pytest.mark.parametrize(
        ("shrinkage", "said"),
        [
            ({"shrinkage": "constant"}, "alpha=None: name a number"),
            ({"shrinkage": "min_n_obs"}, "min_n_obs=20"),
            ({"shrinkage": "much"}, "name one of constant, relative"),
            ({"shrinkage": "min_n_obs", "min_n_obs": 1000}, "the largest 300"),
        ],
    )
    def test_rules_that_cannot_be(self, shrinkage: dict[str, Any], said: str) -> None:
        X, y = self.data()
        with pytest.raises(ValueError, match=said):
            GroupedRegressor(Ridge(), groups=["country", "store"], **shrinkage).fit(X, y).predict(X)

    def test_classes_are_not_averaged(self) -> None:
        X, _, y = frame()
        with pytest.raises(ValueError, match="Cannot shrink a classification"):
            GroupedClassifier(LogisticRegression(), groups="store", shrinkage="equal").fit(X, y)  # type: ignore[arg-type]


def test_a_group_that_fails_is_predicted_by_the_model_of_all_rows() -> None:
    X, y, _ = frame()
    X = X.drop(columns="country")
    inner = make_pipeline(FunctionTransformer(refuse_far), LinearRegression())
    X.loc[X.index[X["store"] == "south"][0], "a"] = 1000.0
    alone = GroupedRegressor(inner, groups="store", use_global_model=False)
    with pytest.raises(ValueError, match=r"Cannot fit the group \('south',\): RuntimeError: far"):
        alone.fit(X, y)
    model = GroupedRegressor(make_pipeline(FunctionTransformer(refuse_small), LinearRegression()), groups="store")
    X = X.drop(index=X.index[X["store"] == "south"][3:])
    y = y[X.index]
    with pytest.warns(FitFailedWarning, match=r"1 of 3 groups cannot be fitted.*\('south',\): RuntimeError: small"):
        model.fit(X, y)
    assert set(model.estimators_) == {("north",), ("west",)}
    part = X[["a", "b"]]
    np.testing.assert_allclose(model.predict(X.assign(store="south")), model.fallback_.predict(part))


def refuse_far(X: Any) -> Any:
    if np.abs(np.asarray(X)).max() > 100:
        raise RuntimeError("far")
    return X


def refuse_small(X: Any) -> Any:
    if len(X) < 4:
        raise RuntimeError("small")
    return X


def test_columns_of_frames_reach_the_estimator() -> None:
    X, y, _ = frame()
    inner = make_pipeline(make_column_transformer((StandardScaler(), ["b"]), (OneHotEncoder(), ["country"])), Ridge())
    model = GroupedRegressor(inner, groups="store", check_X=False).fit(X, y)
    rows = np.flatnonzero(X["store"] == "west")
    expected = clone(inner).fit(X.iloc[rows], y[rows]).predict(X.iloc[rows])
    np.testing.assert_allclose(model.predict(X)[rows], expected)
    with pytest.raises(ValueError, match="could not convert string"):
        GroupedRegressor(inner, groups="store").fit(X, y)


def test_polars_and_arrays_give_the_same() -> None:
    X, y, classes = frame()
    for inner, target in ((Ridge(), y), (DecisionTreeRegressor(random_state=0), y)):
        model = GroupedRegressor(inner, groups=["country", "store"])
        expected = clone(model).fit(X, target).predict(X)
        table = polars.DataFrame(X.to_dict("list"))
        np.testing.assert_allclose(clone(model).fit(table, target).predict(table), expected, rtol=1e-9)
        array = X.to_numpy(dtype=object)
        found = GroupedRegressor(inner, groups=[0, 2]).fit(array, target).predict(array)
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    category = X.astype({"store": "category"})
    found = GroupedClassifier(LogisticRegression(), groups=["store", "country"]).fit(category, classes)
    assert (found.predict(category) == found.predict(X)).all(), "categories are their values"


def test_a_pipeline_of_frames_and_a_search() -> None:
    X, y, _ = frame()
    scale = make_column_transformer(
        (StandardScaler(), ["a", "b"]), remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    pipeline = make_pipeline(scale, GroupedRegressor(Ridge(), groups=["country", "store"]))
    search = GridSearchCV(pipeline, {"groupedregressor__estimator__alpha": [1e-3, 1e5]}, cv=3).fit(X, y)
    assert search.best_params_ == {"groupedregressor__estimator__alpha": 1e-3}
    assert search.score(X, y) > 0.8
    best = search.best_estimator_[-1]
    assert list(best.feature_names_in_) == ["a", "b", "country", "store"]
    again = pickle.loads(pickle.dumps(search))
    np.testing.assert_array_equal(again.predict(X), search.predict(X))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda X, y: GroupedRegressor(LogisticRegression()).fit(X[["a", "b"]], y), "it is no regressor"),
        (lambda X, y: GroupedClassifier(Ridge()).fit(X[["a", "b"]], y > 0), "it is no classifier"),
        (
            lambda X, y: GroupedRegressor(Ridge(), groups="shop").fit(X, y),
            "Cannot group by 'shop': columns are country, a",
        ),
        (lambda X, y: GroupedRegressor(Ridge(), groups=7).fit(X[["a"]].to_numpy(), y), "there are 1 without names"),
        (lambda X, y: GroupedRegressor(Ridge(), groups="store").fit(X, y), "could not convert string to float"),
    ],
)
def test_what_cannot_be_fitted_is_refused(make: Any, said: str) -> None:
    X, y, _ = frame()
    with pytest.raises(ValueError, match=said):
        make(X, y)


def test_no_feature_is_needed() -> None:
    X, y, _ = frame()
    model = GroupedRegressor(DummyRegressor(), groups="store").fit(X[["store"]], y)
    assert len(set(model.predict(X[["store"]]))) == 3
