"""Tests of how configurations are tried and chosen, and of hyper-parameters of single groups."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from offbeat.groups import (
    AdamW,
    FittedGroups,
    Grid,
    GroupDataError,
    GroupedTrainer,
    Halving,
    Linear,
    Logistic,
    LogUniform,
    Net,
    Pooled,
    RandomSearch,
    Uniform,
)
from tests.groups.test_nets import mlp, mlp_with_norm, task_of
from tests.groups.test_trainer import sales

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer_of(model: Any, **more: Any) -> GroupedTrainer:
    settings: dict[str, Any] = {"by": "shop", "target": "sold", "features": ["price", "day"], **more}
    return GroupedTrainer(model, **settings)


class TestRandomSearch:
    """Draws of configurations."""

    def test_values_are_of_the_ranges_and_the_draws_continue(self) -> None:
        spec = Linear(l2=LogUniform(1e-3, 10.0))
        few, many = RandomSearch(5, seed=1).configs(spec), RandomSearch(400, seed=1).configs(spec)
        assert many[:5] == few
        drawn = np.log10([config.l2 for config in many])
        assert drawn.min() >= -3
        assert drawn.max() <= 1
        # A quarter of the draws in each order of magnitude: the standard deviation of a count is 9.
        assert np.histogram(drawn, [-3, -2, -1, 0, 1])[0] == pytest.approx(100, abs=36)
        assert RandomSearch(5, seed=2).configs(spec) != few

    def test_a_field_of_a_spec_within(self) -> None:
        spec = Net(mlp, optimizer=AdamW(lr=LogUniform(1e-4, 1e-1), weight_decay=Uniform(0.0, 0.1)), batch=Grid(8, 16))
        made = RandomSearch(40).configs(spec)
        assert {config.batch for config in made} == {8, 16}
        assert len({config.optimizer.lr for config in made}) == 40
        assert all(0 <= config.optimizer.weight_decay <= 0.1 for config in made)

    def test_equal_draws_are_tried_once(self) -> None:
        assert len(RandomSearch(50).configs(Linear(l2=Grid(1.0, 2.0)))) == 2

    def test_the_best_draw_is_chosen_saved_and_read(self, tmp_path: Path) -> None:
        fitted = trainer_of(Linear(l2=LogUniform(1e-3, 1e4)), search=RandomSearch(6)).fit(sales())
        best = fitted.results.group_by("shop").aggregate([("loss of held-out rows", "min")])
        chosen = fitted.results.filter(fitted.results["is chosen"])
        assert fitted.results.num_rows == 6 * 12
        assert chosen["loss of held-out rows"].to_pylist() == best["loss of held-out rows_min"].to_pylist()
        assert chosen["l2"].to_pylist() == fitted.models["l2"].to_pylist()
        fitted.save(tmp_path / "shops.models")
        found = FittedGroups.load(tmp_path / "shops.models")
        assert found.model == fitted.model
        assert found.results.equals(fitted.results)


def test_one_configuration_is_chosen_for_all_groups() -> None:
    table, model = sales(rows=9), Linear(l2=Grid(0.01, 1.0, 10.0, 1000.0))
    alone, pooled = trainer_of(model).fit(table), trainer_of(model, search=Pooled()).fit(table)
    assert len(set(alone.models["l2"].to_pylist())) > 1, "else the choice of each tells nothing"
    assert pooled.results["loss of held-out rows"].equals(alone.results["loss of held-out rows"])
    losses = alone.records.held_losses * alone.index.rows[:, None]
    (l2,) = set(pooled.models["l2"].to_pylist())
    assert l2 == [0.01, 1.0, 10.0, 1000.0][int(losses.sum(0).argmin())]
    plain = trainer_of(Linear(l2=l2)).fit(table)
    np.testing.assert_allclose(pooled.records.coefficients, plain.records.coefficients, rtol=1e-9)


class TestHalving:
    """Successive halving of nets."""

    def test_the_budgets(self) -> None:
        assert Halving(3).budgets(9, 27) == [3, 9, 27]
        assert Halving(2).budgets(5, 8) == [1, 2, 4, 8]
        assert Halving(3).budgets(1, 7) == [7]
        assert Halving(3).budgets(81, 3) == [1, 3]

    @pytest.mark.parametrize("make", [mlp, mlp_with_norm])
    def test_what_goes_on_is_trained_as_without_a_pause(self, make: Any) -> None:
        """All configurations go on at each rung: the models are those of one training."""
        configs = [Net(make, optimizer=AdamW(lr=lr), batch=8, epochs=6) for lr in (0.05, 0.01, 0.001)]
        task = task_of([20, 33, 20, 9])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that BatchNorm is trained one by one
            whole = configs[0].fit(task, configs)
            run = configs[0].fit_in_rungs(task, configs, [1, 2, 6])
            found = next(run)
            for _ in range(2):
                found = run.send(np.ones((4, 3), np.bool_))
        np.testing.assert_allclose(found.coefficients, whole.coefficients, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found.steps, whole.steps)
        np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-4)

    def test_the_rest_is_stopped(self) -> None:
        rates = (0.1, 0.03, 0.01, 0.003, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
        model = Net(mlp, optimizer=AdamW(lr=Grid(*rates)), batch=8, epochs=27)
        fitted = trainer_of(model, search=Halving(3)).fit(sales(5, rows=40))
        steps = fitted.records.steps
        a_epoch = 4  # of the 32 rows that are not held out
        for mine in steps:
            assert sorted(mine // a_epoch) == [3] * 6 + [9] * 2 + [27]
        chosen = steps[np.arange(5), fitted.records.chosen]
        assert (chosen == 27 * a_epoch).all(), "one that came to the end"
        assert set(fitted.models["optimizer.lr"].to_pylist()) <= set(rates[:4])
        last = trainer_of(Net(mlp, optimizer=AdamW(lr=0.03), batch=8, epochs=27)).fit(sales(5, rows=40))
        mine = np.array(fitted.models["optimizer.lr"].to_pylist()) == 0.03
        np.testing.assert_allclose(
            fitted.records.coefficients[mine], last.records.coefficients[mine], rtol=1e-4, atol=1e-5
        )

    def test_survivors(self) -> None:
        losses = np.array([[3.0, 1.0, np.nan, 2.0], [np.nan] * 4])
        is_alive = np.array([[True, False, True, True]] * 2)
        made = Halving(2).survivors(losses, is_alive)
        assert made.tolist() == [[True, False, False, True], [True, False, True, False]]


class TestOverrides:
    """Hyper-parameters of single groups."""

    def test_a_group_is_fitted_as_it_is_told(self, tmp_path: Path) -> None:
        table, model = sales(), Linear(l2=Grid(0.01, 0.1))
        given = {"shop 3": {"l2": 1e6}, "shop 5": {"l2": 2.0, "standardize": True}}
        fitted = trainer_of(model, overrides=given).fit(table)
        plain = trainer_of(model).fit(table)
        rows = {row["shop"]: row for row in fitted.models.to_pylist()}
        assert (rows["shop 3"]["l2"], rows["shop 5"]["l2"], rows["shop 5"]["standardize"]) == (1e6, 2.0, True)
        assert abs(rows["shop 3"]["coefficient of day"]) < 0.01
        scaled = trainer_of(Linear(l2=2.0, standardize=True)).fit(table).models.to_pylist()
        assert rows["shop 5"]["intercept"] == next(row for row in scaled if row["shop"] == "shop 5")["intercept"]
        for row in plain.models.to_pylist():
            if row["shop"] not in given:
                assert rows[row["shop"]]["intercept"] == pytest.approx(row["intercept"], rel=1e-9)
        fitted.save(tmp_path / "shops.models")
        assert FittedGroups.load(tmp_path / "shops.models").models.equals(fitted.models)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"shop 99": {"l2": 1.0}}, r"no row has this key"),
            ({("FR", "shop 1"): {"l2": 1.0}}, r"a key has 1 values"),
            ({"shop 1": {"depth": 1}}, r"Linear has l2, standardize"),
            ({"shop 1": {"intercept": False}}, r"the same in all groups"),
            ({"shop 1": {"standardize": True}}, r"name l2 for it, too"),
            ({"shop 1": {"l2": -1.0}}, r"Cannot use l2=-1"),
        ],
    )
    def test_what_cannot_be_overridden(self, given: Any, said: str) -> None:
        with pytest.raises(GroupDataError, match=said):
            trainer_of(Linear(l2=Grid(1.0, 2.0)), overrides=given).fit(sales())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: trainer_of(Linear(l2=LogUniform(0.1, 1.0))), "use search=RandomSearch"),
        (lambda: trainer_of(Linear(), search=RandomSearch(4)), "no Grid, Uniform or LogUniform"),
        (lambda: RandomSearch(0), "a greater whole number"),
        (lambda: trainer_of(Logistic(l2=Grid(1.0, 2.0)), search=Halving()), "not trained in epochs"),
        (lambda: trainer_of(Net(mlp, epochs=Grid(1, 2)), search=Halving()), "Cannot search `epochs`"),
        (lambda: Halving(factor=1), "2 or greater"),
        (lambda: LogUniform(0.0, 1.0), "greater than 0"),
        (lambda: Uniform(2.0, 1.0), "a greater one"),
    ],
)
def test_searches_that_cannot_be(make: Any, said: str) -> None:
    with pytest.raises(GroupDataError, match=said):
        make()
