"""The promises of every robust rule, checked."""

from __future__ import annotations

import torch

from offbeat.robust import LossRule, Rule
from offbeat.robust.rule import distances_of, gram_of

_LIES = (1e3, -1e6, 1e12)  # times what an honest worker says
_SCALES = (1e-20, 1e-6, 1.0, 1e6, 1e20)
_FARTHEST = 3.0  # in units of the largest distance between two honest contributions


def check_rule(rule: Rule, *, n: int | None = None, numel: int = 500) -> None:
    """Check that `rule` keeps what every rule promises.

    Args:
        rule: a frozen description.
        n: contributions to make up; a few more than it needs if None.
        numel: elements of each.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    n = max(rule.least() + 2, 5) if n is None else n
    if isinstance(rule, LossRule):
        rule = _DistanceLoss(rule)
    generator = torch.Generator().manual_seed(1)
    center = torch.randn(numel, generator=generator)
    honest = center + 0.3 * torch.randn(n, numel, generator=generator)
    reference = center.clone() if rule.needs_reference else None
    _check_numbers(rule)
    _check_bits(rule, honest, reference)
    _check_parts(rule, honest, reference)
    _check_alike(rule, n, center, reference)
    _check_rejected(rule, honest, reference)
    faulty = min(getattr(rule, "faulty", rule.most_faulty(n)), rule.most_faulty(n))
    for lie in _LIES:
        _check_lies(rule, honest, reference, faulty, lie)
    for dtype in (torch.float16, torch.bfloat16):
        for given in (honest, honest[1:]):  # an even number, and an odd one
            _check_narrow(rule, given, reference, dtype)
    if not rule.minority_counts:
        for scale in _SCALES:
            for said in (scale * center, scale * center[:3]):  # of few elements distances are 0 to the last bit
                _check_majority(rule, said, reference, n, faulty)


class _DistanceLoss(Rule):
    """A rule that goes by losses, with a loss at hand: the square of the distance to the reference."""

    needs_gram = needs_reference = True

    def __init__(self, rule: LossRule) -> None:
        self._rule, self.faulty = rule, getattr(rule, "faulty", 0)
        self.minority_counts = rule.minority_counts

    def __repr__(self) -> str:
        return repr(self._rule)

    def least(self) -> int:
        return self._rule.least()

    def most_faulty(self, n: int) -> int:
        return self._rule.most_faulty(n)

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Judge by the loss at zero, and at each contribution."""
        losses = [float(gram[-1, -1]), *distances_of(gram)[-1, :-1].tolist()]
        scales = torch.zeros(len(gram), dtype=torch.float64)
        scales[:-1] = self._rule.judge(gram[:-1, :-1], weights, losses)
        return scales

    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        """Combine as the rule does."""
        return self._rule.combine(stack_ND, scales_N)


def _check_numbers(rule: Rule) -> None:
    least = rule.least()
    assert least >= 1, f"{rule!r}: it cannot need {least} contributions"
    assert rule.check(least) == "", f"{rule!r}: it refuses {least} contributions, which it says are enough"
    assert least == 1 or rule.check(least - 1), f"{rule!r}: it takes {least - 1} contributions, and needs {least}"
    faulty = getattr(rule, "faulty", 0)
    assert rule.most_faulty(least) >= faulty, f"{rule!r}: with {least} contributions it cannot bear {faulty}"
    for n in range(1, 40):
        assert 0 <= rule.most_faulty(n) < n, f"{rule!r}: of {n} contributions not {rule.most_faulty(n)} can be anything"


def _check_bits(rule: Rule, honest: torch.Tensor, reference: torch.Tensor | None) -> None:
    before = honest.clone()
    first, again = rule(honest, reference=reference), rule(honest, reference=reference)
    assert torch.equal(first, again), f"{rule!r}: the same contributions gave other bits"
    assert torch.equal(honest, before), f"{rule!r}: it changed the contributions"
    assert (first.shape, first.dtype) == (honest[0].shape, honest.dtype), f"{rule!r}: it returned another kind"
    order = torch.randperm(len(honest), generator=torch.Generator().manual_seed(2))
    other = rule(honest[order], reference=reference)
    assert torch.allclose(first, other, rtol=1e-4, atol=1e-5), f"{rule!r}: the order makes a difference"


def _check_parts(rule: Rule, honest: torch.Tensor, reference: torch.Tensor | None) -> None:
    """Combine blocks by themselves, by scales from Gram matrices that were added: it is the same vector."""
    whole = rule(honest, reference=reference)
    stack = honest if reference is None else torch.cat((honest, reference[None]))
    blocks = stack.split(97, 1)
    gram = torch.stack([gram_of(block) for block in blocks]).sum(0)
    scales = rule.judge(gram, torch.ones(len(honest), dtype=torch.float64))
    parts = torch.cat([rule.combine(block, scales) for block in blocks])
    assert torch.allclose(parts, whole, rtol=1e-4, atol=1e-5), f"{rule!r}: block by block it makes another vector"


def _check_alike(rule: Rule, n: int, center: torch.Tensor, reference: torch.Tensor | None) -> None:
    alike = rule(center.repeat(n, 1), reference=reference)
    part = float(alike @ center / center.square().sum())  # some are shortened
    is_like = torch.allclose(alike, part * center, rtol=1e-4, atol=1e-5) and 0 < part < 1 + 1e-4
    assert is_like, f"{rule!r}: of equal contributions it made another one"
    zero = rule(torch.zeros(n, len(center)), reference=None if reference is None else torch.zeros_like(center))
    assert not zero.any(), f"{rule!r}: of zeros it made {zero.abs().max()}"


def _check_rejected(rule: Rule, honest: torch.Tensor, reference: torch.Tensor | None) -> None:
    """Put NaN where the scale is 0, and see that nothing changes."""
    stack = honest if reference is None else torch.cat((honest, reference[None]))
    scales = rule.judge(gram_of(stack), torch.ones(len(honest), dtype=torch.float64))
    scales[0] = 0.0
    if not bool((scales[: len(honest)] != 0).any()):
        return  # it had chosen that one alone
    clean = rule.combine(stack, scales)
    soiled = stack.clone()
    soiled[0] = float("nan")
    assert torch.equal(rule.combine(soiled, scales), clean), f"{rule!r}: it looks at what was rejected"


def _check_majority(rule: Rule, said: torch.Tensor, reference: torch.Tensor | None, n: int, faulty: int) -> None:
    """See that equal contributions are the result, whatever as many liars as the rule bears say, at this scale."""
    for lie in (-20.0, 0.0, 1.001, 1e12):
        stack = said.repeat(n, 1)
        stack[:faulty] = lie * said
        got = rule(stack, reference=reference)
        away = float((got - said).norm() / said.norm())
        assert away <= 1e-6, (
            f"{rule!r}: {n - faulty} of {n} contributions are equal, and {faulty} that say {lie:g} times as much move "
            f"the result by {away:.3g} of its norm, at values of about {float(said.abs().max()):.0e}"
        )


def _check_narrow(rule: Rule, honest: torch.Tensor, reference: torch.Tensor | None, dtype: torch.dtype) -> None:
    """See that near the largest values of a dtype of 16 bits the result is that of float32, rounded once."""
    factor = 0.9 * torch.finfo(torch.float16).max / float(honest.abs().max())
    narrow = (factor * honest).to(dtype)
    trusted = None if reference is None else (factor * reference).to(dtype)
    got = rule(narrow, reference=trusted)
    assert got.dtype == dtype, f"{rule!r}: of {dtype} it made {got.dtype}"
    wide = rule(narrow.float(), reference=None if trusted is None else trusted.float())
    assert torch.equal(got, wide.to(dtype)), (
        f"{rule!r}: of {dtype} contributions up to {float(narrow.abs().max()):g} it makes up to "
        f"{float(got.float().abs().max()):g}, and of the same in float32 up to {float(wide.abs().max()):g}"
    )


def _check_lies(rule: Rule, honest: torch.Tensor, reference: torch.Tensor | None, faulty: int, lie: float) -> None:
    """See that with as many liars as it bears the result stays where the honest ones are."""
    stack = honest.clone()
    stack[:faulty] = lie * honest[:faulty]
    got = rule(stack, reference=reference)
    truth = honest[faulty:]
    spread = torch.cdist(truth, truth).max() + truth.norm(dim=1).max()
    away = float((got - truth.mean(0)).norm())
    assert away <= _FARTHEST * float(spread), (
        f"{rule!r}: {faulty} of {len(honest)} that say {lie:g} times the truth move it by {away:.3g}, and the honest "
        f"ones are within {float(spread):.3g}"
    )
