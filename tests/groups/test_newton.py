"""Tests of Newton's method for many models: as good as scikit-learn's, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.groups.families import BernoulliFamily, Family, GaussianFamily, PoissonFamily
from offbeat.groups.newton import PaddedGroups, solve

FAMILIES: list[Family] = [GaussianFamily(), BernoulliFamily(), PoissonFamily()]


def groups_of(sizes: list[int], features: int, family: Family, seed: int = 0) -> PaddedGroups:
    chance = torch.Generator().manual_seed(seed)
    most = max(sizes)
    x = torch.randn(len(sizes), most, features + 1, generator=chance, dtype=torch.float64)
    x[..., -1] = 1.0
    truth = torch.randn(len(sizes), features + 1, generator=chance, dtype=torch.float64) / features**0.5
    means = family.means((x @ truth[..., None])[..., 0])
    if isinstance(family, BernoulliFamily):
        y = torch.bernoulli(means, generator=chance)
    elif isinstance(family, PoissonFamily):
        y = torch.poisson(means, generator=chance)
    else:
        y = means + torch.randn(means.shape, generator=chance, dtype=torch.float64)
    return PaddedGroups(x, y, torch.tensor(sizes))


def objective(family: Family, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, l2: float) -> float:
    return float(family.losses(x @ w, y).sum() + l2 / 2 * w[:-1].square().sum())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_gradient_at_the_end_is_zero(family: Family) -> None:
    sizes, penalties = [7, 40, 33, 12, 25], torch.tensor([0.5, 1.0, 20.0], dtype=torch.float64)
    made = groups_of(sizes, 5, family)
    found = solve(made, family, penalties, has_intercept=True)
    assert found.has_ended.all()
    for group, rows in enumerate(sizes):
        x, y = made.features[group, :rows], made.target[group, :rows]
        for at, l2 in enumerate(penalties.tolist()):
            w = found.coefficients[group, at]
            gradient = x.T @ family.slopes(x @ w, y) + l2 * torch.cat((w[:-1], w.new_zeros(1)))
            assert gradient.abs().max() < 1e-6 * rows
            assert found.objectives[group, at] == pytest.approx(objective(family, x, y, w, l2), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_derivatives(family: Family) -> None:
    margins = torch.linspace(-4, 4, 33, dtype=torch.float64, requires_grad=True)
    target = (torch.arange(33) % 2).double()
    losses = family.losses(margins, target)
    (first,) = torch.autograd.grad(losses.sum(), margins, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), margins)
    torch.testing.assert_close(family.slopes(margins.detach(), target), first.detach())
    torch.testing.assert_close(family.curvatures(margins.detach()), second)


def test_a_model_is_the_same_alone_and_among_others() -> None:
    family, l2 = BernoulliFamily(), torch.tensor([1.0], dtype=torch.float64)
    made = groups_of([30, 8, 21], 4, family)
    together = solve(made, family, l2, has_intercept=True).coefficients
    for group, rows in enumerate([30, 8, 21]):
        alone = PaddedGroups(
            made.features[group : group + 1, :rows], made.target[group : group + 1, :rows], torch.tensor([rows])
        )
        torch.testing.assert_close(
            solve(alone, family, l2, has_intercept=True).coefficients[0], together[group], rtol=1e-9, atol=1e-9
        )


def test_padding_is_not_looked_at() -> None:
    family, l2 = BernoulliFamily(), torch.tensor([1.0], dtype=torch.float64)
    made = groups_of([30, 8], 4, family)
    before = solve(made, family, l2, has_intercept=True).coefficients
    made.features[1, 8:] = 1e6
    made.target[1, 8:] = -3
    torch.testing.assert_close(solve(made, family, l2, has_intercept=True).coefficients, before)


def test_collinear_and_constant_features() -> None:
    made = groups_of([40, 40], 4, GaussianFamily())
    made.features[0, :, 1] = made.features[0, :, 0]
    made.features[0, :, 2] = 3.0
    found = solve(made, GaussianFamily(), torch.tensor([0.0], dtype=torch.float64), has_intercept=True)
    assert torch.isfinite(found.coefficients).all()
    x, y = made.features[0].numpy(), made.target[0].numpy()
    best = np.linalg.lstsq(x, y, rcond=None)
    assert found.objectives[0, 0] <= float(((x @ best[0] - y) ** 2).sum() / 2) * (1 + 1e-6)


def test_a_step_that_overshoots_is_damped() -> None:
    x = torch.tensor([[[20.0, 1.0], [-20.0, 1.0], [21.0, 1.0], [0.1, 1.0]]], dtype=torch.float64)
    y = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    made = PaddedGroups(x, y, torch.tensor([4]))
    start = torch.tensor([[[3.0, -5.0]]], dtype=torch.float64)
    found = solve(made, BernoulliFamily(), torch.tensor([1e-3], dtype=torch.float64), has_intercept=True, start=start)
    plain = solve(made, BernoulliFamily(), torch.tensor([1e-3], dtype=torch.float64), has_intercept=True)
    torch.testing.assert_close(found.coefficients, plain.coefficients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_objectives_are_never_worse_than_scikit_learns(family: Family) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    sizes = [60, 90, 70, 300, 120]
    made = groups_of(sizes, 8, family, seed=3)
    found = solve(made, family, torch.tensor([2.0], dtype=torch.float64), has_intercept=True)
    for group, rows in enumerate(sizes):
        x, y = made.features[group, :rows], made.target[group, :rows]
        theirs = {
            "linear": linear_model.Ridge(alpha=2.0),
            "logistic": linear_model.LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-8),
            "poisson": linear_model.PoissonRegressor(alpha=2.0 / rows, solver="newton-cholesky", tol=1e-8),
        }[family.name].fit(x[:, :-1].numpy(), y.numpy())
        w = torch.from_numpy(np.append(np.ravel(theirs.coef_), theirs.intercept_))
        assert found.objectives[group, 0] <= objective(family, x, y, w, 2.0) + 1e-9
        torch.testing.assert_close(found.coefficients[group, 0], w, rtol=1e-4, atol=1e-4)
