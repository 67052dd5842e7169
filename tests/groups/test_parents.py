"""Tests of groups that learn from the groups around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from offbeat.groups import (
    FittedGroups,
    Grid,
    GroupDataError,
    GroupedTrainer,
    Linear,
    Logistic,
    Poisson,
    Pooled,
    Processes,
    RandomSearch,
    Small,
    ThisProcess,
    Uniform,
)

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.groups.glm import Glm
    from offbeat.groups.this_process import Executor

BY = ["country", "city", "shop"]


def shops(seed: int = 0) -> pa.Table:
    """Two countries, each with two cities, each with three shops of which the last has three rows."""
    chance = np.random.default_rng(seed)
    sizes = np.tile([40, 30, 3], 4)
    shop = chance.permutation(np.repeat(np.arange(12), sizes))
    city, country = shop // 3, shop // 6
    price = chance.normal(size=len(shop))
    sold = (1 + country + 0.1 * city) * price + city + 0.1 * chance.normal(size=len(shop))
    words = [np.array(["DE", "FR"])[country], np.array(["B", "M", "L", "P"])[city], shop % 3]
    return pa.table([*words, price, sold], names=[*BY, "price", "sold"])


def fit(table: pa.Table, folder: Path | None = None, **more: Any) -> FittedGroups:
    settings: dict[str, Any] = {"model": Linear(l2=1.0), "by": BY, "small": Small(10, "parent"), **more}
    return GroupedTrainer(target="sold", features=["price"], **settings).fit(table, folder=folder)


def asked(*keys: tuple[str, str, int | None]) -> pa.Table:
    return pa.table([*zip(*keys, strict=True), [0.5] * len(keys)], names=[*BY, "price"])


def test_the_nearest_parent_with_a_model_predicts() -> None:
    table = shops()
    fitted = fit(table)
    rows = asked(("DE", "B", 0), ("DE", "B", 2), ("FR", "P", 99), ("FR", "X", 0), ("US", "B", 0), ("FR", "B", 1))
    found = fitted.predict(rows)
    words = ["group", "parent city", "parent city", "parent country", "global", "parent country"]
    assert found["model"].to_pylist() == words
    by_country, by_city = (fit(table, by=BY[:count]) for count in (1, 2))
    assert found["prediction"][1:3].equals(by_city.predict(rows)["prediction"][1:3]), "fitted to all its shops' rows"
    assert found["prediction"][3].as_py() == by_country.predict(rows)["prediction"][3].as_py()
    of_all = fit(table, small=Small(10, "global")).predict(rows)["prediction"][4].as_py()
    assert found["prediction"][4].as_py() == of_all


def test_a_small_parent_is_passed_over() -> None:
    found = fit(shops(), small=Small(75, "parent")).predict(asked(("DE", "B", 2), ("US", "B", 2)))
    assert found["model"].to_pylist() == ["parent country", "global"], "a city has 73 rows"


def test_a_missing_value_of_one_child_is_left_out_of_its_parent() -> None:
    table = shops()
    prices = table["price"].to_numpy().copy()
    at = next(at for at, row in enumerate(table.to_pylist()) if (row["city"], row["shop"]) == ("B", 0))
    prices[at] = np.nan
    changed = table.set_column(3, "price", pa.array(prices))
    found = fit(changed).predict(asked(("DE", "B", 0)))
    assert found["model"].to_pylist() == ["parent city"]
    rest = table.take(np.delete(np.arange(table.num_rows), at))
    assert found["prediction"].equals(fit(rest, by=BY[:2]).predict(asked(("DE", "B", 0)))["prediction"])


def test_of_two_columns_there_is_one_parent_and_of_one_all_rows() -> None:
    two = fit(shops(), by=["country", "shop"]).predict(asked(("DE", "B", 9), ("US", "B", 9)))
    assert two["model"].to_pylist() == ["parent", "global"]
    one = fit(shops(), by="country").predict(asked(("US", "B", 9)))
    assert one["model"].to_pylist() == ["global"]


@pytest.mark.parametrize("executor", [ThisProcess(bucket_bytes=2000), Processes(2, bucket_bytes=2000)])
def test_parents_are_searched_and_fitted_by_any_executor(executor: Executor) -> None:
    model, rows = Linear(l2=Grid(0.1, 100.0)), asked(("DE", "B", 2), ("FR", "X", 0), ("US", "X", 0))
    alone = fit(shops(), model=model).predict(rows)
    np.testing.assert_allclose(
        fit(shops(), model=model, executor=executor).predict(rows)["prediction"].to_numpy(),
        alone["prediction"].to_numpy(),
        rtol=1e-12,
    )


def test_parents_are_saved(tmp_path: Path) -> None:
    fitted = fit(shops())
    fitted.save(tmp_path / "shops.models")
    found = FittedGroups.load(tmp_path / "shops.models")
    rows = asked(("DE", "B", 0), ("DE", "B", 2), ("FR", "X", 0), ("US", "B", 0))
    assert found.predict(rows).equals(fitted.predict(rows))


def test_an_ended_fit_keeps_its_parents(tmp_path: Path) -> None:
    rows = asked(("DE", "B", 2), ("FR", "X", 0))
    first = fit(shops(), folder=tmp_path / "fit").predict(rows)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "fit").rglob("*.npz")}
    assert {path.parent.name for path in written} == {"fit", "parents 1", "parents 2"}
    assert fit(shops(), folder=tmp_path / "fit").predict(rows).equals(first)
    assert written == {path: path.stat().st_mtime_ns for path in written}, "nothing is fitted again"


def test_an_unknown_fallback_is_refused() -> None:
    with pytest.raises(GroupDataError, match="'parent' or 'raise'"):
        Small(fallback="mother")


def small_stores(rows: int, stores: int = 60, seed: int = 0) -> tuple[pa.Table, pa.Table]:
    """Stores of three countries, close to their country's model in eight features; rows to fit, and others."""
    chance = np.random.default_rng(seed)
    names = [f"x{number}" for number in range(8)]
    country = np.arange(stores) % 3
    weights = chance.normal(size=(3, 9))[country] + 0.2 * chance.normal(size=(stores, 9))
    made = []
    for count in (rows, 200):
        store = np.repeat(np.arange(stores), count)
        x = chance.normal(size=(len(store), 8))
        margins = (x * weights[store, :8]).sum(1) + weights[store, 8]
        columns = [country[store], store, *x.T, margins + chance.normal(size=len(store))]
        columns += [(chance.uniform(size=len(store)) < 1 / (1 + np.exp(-margins))).astype(np.int64)]
        columns += [chance.poisson(np.exp(0.3 * margins))]
        made.append(pa.table(columns, names=["country", "store", *names, "linear", "logistic", "poisson"]))
    return made[0], made[1]


def fit_stores(model: Glm, table: pa.Table, **more: Any) -> FittedGroups:
    settings: dict[str, Any] = {
        "by": ["country", "store"],
        "target": model.family.name,
        "features": [f"x{number}" for number in range(8)],
        "small": Small(fallback="parent"),
        **more,
    }
    return GroupedTrainer(model, **settings).fit(table)


@pytest.mark.parametrize("spec", [Linear, Logistic, Poisson])
@pytest.mark.parametrize("settings", [{}, {"standardize": True}, {"l2": 0.0}, {"per_row": True, "l2": 0.1}])
def test_a_shrunk_model_has_the_least_objective(spec: type[Glm], settings: dict[str, Any]) -> None:
    """Countries are shrunk toward the model of all rows, and stores toward their country's."""
    minimize = pytest.importorskip("scipy.optimize").minimize
    table, _ = small_stores(20, stores=9)
    model = spec(shrink=3.0, **settings)
    fitted = fit_stores(model, table)
    family, columns = model.family, np.stack([table[f"x{number}"].to_numpy() for number in range(8)], 1)
    target, stores = table[family.name].to_numpy(), table["store"].to_numpy()
    (level,) = fitted._made.parents
    for parent, own, rows in [
        (fitted.records.fallback, level.coefficients[1], stores % 3 == 1),
        (level.coefficients[1], fitted.records.coefficients[4], stores == fitted.models["store"][4].as_py()),
    ]:
        x, y = columns[rows], target[rows]
        mean, scale = (x.mean(0), x.std(0)) if model.standardize else (np.zeros(8), np.ones(8))
        x = np.column_stack([(x - mean) / scale, np.ones(len(x))])
        l2 = float(model.l2) * (len(x) if model.per_row else 1)  # type: ignore[arg-type]

        def scaled(w: np.ndarray, mean: np.ndarray = mean, scale: np.ndarray = scale) -> np.ndarray:
            return np.append(w[:8] * scale, w[8] + w[:8] @ mean)

        center = scaled(parent)

        def objective(
            w: np.ndarray, x: np.ndarray = x, y: np.ndarray = y, l2: float = l2, v: np.ndarray = center
        ) -> float:
            margins = torch.from_numpy(x @ w)
            losses = family.losses(margins, torch.tensor(y)).sum()
            return float(losses) + l2 / 2 * float(w[:8] @ w[:8]) + 3.0 / 2 * float((w - v) @ (w - v))

        best = minimize(objective, np.zeros(9), method="BFGS", options={"gtol": 1e-7})
        assert objective(scaled(own)) <= best.fun + 1e-9 * abs(best.fun)
        np.testing.assert_allclose(scaled(own), best.x, atol=2e-5)


def test_losses_are_the_objective_with_both_penalties() -> None:
    table, _ = small_stores(20, stores=3)
    fitted = fit_stores(Linear(l2=0.5, shrink=2.0), table)
    own, parent = fitted.records.coefficients[0], fitted._made.parents[0].coefficients[0]
    rows = table.filter(pa.compute.equal(table["store"], 0))
    x = np.stack([rows[f"x{number}"].to_numpy() for number in range(8)], 1)
    errors = x @ own[:8] + own[8] - rows["linear"].to_numpy()
    total = errors @ errors / 2 + 0.25 * own[:8] @ own[:8] + (own - parent) @ (own - parent)
    assert fitted.results["loss"][0].as_py() == pytest.approx(total / 20, rel=1e-12)


@pytest.mark.parametrize("model", [Linear, Logistic, Poisson])
def test_groups_of_20_rows_predict_better_when_they_are_shrunk(model: type[Glm]) -> None:
    table, rest = small_stores(20)
    loss: dict[str, float] = {}
    grid = Grid(0.0, 1.0, 10.0, 30.0, 100.0, 300.0)
    target = rest[model.family.name].to_numpy().astype(float)
    for name, fitted in {
        "alone": fit_stores(model(l2=grid), table, small=Small(fallback="skip"), search=Pooled()),
        "by country": fit_stores(model(), table, by="country", small=Small(fallback="skip")),
        "shrunk": fit_stores(model(l2=0.1, shrink=grid), table, search=Pooled()),
    }.items():
        features = np.stack([rest[f"x{number}"].to_numpy() for number in range(8)], 1)
        margins = fitted.model.margins(fitted.records.coefficients, features, fitted.index.numbers_of(rest))
        loss[name] = float(fitted.model.loss_of(margins, target).mean())
    assert loss["shrunk"] < min(loss["alone"], loss["by country"]), loss


def test_the_more_a_group_is_shrunk_the_closer_it_is_to_its_parent() -> None:
    table, _ = small_stores(20, stores=9)
    unshrunk, fully = (fit_stores(Logistic(l2=1.0, shrink=shrink), table) for shrink in (0.0, 1e9))
    assert unshrunk.models.equals(fit_stores(Logistic(l2=1.0), table, small=Small()).models)
    (level,) = fully._made.parents
    np.testing.assert_allclose(fully.records.coefficients, level.coefficients[np.repeat(range(3), 3)], atol=1e-5)
    searched = fit_stores(Logistic(shrink=Uniform(0, 100)), table, search=RandomSearch(4))
    assert set(searched.models["shrink"].to_pylist()) <= set(searched.results["shrink"].to_pylist())
    for executor in (Processes(2, bucket_bytes=2000), ThisProcess(bucket_bytes=2000)):
        found = fit_stores(Logistic(shrink=Grid(1.0, 10.0)), table, executor=executor)
        again = fit_stores(Logistic(shrink=Grid(1.0, 10.0)), table)
        np.testing.assert_allclose(found.records.coefficients, again.records.coefficients, atol=1e-9)


def test_a_group_of_one_class_is_close_to_its_parent() -> None:
    table, _ = small_stores(20, stores=9)
    is_of = np.asarray(pa.compute.equal(table["store"], 4).to_numpy(zero_copy_only=False))
    table = table.set_column(11, "logistic", pa.array(np.where(is_of, 1, table["logistic"].to_numpy())))
    fitted = fit_stores(Logistic(l2=0.1, shrink=5.0), table)
    at = fitted.models["store"].to_pylist().index(4)
    assert fitted.models["status"][at].as_py() == "one class"
    own, parent = fitted.records.coefficients[at], fitted._made.parents[0].coefficients[1]
    assert own[8] > parent[8]
    assert np.abs(own - parent).max() < 2
    # The rows that are held out are of this class, too, so of both the constant has the lower loss.
    single = fit_stores(Logistic(l2=0.1, shrink=Grid(5.0, 0.0)), table)
    assert single.models["shrink"][at].as_py() == 0.0
    assert single.records.coefficients[at].tolist() == [*[0.0] * 8, pytest.approx(np.log(20.5 / 0.5))]


def test_without_parents_nothing_is_shrunk() -> None:
    table, _ = small_stores(20, stores=3)
    for model in (Linear(shrink=1.0), Linear(shrink=Grid(0.0, 1.0))):
        with pytest.raises(GroupDataError, match=r"no parent has a model. Set small=Small\(fallback='parent'\)"):
            fit_stores(model, table, small=Small(fallback="global"))
    with pytest.raises(GroupDataError, match="no parent has a model"):
        fit_stores(Linear(), table, small=Small(), overrides={(0, 0): {"shrink": 2.0}})
    with pytest.raises(GroupDataError, match="Cannot use shrink=-1"):
        fit_stores(Linear(shrink=-1), table)


def test_of_one_column_groups_are_shrunk_toward_the_model_of_all_rows(tmp_path: Path) -> None:
    table, rest = small_stores(20, stores=30)
    fitted = fit_stores(Linear(l2=Grid(0.1, 1e6), shrink=1e9), table, by="store")
    of_all = fit_stores(Linear(l2=0.1), table, by="store", small=Small(fallback="global")).records.fallback
    np.testing.assert_allclose(fitted.records.fallback, of_all, rtol=1e-9, err_msg="by the better of the penalties")
    fitted.save(tmp_path / "stores.models")
    assert FittedGroups.load(tmp_path / "stores.models").predict(rest).equals(fitted.predict(rest))


def test_a_forecast_of_a_shrunk_fit() -> None:
    table, _ = small_stores(20, stores=9)
    trainer = GroupedTrainer(
        Linear(shrink=1.0), by=["country", "store"], target="linear", features=["x0"], small=Small(fallback="parent")
    )
    assert trainer.explain(table).groups == 9
