"""Tests of a model whose rows are in several places."""

import functools
import itertools

import numpy as np
import pytest
import torch

from offbeat.groups import GroupedTrainer, Linear, Logistic, Poisson, Small
from offbeat.groups.families import PoissonFamily
from offbeat.groups.fitting import BucketTask, GroupStatus
from offbeat.groups.glm import Glm
from offbeat.groups.summed_newton import SummedNewton, sums_of
from offbeat.groups.summing import greatest, run_together
from tests.groups.test_newton import groups_of
from tests.groups.test_trainer import sales


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("spec", [Linear, Logistic, Poisson])
@pytest.mark.parametrize("cuts", [[], [100], [0, 1, 50, 51, 199]], ids=str)
def test_any_partition_gives_the_model_of_all_rows(spec: type[Glm], cuts: list[int], standardize: bool) -> None:
    made = groups_of([200], 6, spec.family)
    x, y = made.features[0, :, :-1].numpy(), made.target[0].numpy()
    configs = [spec(l2=l2, standardize=standardize) for l2 in (0.5, 10.0)]
    ends = [0, *cuts, 200]
    places = [
        BucketTask(x[begin:end], y[begin:end], np.array([0, end - begin]), np.zeros(1, np.uint64))
        for begin, end in itertools.pairwise(ends)
    ]
    found = run_together([configs[0].fit_summed(functools.partial(list, [place]), configs) for place in places])
    whole = configs[0].fit(BucketTask(x, y, np.array([0, 200]), np.zeros(1, np.uint64)), configs)
    for one in found:
        np.testing.assert_array_equal(one.coefficients, found[0].coefficients)
        np.testing.assert_allclose(one.coefficients, whole.coefficients, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(one.losses, whole.losses, rtol=1e-12)
        assert one.status == whole.status


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        (0, GroupStatus.NO_ROWS),
        (3, GroupStatus.ONE_CLASS),
        (6, GroupStatus.SEPARABLE),
        (7, GroupStatus.NOT_FINITE),
    ],
)
def test_all_places_know_of_each_other_why_there_is_no_model(rows: int, status: GroupStatus) -> None:
    x = np.array([1.0, 2.0, 3.0, -1.0, -2.0, -3.0, np.nan])[:rows, None] * 100
    y = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0])[:rows]
    places = [
        BucketTask(x[at], y[at], np.array([0, len(y[at])]), np.zeros(1, np.uint64)) for at in (slice(2), slice(2, 7))
    ]
    found = run_together(
        [Logistic(l2=0.0).fit_summed(functools.partial(list, [place]), [Logistic(l2=0.0)]) for place in places]
    )
    assert [one.status[0] for one in found] == [status, status]


@pytest.mark.parametrize("count", [0, 1, 3, 6, 12, 13])
def test_the_greatest_of_all_places(count: int) -> None:
    values = np.array([3.0, -1.0, 2.0, 2.0, 0.0, -0.0, 2.0, -np.inf, np.nan, 2.0, 1e-300, np.inf, 5.0])
    ends = [0, 4, 4, 9, 13]
    parts = [values[begin:end] for begin, end in itertools.pairwise(ends)]
    found = np.concatenate(run_together([greatest(part, count, place, 4) for place, part in enumerate(parts)]))
    order = np.lexsort((np.arange(13), np.nan_to_num(values + 0.0, nan=np.inf), np.isnan(values)))
    expected = np.zeros(13, np.bool_)
    expected[order[13 - count :]] = True
    np.testing.assert_array_equal(found, expected)


def test_a_step_that_goes_too_far_is_halved() -> None:
    x = torch.tensor([[30.0, 1.0], [-30.0, 1.0], [31.0, 1.0], [0.1, 1.0]], dtype=torch.float64)
    y = torch.tensor([3.0, 0.0, 1.0, 40.0], dtype=torch.float64)
    newton, seen = SummedNewton(torch.tensor([0.1], dtype=torch.float64), 2, has_intercept=True), []
    while not newton.has_ended:
        sums = sums_of(x, y, PoissonFamily(), newton.coefficients)
        seen.append(float(sums.losses + 0.05 * newton.coefficients[0, 0] ** 2))
        newton.told(sums)
    sums = sums_of(x, y, PoissonFamily(), newton.coefficients)
    assert max(seen) > seen[0], "a whole step was too far"
    gradient = sums.gradients[0] + torch.tensor([0.1, 0.0]) * newton.coefficients[0]
    assert gradient.abs().max() < 1e-6


def test_the_model_of_all_rows_predicts_where_a_group_has_none() -> None:
    table = sales(6)
    trainer = GroupedTrainer(
        Linear(l2=1.0), by="shop", target="sold", features=["price", "day"], small=Small(fallback="global")
    )
    fitted = trainer.fit(table)
    x = np.stack([table["price"].to_numpy(), table["day"].to_numpy(), np.ones(table.num_rows)], 1)
    best = np.linalg.solve(x.T @ x + np.diag([1.0, 1.0, 0.0]), x.T @ table["sold"].to_numpy())
    strangers = table.set_column(table.column_names.index("shop"), "shop", [["elsewhere"] * table.num_rows])
    found = fitted.predict(strangers)
    assert set(found["model"].to_pylist()) == {"global"}
    np.testing.assert_allclose(found["prediction"].to_numpy(), x @ best, rtol=1e-8)
