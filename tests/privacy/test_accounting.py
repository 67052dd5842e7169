"""What contributions spend: exactly, as others count it, and as the definition has it."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat.privacy import GaussianMechanism, delta_of, epsilon_of

# dp-accounting 0.6.0: gaussian_mechanism.get_epsilon_gaussian(noise / sqrt(contributions), delta)
BY_DP_ACCOUNTING = [
    (1.0, 1, 1e-5, 4.377178095681137),
    (1.1, 500, 1e-5, 292.4004967821737),
    (5.0, 100, 1e-6, 10.997151214220652),
    (20.0, 1000, 1e-5, 7.511275900744785),
    (0.5, 1, 1e-5, 9.997256146434315),
    (100.0, 100, 1e-8, 0.49285036535491517),
]


@pytest.mark.parametrize(("noise", "contributions", "delta", "epsilon"), BY_DP_ACCOUNTING)
def test_as_dp_accounting_has_it(noise: float, contributions: int, delta: float, epsilon: float) -> None:
    mechanism = GaussianMechanism(noise=noise, delta=delta)
    assert mechanism.epsilon(contributions) == pytest.approx(epsilon, rel=1e-9)
    assert mechanism.epsilon(contributions, replaced=True) == epsilon_of(2 * math.sqrt(contributions) / noise, delta)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.1, 0.3), (1.0, 0.2), (1.0, 5.0), (3.0, 1.0)])
def test_by_integration(mu: float, epsilon: float) -> None:
    """Delta is the integral of what N(mu, 1) has more than exp(epsilon) times N(0, 1)."""
    x = torch.linspace(-15, 20, 2_000_001, dtype=torch.float64)
    here, there = (torch.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi) for mean in (mu, 0.0))
    more = float((here - math.exp(epsilon) * there).clamp_(min=0).sum() * (x[1] - x[0]))
    assert delta_of(mu, epsilon) == pytest.approx(more, rel=1e-5)


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 1.0, 7.0, 50.0, 2000.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_epsilon_and_delta_are_each_others_inverse(mu: float, delta: float) -> None:
    epsilon = epsilon_of(mu, delta)
    assert delta_of(mu, epsilon) <= delta
    assert epsilon == 0 or delta_of(mu, epsilon * (1 - 1e-6)) > delta
    assert epsilon <= mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)), "no more than the usual bound"


def test_more_contributions_spend_more() -> None:
    mechanism = GaussianMechanism(noise=30.0)
    spent = [mechanism.epsilon(count) for count in (0, 1, 10, 100, 500, 10**6)]
    assert spent[0] == 0
    assert spent == sorted(set(spent))
    assert mechanism.epsilon(500) == pytest.approx(3.2, abs=0.2)


def test_what_noise_may_be_is_rarely_more() -> None:
    """Of the length of a contribution, and of its inner product with a reference: one in 40 or less."""
    mechanism = GaussianMechanism(max_norm=2.0, noise=0.7)
    generator = torch.Generator().manual_seed(1)
    for elements in (1, 10, 1000):
        honest = torch.nn.functional.normalize(torch.randn(20_000, elements, generator=generator), dim=1) * 2.0
        noisy = honest + mechanism.deviation * torch.randn(honest.shape, generator=generator)
        longer = noisy.square().sum(1) - honest.square().sum(1) > mechanism.most_energy(elements)
        turned = -(noisy - honest)[:, 0] > mechanism.most_turn
        assert 0.005 < float(longer.float().mean()) < 0.05
        assert 0.015 < float(turned.float().mean()) < 0.03
