"""Tests of groups that learn from the groups around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from offbeat.groups import FittedGroups, Grid, GroupDataError, GroupedTrainer, Linear, Processes, Small, ThisProcess

if TYPE_CHECKING:
    from pathlib import Path

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
