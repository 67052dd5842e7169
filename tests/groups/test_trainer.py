"""Tests of one model for each group of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from offbeat.groups import Grid, GroupDataError, GroupedTrainer, HoldOut, Linear, Logistic, Small
from offbeat.groups.group_index import GroupIndex

if TYPE_CHECKING:
    from pathlib import Path


def sales(groups: int = 12, rows: int = 60, seed: int = 0) -> pa.Table:
    """Shops in two countries; what they sell depends on price and day, in each in another way."""
    chance = np.random.default_rng(seed)
    count = groups * rows
    shop = chance.permutation(np.repeat(np.arange(groups), rows))
    price, day = chance.normal(size=count), chance.normal(size=count)
    slope, level = chance.normal(size=groups), chance.normal(size=groups)
    sold = slope[shop] * price + 2 * day + level[shop] + 0.1 * chance.normal(size=count)
    return pa.table(
        {
            "country": np.where(shop % 2, "FR", "DE"),
            "shop": pa.array([f"shop {number}" for number in shop]),
            "price": price,
            "day": day,
            "sold": sold,
            "many": pa.array((sold > 0).astype(np.int64)),
        }
    )


def fit_linear(data: Any, **more: Any) -> Any:
    settings = {"by": ["country", "shop"], "target": "sold", "features": ["price", "day"], **more}
    return GroupedTrainer(Linear(l2=1.0), **settings).fit(data)


def test_each_group_has_the_model_of_its_rows() -> None:
    table = sales()
    fitted = fit_linear(table)
    assert fitted.models.num_rows == 12
    for row in fitted.models.to_pylist():
        mine = np.asarray(pa.compute.equal(table["shop"], row["shop"]).to_numpy(zero_copy_only=False))
        x = np.stack([table["price"].to_numpy()[mine], table["day"].to_numpy()[mine], np.ones(mine.sum())], 1)
        best = np.linalg.solve(x.T @ x + np.diag([1.0, 1.0, 0.0]), x.T @ table["sold"].to_numpy()[mine])
        told = [row["coefficient of price"], row["coefficient of day"], row["intercept"]]
        np.testing.assert_allclose(told, best, rtol=1e-8)
        assert (row["rows"], row["status"]) == (60, "ok")


def test_categories_are_keys_and_classes(tmp_path: Path) -> None:
    """As frames of pandas have them, and Parquet files that were written from these."""
    table = sales()
    words = table["many"].cast(pa.string())
    plain = table.set_column(table.column_names.index("many"), "many", words)
    coded = plain
    for name in ("country", "shop", "many"):
        coded = coded.set_column(coded.column_names.index(name), name, coded[name].dictionary_encode())
    pyarrow.parquet.write_table(coded, tmp_path / "coded.parquet")
    settings: dict[str, Any] = {"by": ["country", "shop"], "target": "many", "features": ["price", "day"]}
    expected = GroupedTrainer(Logistic(), **settings).fit(plain)
    for data in (coded, str(tmp_path / "coded.parquet")):
        fitted = GroupedTrainer(Logistic(), **settings).fit(data)
        assert fitted.models.equals(expected.models)
        assert fitted.predict(data).equals(expected.predict(plain))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_files_that_do_not_fit_each_other_are_refused(kind: str, tmp_path: Path) -> None:
    """A column that one lacks would be missing in all its rows, and no group of them had a model."""

    def write(table: pa.Table, name: str) -> None:
        if kind == "csv":
            pyarrow.csv.write_csv(table, tmp_path / f"{name}.csv")
        else:
            pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")

    table, pattern = sales(), str(tmp_path / f"*.{kind}")
    write(table, "0")
    write(table.drop_columns(["day"]), "1")
    with pytest.raises(GroupDataError, match=rf"1\.{kind} lacks the column 'day'"):
        fit_linear(pattern)
    write(table.set_column(table.column_names.index("day"), "day", pa.array(["monday"] * len(table))), "1")
    with pytest.raises(GroupDataError, match=rf"'day' is string in .*1\.{kind}, and double in others"):
        fit_linear(pattern)
    whole = pa.array(np.arange(len(table)))
    write(table.set_column(table.column_names.index("day"), "day", whole), "1")
    assert fit_linear(pattern).models["rows"].to_pylist() == [120] * 12


def test_predictions_come_in_the_order_of_the_rows() -> None:
    table = sales()
    fitted = fit_linear(table)
    order = np.random.default_rng(1).permutation(table.num_rows)
    found = fitted.predict(table.take(order).drop_columns(["sold", "many"]))
    assert found.column_names == ["prediction", "model"]
    assert np.corrcoef(found["prediction"].to_numpy(), table["sold"].to_numpy()[order])[0, 1] > 0.99
    assert set(found["model"].to_pylist()) == {"group"}


def test_keys_that_are_not_known_have_no_prediction() -> None:
    fitted = fit_linear(sales())
    rows = pa.table(
        {"country": ["FR", "FR", None], "shop": ["shop 1", "shop 2", "shop 1"], "price": [0.0] * 3, "day": [1.0] * 3}
    )
    found = fitted.predict(rows)
    assert found["model"].to_pylist() == ["group", "none", "none"], "shop 2 is in Germany"
    assert [value is None for value in found["prediction"].to_pylist()] == [False, True, True]


def test_null_is_a_key_like_others() -> None:
    table = sales(4)
    shops = [None if shop == "shop 1" else shop for shop in table["shop"].to_pylist()]
    table = table.set_column(1, "shop", pa.array(shops))
    fitted = fit_linear(table)
    assert fitted.models["shop"].to_pylist()[-1] is None
    found = fitted.predict(table)
    assert set(found["model"].to_pylist()) == {"group"}


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
def test_files_give_the_same_models_as_a_table(kind: str, tmp_path: Path) -> None:
    table = sales()
    for number in range(3):
        part, path = table.slice(number * 240, 240), tmp_path / f"part-{number}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(part, path)
        elif kind == "csv":
            pyarrow.csv.write_csv(part, path)
        else:
            with pa.ipc.new_file(path, part.schema) as file:
                file.write_table(part)
    of_files = fit_linear(str(tmp_path / f"*.{kind}"))
    assert of_files.models.drop_columns([]).equals(fit_linear(table).models)
    assert fit_linear(tmp_path).models.equals(of_files.models), "a folder stands for its files"


def test_a_configuration_is_chosen_in_each_group() -> None:
    table = sales()
    model = Linear(l2=Grid(0.01, 1000.0))
    fitted = GroupedTrainer(model, by="shop", target="sold", features=["price", "day"]).fit(table)
    assert set(fitted.models["l2"].to_pylist()) == {0.01}
    assert fitted.results.num_rows == 24
    chosen = fitted.results.filter(fitted.results["is chosen"])
    rest = fitted.results.filter(pa.compute.invert(fitted.results["is chosen"]))
    assert (chosen["loss of held-out rows"].to_numpy() < rest["loss of held-out rows"].to_numpy()).all()
    plain = GroupedTrainer(Linear(l2=0.01), by="shop", target="sold", features=["price", "day"]).fit(table)
    assert np.allclose(fitted.models["intercept"].to_numpy(), plain.models["intercept"].to_numpy(), rtol=1e-9), (
        "the chosen one is fitted to all rows"
    )


def test_what_is_held_out_depends_on_key_and_row_alone() -> None:
    table = sales()
    model = Logistic(l2=Grid(0.1, 1.0, 10.0))
    settings: dict[str, Any] = {"by": "shop", "target": "many", "features": ["price", "day"]}
    fitted = GroupedTrainer(model, **settings).fit(table)
    half = table.filter(pa.compute.equal(table["country"], "FR"))
    of_half = GroupedTrainer(model, **settings).fit(half)
    everything = {row["shop"]: row for row in fitted.models.to_pylist()}
    for row in of_half.models.to_pylist():
        assert row["l2"] == everything[row["shop"]]["l2"]
        assert row["intercept"] == pytest.approx(everything[row["shop"]]["intercept"], rel=1e-9)


def test_the_last_rows_in_time_are_held_out() -> None:
    days = np.arange(100.0)
    table = pa.table(
        {"key": ["a"] * 100, "x": np.r_[np.ones(80), np.zeros(20)], "day": days, "y": np.r_[np.zeros(80), np.ones(20)]}
    )
    trainer = GroupedTrainer(Linear(l2=Grid(1.0, 2.0)), by="key", target="y", validation=HoldOut(0.2, by="day"))
    fitted = trainer.fit(table)
    assert fitted.features == ["x"], "the time is no feature"
    assert fitted.results["loss"].to_pylist() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert min(fitted.results["loss of held-out rows"].to_pylist()) > 0.4


def test_a_classification_of_words() -> None:
    table = sales()
    words = pa.array(["many" if many else "few" for many in table["many"].to_pylist()])
    table = table.append_column("word", words)
    trainer = GroupedTrainer(Logistic(), by="shop", target="word", features=["price", "day"])
    found = trainer.fit(table).predict(table)
    assert np.mean(np.array(found["prediction"].to_pylist()) == np.array(words.to_pylist())) > 0.9
    assert ((found["probability"].to_numpy() > 0.5) == (np.array(found["prediction"].to_pylist()) == "many")).all()


class TestBadGroups:
    """A group that cannot be fitted is a row, and the others are fitted."""

    def fit(self, change: Any, **more: Any) -> dict[str, dict[str, Any]]:
        table = sales(4).to_pydict()
        change(table)
        fitted = GroupedTrainer(Logistic(**more), by="shop", target="many", features=["price", "day"]).fit(
            pa.table(table)
        )
        return {row["shop"]: row for row in fitted.models.to_pylist()}

    def test_one_class(self) -> None:
        def change(table: dict[str, list[Any]]) -> None:
            table["many"] = [
                1 if shop == "shop 2" else many for shop, many in zip(table["shop"], table["many"], strict=True)
            ]

        rows = self.fit(change)
        assert rows["shop 2"]["status"] == "one class"
        assert rows["shop 2"]["intercept"] == pytest.approx(np.log(60.5 / 0.5))
        assert rows["shop 1"]["status"] == "ok"

    @pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
    def test_a_value_is_missing_or_not_finite(self, value: Any) -> None:
        def change(table: dict[str, list[Any]]) -> None:
            table["price"][table["shop"].index("shop 3")] = value

        rows = self.fit(change)
        assert rows["shop 3"]["status"] == "not finite"
        assert rows["shop 3"]["intercept"] is None
        assert rows["shop 1"]["status"] == "ok"

    def test_separable(self) -> None:
        def change(table: dict[str, list[Any]]) -> None:
            table["many"] = [int(price > 0) for price in table["price"]]

        rows = self.fit(change, l2=0.0)
        assert {row["status"] for row in rows.values()} == {"separable"}
        assert all(np.isfinite(row["intercept"]) for row in rows.values())

    def test_small(self) -> None:
        table = sales(3).slice(0, 100)
        trainer = GroupedTrainer(
            Linear(), by="shop", target="sold", features=["price", "day"], small=Small(min_rows=34, fallback="skip")
        )
        rows = trainer.fit(table).models.to_pylist()
        assert {row["status"] for row in rows if row["rows"] < 34} == {"too small"}
        assert {row["status"] for row in rows if row["rows"] >= 34} <= {"ok"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": "absent"}, "no column 'absent'"),
        ({"by": "absent"}, "no column 'absent'"),
        ({"by": []}, "group by no column"),
        ({"features": None}, "encode it as numbers"),
        ({"model": Linear(l2=-1)}, "Cannot use l2=-1"),
        ({"model": Logistic(), "target": "sold"}, "needs two classes"),
        ({"small": Small(10_000, "raise")}, "less than 10000 rows"),
    ],
)
def test_what_cannot_be_fitted_is_refused(settings: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"model": Linear(), "by": "country", "target": "sold", "features": ["price"], **settings}
    with pytest.raises(GroupDataError, match=said):
        GroupedTrainer(**given).fit(sales())


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    trainer = GroupedTrainer(Linear(), by="country", target="sold", features=["price"])
    with pytest.raises(GroupDataError, match="no file is there"):
        trainer.fit(tmp_path / "absent.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(GroupDataError, match=r"damaged\.parquet"):
        trainer.fit(tmp_path / "damaged.parquet")
    with pytest.raises(GroupDataError, match="from list"):
        trainer.fit([1, 2])
    with pytest.raises(GroupDataError, match="Cannot read a stream"):
        trainer.fit(sales().to_reader())
    with pytest.raises(GroupDataError, match="empty Grid"):
        Linear(l2=Grid())


@pytest.mark.parametrize("step", [1, 1_000_003], ids=["dense", "sparse"])
def test_many_whole_numbers_as_keys(step: int) -> None:
    """They are looked up otherwise than a few: a null, and keys that are not known, beside them."""
    known = pa.array([None, *(step * np.arange(-10_000, 20_000)).tolist()], pa.int64())
    shuffled = known.take(pa.array(np.random.default_rng(0).permutation(len(known))))
    index = GroupIndex.count([pa.table({"key": shuffled})], ["key"], pa.schema([("key", pa.int64())]))
    asked = pa.table({"key": pa.array([None, -10_000 * step, 0, 19_999 * step, 20_000 * step, -(1 << 62), 1 << 62])})
    assert index.numbers_of(asked).tolist() == [30_000, 0, 10_000, 29_999, -1, -1, -1]
    assert (
        index.keys.take(pa.array(index.numbers_of(pa.table({"key": shuffled}))))["key"]
        .combine_chunks()
        .equals(shuffled)
    )
