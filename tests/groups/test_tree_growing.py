"""Tests of trees that are grown by sums: the same for any partition of the rows, and as good as LightGBM's."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import lightgbm
import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import roc_auc_score

from offbeat.errors import PeerError
from offbeat.groups import Grid, Trees
from offbeat.groups.feature_bins import FeatureBins, common_bins
from offbeat.groups.fitting import BucketFit, BucketTask, GroupStatus
from offbeat.groups.search import configs
from offbeat.groups.summing import ordered, run_alone, run_together, unordered
from offbeat.groups.table_messages import table_message, text_stream, texts_in

if TYPE_CHECKING:
    from collections.abc import Sequence


def group_of(rows: int, seed: int = 0, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Features of many kinds, of which some are missing, and classes that depend on them."""
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(rows, 8))
    x[:, 3] = chance.integers(0, 4, rows)
    x[:, 4] = np.exp(3 * x[:, 4])
    x[:, 5] = 1.5
    x[:, 6] = np.where(chance.random(rows) < 0.6, -0.0, x[:, 6])
    margin = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + (x[:, 3] == 2) + 0.1 * np.log(x[:, 4])
    x[chance.random(rows) < 0.2 * (margin > 0), 7] = np.nan
    x[chance.random(rows) < 0.1, 0] = np.nan
    y = np.digitize(margin + chance.logistic(size=rows), np.linspace(-0.5, 1.0, classes)[:-1])
    return x, y.astype(np.float64)


def task_of(x: np.ndarray, y: np.ndarray, classes: int) -> BucketTask:
    return BucketTask(x, y, np.array([0, len(y)]), np.full(1, 1 << 63, np.uint64), classes)


def fit(spec: Trees, x: np.ndarray, y: np.ndarray, classes: int = 0, cuts: Sequence[int] = ()) -> list[BucketFit]:
    """Return the fit of each place, which has the rows between two cuts."""
    places = [task_of(x[begin:end], y[begin:end], classes) for begin, end in itertools.pairwise([0, *cuts, len(y)])]
    works = [spec.fit_summed(functools.partial(list, [place]), configs(spec)) for place in places]
    return run_together(works) if len(works) > 1 else [run_alone(works[0])]


SPECS = [
    (Trees("squared", rounds=6, min_data_in_leaf=3), 0),
    (Trees("log", rounds=6, lambda_l2=1.0, num_leaves=9), 2),
    (Trees("log", rounds=Grid(2, 5), num_leaves=Grid(4, 8), learning_rate=0.3, bagging_fraction=0.6), 2),
    (Trees("log", rounds=3, feature_fraction=0.5), 3),
    (Trees("poisson", rounds=6, max_bin=15), 0),
]


@pytest.mark.parametrize(("spec", "classes"), SPECS, ids=str)
@pytest.mark.parametrize("cuts", [[1], [0, 7, 500, 501]], ids=str)
def test_any_partition_gives_the_very_same_trees(spec: Trees, classes: int, cuts: list[int]) -> None:
    x, y = group_of(701, classes=max(2, classes))
    if not classes:
        y = y + np.abs(x[:, 1])
    (whole,) = fit(spec, x, y, classes)
    order = np.random.default_rng(1).permutation(len(y))
    for one in fit(spec, x[order], y[order], classes, cuts):
        assert one.coefficients.tolist() == whole.coefficients.tolist()
        np.testing.assert_allclose(one.losses, whole.losses, rtol=1e-12)
    for at, config in enumerate(configs(spec)):
        margins = config.margins(whole.coefficients[:, at], x, np.zeros(len(y), np.int64))
        assert config.loss_of(margins, y).mean() == pytest.approx(whole.losses[0, at], rel=1e-9), "the text tells it"
        assert whole.losses[0, at] < config.loss_of(np.zeros_like(margins), y).mean()


def test_trees_are_as_good_as_those_of_lightgbm() -> None:
    """Kingpin's measure: the area under the curve, of rows that were not trained on."""
    differences = []
    for seed in range(8):
        x, y = group_of(24_000, seed)
        (own,) = fit(spec := Trees("log", rounds=30), x[:4_000], y[:4_000], 2)
        parameters = {"objective": "binary", "verbosity": -1, "num_threads": 1, "seed": seed}
        other = lightgbm.train(parameters, lightgbm.Dataset(x[:4_000], y[:4_000]), 30)
        mine = spec.margins(own.coefficients[:, 0], x[4_000:], np.zeros(20_000, np.int64))
        differences.append(roc_auc_score(y[4_000:], mine) - roc_auc_score(y[4_000:], other.predict(x[4_000:])))
    print(f"AUC above LightGBM's: {np.mean(differences):+.5f} in the mean, {np.round(differences, 4)}")  # noqa: T201
    assert abs(np.mean(differences)) < 0.002


@pytest.mark.parametrize(("loss", "objective"), [("squared", "regression"), ("log", "binary"), ("poisson", "poisson")])
def test_with_few_distinct_values_trees_are_those_of_lightgbm(loss: str, objective: str) -> None:
    """Then bins are the same, and so are the trees, up to LightGBM's float32."""
    chance = np.random.default_rng(3)
    x = chance.integers(0, 9, (2_000, 4)).astype(np.float64)
    y = ((x[:, 0] > 3) ^ (x[:, 1] * 0.9 + chance.normal(size=2_000) > 4)).astype(np.float64)
    if loss != "log":
        y += chance.poisson(1 + x[:, 2])
    spec = Trees(loss, rounds=10, num_leaves=6, min_data_in_leaf=50, lambda_l2=2.0)
    (own,) = fit(spec, x, y, 2 * (loss == "log"))
    whole = spec.fit(task_of(x, y, 2 * (loss == "log")), [spec])
    found, expected = (spec.margins(one.coefficients[:, 0], x, np.zeros(len(y), np.int64)) for one in (own, whole))
    assert own.losses[0, 0] == pytest.approx(whole.losses[0, 0], rel=2e-3)
    assert np.corrcoef(found, expected)[0, 1] > 0.999


def test_leaves_have_as_many_rows_as_they_need() -> None:
    x, y = group_of(900)
    (made,) = fit(Trees("log", rounds=5, min_data_in_leaf=70), x, y, 2)
    frame = lightgbm.Booster(model_str=made.coefficients[0, 0, 0]).trees_to_dataframe()
    leaves = frame[frame["left_child"].isna()]
    assert leaves["count"].min() >= 70
    assert leaves.groupby("tree_index")["count"].sum().tolist() == [900] * 5
    booster = lightgbm.Booster(model_str=made.coefficients[0, 0, 0])
    where = np.asarray(booster.predict(x, pred_leaf=True))
    told = {
        int(name.split("L")[1]): n
        for name, n in zip(leaves["node_index"], leaves["count"], strict=True)
        if name.startswith("0-")
    }
    assert dict(enumerate(np.bincount(where[:, 0]))) == told, "the rows go where their sums were"


def test_what_is_missing_tells_the_class() -> None:
    x, y = group_of(400)
    x[:, 2] = np.where(y == 1, np.nan, 3.0)
    spec = Trees("log", rounds=20)
    for rows in (x, np.where(np.isnan(x), 0, x), -x):
        (made,) = fit(spec, rows, y, 2)
        found = spec.margins(made.coefficients[:, 0], rows, np.zeros(400, np.int64))
        assert ((found > 0) == y).all()


@pytest.mark.parametrize(
    ("y", "loss", "status", "predicted"),
    [
        (np.ones(30), "log", GroupStatus.ONE_CLASS, 34.5),
        (np.full(30, 7.0), "squared", GroupStatus.OK, 7.0),
        (np.full(30, np.nan), "squared", GroupStatus.NOT_FINITE, None),
        (np.zeros(30), "poisson", GroupStatus.FAILED, None),
        (np.zeros(0), "squared", GroupStatus.NO_ROWS, None),
    ],
)
def test_nothing_to_learn(y: np.ndarray, loss: str, status: GroupStatus, predicted: float | None) -> None:
    x = group_of(30)[0][: len(y)]
    for made in fit(spec := Trees(loss, rounds=5), x, y, 2 * (loss == "log"), [min(4, len(y))]):
        assert made.status[0] == status
        if predicted is None:
            assert made.coefficients[0, 0, 0] is None
        else:
            margins = spec.margins(made.coefficients[:, 0], x, np.zeros(30, np.int64))
            np.testing.assert_allclose(margins, predicted, rtol=1e-2)


def bins_of(x: np.ndarray, most: int, cuts: Sequence[int] = ()) -> list[FeatureBins]:
    parts = [x[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(x)])]
    return run_together([common_bins(part, most) for part in parts])


def test_few_values_have_a_bin_each() -> None:
    x = np.array([[5.0, 1.0], [1.0, np.nan], [2.0, np.nan], [-0.0, np.nan], [0.0, 1.0]] + [[5.0, 1.0]] * 500)
    for made in bins_of(x, 255, [2, 3]):
        assert made.edges[0].tolist() == [0.5, 1.5, 3.5]
        assert made.edges[1].tolist() == [np.finfo(np.float64).max]
        assert made.has_missing.tolist() == [False, True]
        places = made.places(x[:5]) - np.array([0, made.width])
        assert places.tolist() == [[3, 0], [1, 4], [2, 4], [0, 4], [0, 0]]


@pytest.mark.parametrize("most", [2, 16, 255])
def test_many_values_are_cut_at_quantiles(most: int) -> None:
    x = np.random.default_rng(0).lognormal(sigma=4, size=(5_100, 1)) * np.array([1.0, -1.0])
    x[:100, 1] = np.nan
    (made, *_) = found = bins_of(x, most, [1_000])
    assert all(np.array_equal(one.edges[0], made.edges[0]) for one in found)
    counts = np.bincount(made.places(x)[:, 0])
    assert len(counts) == most
    assert counts.max() - counts.min() <= 1
    assert len(np.unique(made.places(x)[:, 1])) == most


def test_texts_of_another_worker_are_checked() -> None:
    texts = np.array([["a"], [None], ["\u00e4\n"]], object)
    stream = text_stream(texts)
    assert texts_in(stream, (3, 1)).tolist() == texts.tolist()
    with pytest.raises(PeerError, match="there are 3, and not 2"):
        texts_in(stream, (2, 1))
    numbers = table_message(pa.table({"text": [1, 2, 3]}))["table"].numpy()
    for damaged in (stream[:-300], stream[:0], np.zeros(64, np.uint8), numbers):
        with pytest.raises(PeerError, match="Cannot read a table of another worker"):
            texts_in(damaged, (3, 1))


def test_whole_numbers_are_in_the_order_of_values() -> None:
    values = np.array([-np.inf, -2.0, -1e-300, 0.0, 1e-300, 3.0, np.inf])
    assert (np.diff(ordered(values).astype(object)) > 0).all()
    np.testing.assert_array_equal(unordered(ordered(values)), values)
