"""Rules that judge contributions with noise in them beside a reference without (R16)."""

from __future__ import annotations

import pytest
import torch

from offbeat import GaussianMechanism
from offbeat.protocol.training import DensePayload
from offbeat.robust import FLTrust, Rule, ZenoPlusPlus, ZenoPS, ZenoPSAsync
from offbeat.server.aggregator import BlockContribution
from offbeat.server.judge import less_noise
from offbeat.server.pushed_block import PushedBlock
from offbeat.server.robust_aggregator import RobustAggregator

MECHANISM = GaussianMechanism(max_norm=0.5, noise=1.0)
HONEST, NUMEL, BLOCKS, NORM = 200, 6000, 3, MECHANISM.max_norm


def honest(cosine: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Contributions [n, D] whose cosine with the reference [D] is about this; all clipped."""
    reference = torch.nn.functional.normalize(torch.randn(NUMEL, generator=generator), dim=0)
    own = torch.nn.functional.normalize(torch.randn(HONEST, NUMEL, generator=generator), dim=1)
    mixed = cosine * reference + (1 - cosine**2) ** 0.5 * own
    return mixed * NORM, reference * NORM


def judged(rule: Rule, stack: torch.Tensor, reference: torch.Tensor, privacy: GaussianMechanism | None) -> torch.Tensor:
    """The scales [n], with the contributions measured block by block, as shards do."""
    aggregator = RobustAggregator(rule, lambda text: None, privacy)

    def row(worker: int, values: torch.Tensor) -> BlockContribution:
        return BlockContribution(worker, 1.0, PushedBlock(DensePayload(), values), is_reference=worker < 0)

    gram = sum(
        (
            aggregator.measure([row(i, one) for i, one in enumerate(part)], torch.float32, row(-1, of_reference))
            for part, of_reference in zip(stack.chunk(BLOCKS, 1), reference.chunk(BLOCKS), strict=True)
        ),
        torch.zeros(len(stack) + 1, len(stack) + 1, dtype=torch.float64),
    )
    return aggregator.judge.scales(gram, list(range(len(stack))), [1.0] * len(stack))[:-1]


@pytest.mark.parametrize("cosine", [0.3, 0.9])
def test_honest_ones_are_accepted_as_without_noise(cosine: float) -> None:
    generator = torch.Generator().manual_seed(3)
    clean, reference = honest(cosine, generator)
    noisy = clean + MECHANISM.deviation * torch.randn(clean.shape, generator=generator)
    without = float((judged(ZenoPS(), clean, reference, None) > 0).float().mean())
    unaware = float((judged(ZenoPS(), noisy, reference, None) > 0).float().mean())
    aware = float((judged(ZenoPS(), noisy, reference, MECHANISM) > 0).float().mean())
    lies = float((judged(ZenoPS(), -6 * noisy, reference, MECHANISM) > 0).float().mean())
    assert (without, unaware, lies) == (1.0, 0.0, 0.0)
    assert aware > 0.95


def test_lies_without_noise_are_rejected_where_noise_does_not_hide_them() -> None:
    clean, reference = honest(0.9, torch.Generator().manual_seed(3))
    assert not judged(ZenoPS(), -6 * clean, reference, MECHANISM).any(), "6 x 0.9 is more than two deviations"
    assert judged(ZenoPS(), -1 * clean, reference, MECHANISM).all(), "and 0.9 is less: the price of noise"


@pytest.mark.parametrize("rule", [FLTrust(), ZenoPlusPlus(), ZenoPSAsync()], ids=repr)
def test_rules_by_the_angle(rule: Rule) -> None:
    """Noise does not make honest ones short: they move the model by about what they did without; lies by little."""
    generator = torch.Generator().manual_seed(4)
    clean, reference = honest(0.5, generator)
    noisy = clean + MECHANISM.deviation * torch.randn(clean.shape, generator=generator)
    without, aware = (judged(rule, *one) for one in ((clean, reference, None), (noisy, reference, MECHANISM)))
    assert float((aware > 0).float().mean()) > 0.95 * float((without > 0).float().mean())
    assert float(aware.sum()) == pytest.approx(float(without.sum()), rel=0.1)
    mixed = torch.cat((noisy[:100], -6 * noisy[100:]))
    scales = judged(rule, mixed, reference, MECHANISM)
    assert float(scales[100:].abs().sum()) < 0.02 * float(scales[:100].sum())
    alone = judged(rule, -1e4 * noisy, reference, MECHANISM)
    assert float((alone.abs() * (1e4 * noisy).norm(dim=1)).sum()) <= 2 * HONEST * float(reference.norm())


def test_block_by_block() -> None:
    """Where a rule looks at each block by itself, each has the noise of its own elements."""
    generator = torch.Generator().manual_seed(7)
    clean, reference = honest(0.9, generator)
    noisy = clean + MECHANISM.deviation * torch.randn(clean.shape, generator=generator)
    aggregator = RobustAggregator(ZenoPS(scope="block"), lambda text: None, MECHANISM)
    for part, of_reference in zip(noisy.chunk(BLOCKS, 1), reference.chunk(BLOCKS), strict=True):
        rows = [BlockContribution(i, 1.0, PushedBlock(DensePayload(), one)) for i, one in enumerate(part)]
        lies = [BlockContribution(i, 1.0, PushedBlock(DensePayload(), -6 * one)) for i, one in enumerate(part)]
        own = BlockContribution(-1, 1.0, PushedBlock(DensePayload(), of_reference), is_reference=True)
        combined = aggregator.combine(rows + lies, torch.float32, own)
        assert combined is not None
        assert float((combined - part.mean(0)).norm()) < 0.3 * float(part.mean(0).norm()), "a few are left out"


def test_elements_that_were_not_sent_are_not_forgiven() -> None:
    """A block that a codec leaves out has no noise: who sends one element only may not send much in it."""
    _, reference = honest(0.5, torch.Generator().manual_seed(5))
    lie = torch.zeros(1, NUMEL)
    lie[0, 0] = 10 * NORM * float(reference[0].sign())
    assert not judged(ZenoPS(), lie, reference, MECHANISM).any()


def test_no_cosine_is_beyond_one() -> None:
    gram = torch.tensor([[-5.0, 0.0, -9.0], [0.0, 4.0, 9.0], [-9.0, 9.0, 1.0]], dtype=torch.float64)
    seen = less_noise(gram, 2.0)
    assert seen[:-1, -1].tolist() == [-1.0, 2.0]
    assert seen.diagonal().tolist() == [1.0, 4.0, 1.0]
    assert torch.equal(seen, seen.T)
    assert gram[0, 0] == -5, "what it is given stays as it is"


def test_what_is_not_finite_is_rejected_as_ever() -> None:
    clean, reference = honest(0.9, torch.Generator().manual_seed(6))
    clean[3, 7], clean[4, 9] = torch.nan, torch.inf
    scales = judged(ZenoPS(), clean, reference, MECHANISM)
    assert (scales == 0).nonzero().view(-1).tolist() == [3, 4]
