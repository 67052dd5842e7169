"""Tests of boosted trees for groups: LightGBM's own, group by group, whatever is shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightgbm
import numpy as np
import pyarrow as pa
import pytest

from offbeat.groups import FittedGroups, Grid, GroupDataError, Small, ThisProcess, Trees
from offbeat.groups.search import configs
from tests.groups.test_estimator import fit, parts_of, shops

if TYPE_CHECKING:
    from pathlib import Path

LOSSES = [("squared", "sold", "regression"), ("log", "many", "binary"), ("log", "kind", "multiclass")]
LOSSES += [("poisson", "count", "poisson")]


def texts(fitted: FittedGroups) -> list[str]:
    return list(fitted.records.coefficients[:, 0])


@pytest.mark.parametrize(("loss", "target", "objective"), LOSSES, ids=[name for _, _, name in LOSSES])
def test_a_loop_over_lightgbm_predicts_the_same(loss: str, target: str, objective: str) -> None:
    table = shops()
    classes = np.unique(table[target].to_numpy())
    spec = Trees(loss=loss, rounds=12, learning_rate=0.2, num_leaves=5, min_data_in_leaf=4, lambda_l2=0.5)
    found = fit(spec, table, target).predict(table)
    parameters = {
        "objective": objective,
        "learning_rate": 0.2,
        "num_leaves": 5,
        "min_data_in_leaf": 4,
        "lambda_l2": 0.5,
    }
    parameters |= {"verbosity": -1, "num_threads": 1}
    if objective == "multiclass":
        parameters["num_class"] = 3
    for _, x, y, rows in parts_of(table, target):
        y = np.searchsorted(classes, y) if loss == "log" else y
        expected = lightgbm.train(parameters, lightgbm.Dataset(x, y), 12).predict(x)
        if objective == "multiclass":
            told = np.stack([found[f"probability of {name}"].to_numpy() for name in classes], 1)[rows]
        else:
            told = found["probability" if loss == "log" else "prediction"].to_numpy()[rows]
        np.testing.assert_allclose(told, expected, rtol=1e-9)


@pytest.mark.parametrize("bagging", [1.0, 0.6])
def test_what_configurations_share_changes_nothing(bagging: float) -> None:
    table = shops()
    grids = {"rounds": (3, 9), "num_leaves": (2, 31, 63), "learning_rate": (0.1, 0.5)}
    spec = Trees(
        rounds=Grid(*grids["rounds"]),
        num_leaves=Grid(*grids["num_leaves"]),
        learning_rate=Grid(*grids["learning_rate"]),
        bagging_fraction=bagging,
        feature_fraction=bagging,
    )
    fitted = fit(spec, table, "sold")
    assert fitted.results.num_rows == 8 * 12
    every = configs(spec)
    for group, x, y, _ in parts_of(table, "sold"):
        task = _task(x, y, fitted.index.hashes[group])
        together = spec.fit(task, every).coefficients[0, :, 0]
        alone = [spec.fit(task, [config]).coefficients[0, 0, 0] for config in every]
        assert list(map(_trees, together)) == list(map(_trees, alone))
        assert len(set(map(_trees, together))) == 8, "63 leaves are no more than 31 in so few rows"


def test_a_shared_model_is_that_of_its_own_parameters() -> None:
    """More leaves than the rows allow, and fewer rounds, are what LightGBM makes of them."""
    _, x, y, _ = next(iter(parts_of(shops(), "sold")))
    spec = Trees(rounds=Grid(4, 9), num_leaves=Grid(15, 40), min_data_in_leaf=4)
    found = spec.fit(_task(x, y, np.uint64(1)), configs(spec))
    for at, (rounds, leaves) in enumerate([(4, 15), (4, 40), (9, 15), (9, 40)]):
        parameters = {"num_leaves": leaves, "min_data_in_leaf": 4, "verbosity": -1, "num_threads": 1}
        expected = lightgbm.train(parameters, lightgbm.Dataset(x, y), rounds).predict(x)
        margins = spec.margins(found.coefficients[:, at], x, np.zeros(len(x), np.int64))
        np.testing.assert_allclose(margins, expected, rtol=1e-9)
        assert found.steps[0, at] == rounds
        assert found.losses[0, at] == pytest.approx(np.square(expected - y).mean() / 2)


def _task(x: np.ndarray, y: np.ndarray, key: Any) -> Any:
    from offbeat.groups.fitting import BucketTask

    return BucketTask(x, y, np.array([0, len(y)]), np.array([key], np.uint64))


def _trees(text: str) -> str:
    """A model's trees, without the parameters."""
    return text[text.index("Tree=0") : text.index("end of trees")]


def test_what_is_drawn_depends_on_key_and_seed_alone() -> None:
    table = shops()
    spec = Trees(rounds=5, bagging_fraction=0.5, feature_fraction=0.7, seed=3)
    fitted = fit(spec, table, "sold")
    half = table.filter(pa.compute.greater(table["shop"], 3))
    assert texts(fit(spec, half, "sold")) == texts(fitted)[4:]
    small = fit(spec, table, "sold", executor=ThisProcess(bucket_bytes=4096))
    assert texts(small) == texts(fitted)
    other = fit(Trees(rounds=5, bagging_fraction=0.5, feature_fraction=0.7, seed=4), table, "sold")
    assert all(map(str.__ne__, map(_trees, texts(other)), map(_trees, texts(fitted))))


def test_small_groups_have_small_leaves() -> None:
    table = shops().sort_by("shop").slice(0, 43)  # 40 rows of the first shop, 3 of the second
    fitted = fit(Trees(rounds=20), table, "sold")
    assert fitted.models["status"].to_pylist() == ["ok", "ok"]
    found = fitted.predict(table)["prediction"].to_numpy()
    sold = table["sold"].to_numpy()
    assert np.corrcoef(found[:40], sold[:40])[0, 1] > 0.9, "LightGBM's 20 rows of a leaf would allow one split"
    assert [Trees().in_group(rows).min_data_in_leaf for rows in (3, 40, 199, 200, 10_000)] == [1, 4, 19, 20, 20]


def test_missing_values_are_values() -> None:
    table = shops().to_pydict()
    is_high = np.array(table["sold"]) > 0
    table["b"] = [None if high else value for high, value in zip(is_high, table["b"], strict=True)]
    fitted = fit(Trees(loss="log", rounds=20), pa.table(table), "many")
    assert set(fitted.models["status"].to_pylist()) == {"ok"}
    found = np.array(fitted.predict(pa.table(table))["prediction"].to_pylist())
    assert (found == np.array(table["many"])).mean() == 1.0, "what is missing tells the class"
    table["b"][table["shop"].index(5)] = float("inf")
    assert fit(Trees(), pa.table(table), "sold").models["status"].to_pylist().count("not finite") == 1


def test_classes_that_a_group_lacks() -> None:
    table = shops().to_pydict()
    kinds = {2: ("lots", "few"), 4: ("lots", "few", "some")}
    table["kind"] = [
        "few" if kind in kinds.get(shop, ())[: 3 if shop == 4 else 1] else kind
        for shop, kind in zip(table["shop"], table["kind"], strict=True)
    ]
    fitted = fit(Trees(loss="log", rounds=10), pa.table(table), "kind", small=Small(fallback="global"))
    assert fitted.models["status"].to_pylist() == ["ok"] * 4 + ["one class"] + ["ok"] * 3
    found, shop = fitted.predict(pa.table(table)), np.array(table["shop"])
    assert found["probability of lots"].to_numpy()[shop == 2].max() < 1e-6
    assert set(np.array(found["prediction"].to_pylist())[shop == 4]) == {"few"}
    table["shop"] = [99] * len(shop)
    everywhere = fitted.predict(pa.table(table))
    assert set(everywhere["model"].to_pylist()) == {"global"}
    assert (np.array(everywhere["prediction"].to_pylist()) == np.array(table["kind"])).mean() > 0.6


def test_one_of_two_classes() -> None:
    table = shops().to_pydict()
    table["many"] = ["yes" if shop == 1 else many for shop, many in zip(table["shop"], table["many"], strict=True)]
    fitted = fit(Trees(loss="log", rounds=10), pa.table(table), "many")
    assert fitted.models["status"].to_pylist()[:2] == ["ok", "one class"]
    found = np.array(fitted.predict(pa.table(table))["prediction"].to_pylist())
    assert set(found[np.array(table["shop"]) == 1]) == {"yes"}


def test_counts_that_cannot_be() -> None:
    table = shops().to_pydict()
    table["count"][table["shop"].index(6)] = -1
    fitted = fit(Trees(loss="poisson", rounds=3), pa.table(table), "count")
    assert fitted.models["status"].to_pylist() == [*["ok"] * 6, "failed", "ok"]
    assert fitted.models["error"].to_pylist()[6] == "a target is less than 0, or all are 0"


def test_trees_are_saved_as_text(tmp_path: Path) -> None:
    table = shops()
    spec = Trees(loss="log", rounds=Grid(3, 8), min_data_in_leaf=Grid(None, 2))
    fitted = fit(spec, table, "kind", small=Small(50, "global"))
    fitted.save(tmp_path / "shops.models")
    found = FittedGroups.load(tmp_path / "shops.models")
    assert found.model == spec
    assert texts(found) == texts(fitted)
    assert texts(fitted)[0] is None
    assert texts(fitted)[5].startswith("tree\nversion=v4")
    assert found.models.equals(fitted.models)
    assert found.predict(table).equals(fitted.predict(table))
    found.records.coefficients[5, 0] = "tree\nof another kind"
    with pytest.raises(GroupDataError, match="Cannot read the trees of a group"):
        found.predict(table)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (lambda: Trees(loss="much"), "Cannot minimize the loss 'much'"),
        (lambda: Trees(max_bin=Grid(15, 255)), "Cannot search in `max_bin`"),  # type: ignore[arg-type]
        (lambda: Trees(rounds=0), "rounds=0: name a whole number that is 1"),
        (lambda: Trees(num_leaves=1.5), "num_leaves=1.5: name a whole number that is 2"),  # type: ignore[arg-type]
        (lambda: Trees(bagging_fraction=1.5), "bagging_fraction=1.5: name a number above 0 and up to 1"),
        (lambda: Trees(learning_rate=0), "learning_rate=0: name a number above 0"),
        (lambda: Trees(lambda_l2=-1), "lambda_l2=-1: name a number that is 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(spec: Any, said: str) -> None:
    with pytest.raises(GroupDataError, match=said):
        fit(spec(), shops(), "sold")
