"""Tests of a model whose rows are in several places."""

import itertools

import numpy as np
import pytest
import torch

from offbeat.groups import GroupedTrainer, Linear, Small
from offbeat.groups.families import BernoulliFamily, Family, GaussianFamily, PoissonFamily
from offbeat.groups.newton import PaddedGroups, solve
from offbeat.groups.summed_newton import SummedNewton, sums_of
from tests.groups.test_newton import groups_of
from tests.groups.test_trainer import sales


@pytest.mark.parametrize("family", [GaussianFamily(), BernoulliFamily(), PoissonFamily()], ids=lambda one: one.name)
@pytest.mark.parametrize("cuts", [[], [100], [1, 50, 51, 199]], ids=str)
def test_any_partition_gives_the_model_of_all_rows(family: Family, cuts: list[int]) -> None:
    made, penalties = groups_of([200], 6, family), torch.tensor([0.5, 10.0], dtype=torch.float64)
    x, y = made.features[0], made.target[0]
    newton = SummedNewton(penalties, 7, has_intercept=True)
    ends = [0, *cuts, 200]
    for _ in range(50):
        parts = [
            sums_of(x[begin:end], y[begin:end], family, newton.coefficients) for begin, end in itertools.pairwise(ends)
        ]
        newton.told(sum(parts[1:], parts[0]))
        if newton.has_ended:
            break
    assert newton.has_ended
    whole = solve(PaddedGroups(x[None], y[None], torch.tensor([200])), family, penalties, has_intercept=True)
    torch.testing.assert_close(newton.coefficients, whole.coefficients[0], rtol=1e-10, atol=1e-12)


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
