"""Every rule, against definitions that try all there is to try, and against forms of them that were published wrong."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from offbeat.errors import PlanError
from offbeat.robust import (
    FABA,
    Bulyan,
    CentredClipping,
    ClippedMean,
    FLTrust,
    GeometricMedian,
    Kardam,
    KardamState,
    Krum,
    MeaMed,
    Mean,
    Median,
    MultiKrum,
    Phocas,
    TrimmedMean,
    Zeno,
    ZenoPlusPlus,
    ZenoPS,
    ZenoPSAsync,
)
from offbeat.robust.rule import _comparators, gram_of, sorted_rows
from offbeat.server.judge import Judge
from offbeat.short_name import short_name
from offbeat.testing import check_rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.robust import Rule
    from offbeat.robust.reference_rule import ReferenceRule

RULES: list[Rule] = [
    Mean(),
    ClippedMean(),
    ClippedMean(2.0),
    Median(),
    *(kind(f) for kind in (TrimmedMean, Phocas, MeaMed, Krum, MultiKrum, Bulyan, FABA) for f in (0, 1, 2)),
    MultiKrum(1, best=2),
    GeometricMedian(),
    GeometricMedian(iterations=1, smoothing=1e-6),
    CentredClipping(),
    CentredClipping(5.0, iterations=1),
    FLTrust(),
    ZenoPS(),
    ZenoPlusPlus(),
    ZenoPlusPlus(shrinks=True),
    ZenoPS(calibrate=1.2),
    *(Zeno(f, penalty=1e-5) for f in (0, 1, 3)),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule(rule: Rule) -> None:
    check_rule(rule)


# -- definitions, one coordinate or one vector after the other ---------------------------------------------------------


def stack(n: int, seed: int, numel: int = 7) -> np.ndarray:
    """Contributions with some equal values and some equal ones: ties are where rules differ from their definition."""
    made = np.random.default_rng(seed).integers(-4, 5, (n, numel)).astype(np.float64)
    if seed % 3 == 0 and n > 2:
        made[1] = made[0]
    return made + (0 if seed % 2 else 0.25 * np.random.default_rng(seed + 1000).standard_normal((n, numel)))


def means_nearest(values: list[float], center: float, count: int) -> list[float]:
    """The means of all sets of values that are nearest to a center; several, if some are equally near."""
    sets = itertools.combinations(values, count)
    ways = [(sum(abs(value - center) for value in one), np.mean(one)) for one in sets]
    least = min(away for away, _ in ways)
    return [float(mean) for away, mean in ways if away < least + 1e-9]


def trimmed(values: list[float], f: int) -> float:
    return float(np.mean(sorted(values)[f : len(values) - f]))


def krum_score(vectors: np.ndarray, i: int, f: int) -> float:
    others = sorted(float(np.sum((vectors[i] - vectors[j]) ** 2)) for j in range(len(vectors)) if j != i)
    return sum(others[: max(f + 1, len(vectors) - f - 2)])


def krum_order(vectors: np.ndarray, f: int) -> list[int]:
    return sorted(range(len(vectors)), key=lambda i: (round(krum_score(vectors, i, f), 9), i))


def bulyan_choice(vectors: np.ndarray, f: int) -> list[int]:
    left, chosen = list(range(len(vectors))), list[int]()
    while len(chosen) < len(vectors) - 2 * f:
        best = left[krum_order(vectors[left], f)[0]]
        left.remove(best)
        chosen.append(best)
    return chosen


CASES = [(n, f, seed) for n in range(1, 10) for f in range(3) for seed in range(12)]


def each(least: Callable[[int], int]) -> list[tuple[int, int, int]]:
    return [(n, f, seed) for n, f, seed in CASES if n >= least(f)]


def close(got: torch.Tensor, expected: Any) -> None:
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_coordinates_by_themselves() -> None:
    for n, f, seed in each(lambda f: 2 * f + 1):
        vectors = stack(n, seed)
        given = torch.from_numpy(vectors)
        close(Median()(given), np.median(vectors, axis=0))
        close(TrimmedMean(f)(given), [trimmed(list(column), f) for column in vectors.T])
        for rule, centers in (
            (Phocas(f), [trimmed(list(c), f) for c in vectors.T]),
            (MeaMed(f), np.median(vectors, 0)),
        ):
            for got, column, center in zip(rule(given).tolist(), vectors.T, centers, strict=True):
                ways = means_nearest(list(column), center, n - f)
                assert min(abs(got - way) for way in ways) < 1e-9, (rule, n, seed)


def test_krum() -> None:
    for n, f, seed in each(lambda f: 2 * f + 3):
        vectors = stack(n, seed)
        order = krum_order(vectors, f)
        close(Krum(f)(torch.from_numpy(vectors)), vectors[order[0]])
        for best in (None, 1, 2):
            if best is not None and n < best + f + 2:
                continue
            count = best or n - f - 2
            got = MultiKrum(f, best)(torch.from_numpy(vectors))
            # Of equal scores any may be in: the first is.
            close(got, vectors[order[:count]].mean(0))


def test_bulyan() -> None:
    for n, f, seed in each(lambda f: 4 * f + 3):
        vectors = stack(n, seed + 20)
        chosen = vectors[bulyan_choice(vectors, f)]
        got = Bulyan(f)(torch.from_numpy(vectors))
        for value, column in zip(got.tolist(), chosen.T, strict=True):
            ways = means_nearest(list(column), float(np.median(column)), max(1, len(chosen) - 2 * f))
            assert min(abs(value - way) for way in ways) < 1e-9, (n, f, seed)


def test_faba() -> None:
    for n, f, seed in each(lambda f: 2 * f + 1):
        vectors = left = np.random.default_rng(seed).standard_normal((n, 7))
        for _ in range(f):
            away = np.linalg.norm(left - left.mean(0), axis=1)
            left = np.delete(left, int(away.argmax()), axis=0)
        close(FABA(f)(torch.from_numpy(vectors)), left.mean(0))


def test_weighted_ones() -> None:
    for n, _, seed in each(lambda f: 1):
        vectors, weights = stack(n, seed), np.random.default_rng(seed).uniform(0.5, 3, n)
        given = torch.from_numpy(vectors)
        shares = weights / weights.sum()
        close(Mean()(given, weights.tolist()), shares @ vectors)
        norms = np.linalg.norm(vectors, axis=1)
        most = np.median(norms)
        short = np.array([v * min(1.0, most / norm) if norm else v for v, norm in zip(vectors, norms, strict=True)])
        np.testing.assert_allclose(ClippedMean()(given, weights.tolist()).numpy(), shares @ short, rtol=1e-6, atol=1e-6)
        z = vectors[int(np.argmin([weights @ np.linalg.norm(vectors - x, axis=1).round(12) for x in vectors]))]
        nu = 0.1 * np.median(np.linalg.norm(vectors - z, axis=1))
        for _ in range(8 if nu else 0):
            parts = weights / np.maximum(nu, np.linalg.norm(vectors - z, axis=1))
            z = parts @ vectors / parts.sum()
        np.testing.assert_allclose(GeometricMedian()(given, weights.tolist()).numpy(), z, rtol=1e-5, atol=1e-5)


def test_those_with_a_reference() -> None:
    for n, _, seed in each(lambda f: 1):
        vectors, v = stack(n, seed), stack(2, seed + 99)[1]
        given, reference = torch.from_numpy(vectors), torch.from_numpy(v)
        center = v.copy()
        for _ in range(2):
            away = np.linalg.norm(vectors - center, axis=1)
            cut = [(x - center) * min(1.0, 3.0 / a) if a else x - center for x, a in zip(vectors, away, strict=True)]
            center = center + np.mean(cut, axis=0)
        got = CentredClipping(3.0, iterations=2)(given, reference=reference)
        np.testing.assert_allclose(got.numpy(), center, rtol=1e-6, atol=1e-6)
        norms = np.linalg.norm(vectors, axis=1)
        lengths = norms * np.linalg.norm(v)
        trust = np.array(
            [max(0.0, x @ v / length) if length else 0.0 for x, length in zip(vectors, lengths, strict=True)]
        )
        scaled = [x / norm * np.linalg.norm(v) if norm else x for x, norm in zip(vectors, norms, strict=True)]
        expected = trust @ np.array(scaled) / trust.sum() if trust.sum() else np.zeros_like(v)
        np.testing.assert_allclose(FLTrust()(given, reference=reference).numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", range(1, 20))
def test_the_network_sorts(n: int) -> None:
    """By the 0-1 principle it sorts everything if it sorts all zeros and ones."""
    columns = (
        torch.tensor(list(itertools.product([0.0, 1.0], repeat=n))).T
        if n <= 12
        else torch.randint(0, 2, (n, 20_000), generator=torch.Generator().manual_seed(n)).float()
    )
    assert torch.equal(sorted_rows(columns), columns.sort(0).values)
    assert len(_comparators(n)) <= n * max(1, (n - 1).bit_length()) ** 2 / 2 + n


def test_what_is_not_a_number_comes_last() -> None:
    inf, nan = float("inf"), float("nan")
    columns = torch.tensor([[nan, 1.0], [2.0, -inf], [1.0, inf]])
    assert sorted_rows(columns).tolist() == [[1.0, 1.0], [2.0, inf], [inf, inf]]
    assert Median()(torch.tensor([[nan], [2.0], [1.0]])).tolist() == [2.0]


@pytest.mark.parametrize("scale", [1e-20, 1e-9, 1.0, 1e9, 1e20])
def test_the_geometric_median_is_what_a_majority_agrees_on(scale: float) -> None:
    """Three equal gradients and two liars at -20 times as much gave -7.4 times as much, which is the mean."""
    said = scale * torch.tensor([1.0, 2.0, -3.0])
    stack = torch.stack((said, -20 * said, said, -20 * said, said))
    assert torch.allclose(GeometricMedian()(stack), said, rtol=1e-6, atol=0)
    wide = scale * torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(GeometricMedian()(wide) / scale, GeometricMedian()(wide / scale), rtol=1e-9)
    near = said * (1 + 1e-3 * torch.randn(5, 1, generator=torch.Generator().manual_seed(4)))
    near[:2] = -20 * said
    assert torch.allclose(GeometricMedian()(near), said, rtol=3e-3, atol=0)


# -- forms that were published -----------------------------------------------------------------------------------------


def _choices(power: float, neighbours: int, seed: int) -> tuple[int, int]:
    vectors = np.random.default_rng(seed).standard_normal((7, 3))

    def score(i: int) -> float:
        others = sorted(float(np.linalg.norm(vectors[i] - vectors[j]) ** power) for j in range(7) if j != i)
        return sum(others[:neighbours])

    given = torch.from_numpy(vectors)
    return min(range(7), key=score), int(Krum(2)(given).eq(given).all(1).nonzero())


def _differ_somewhere(power: float, neighbours: int = 3) -> bool:
    pairs = [_choices(power, neighbours, seed) for seed in range(60)]
    return any(theirs != ours for theirs, ours in pairs)


@pytest.mark.parametrize(
    ("power", "neighbours"),
    [(4, 3), (1, 3), (1, 4), (2, 4)],
    ids=["squared twice", "not squared", "not squared, one neighbour too many", "one neighbour too many"],
)
def test_published_forms_of_krum_choose_others(power: float, neighbours: int) -> None:
    """Of 60 sets of 7 they differ in some; ours is the definition's in all."""
    assert _differ_somewhere(power, neighbours)
    for seed in range(60):
        definition, ours = _choices(2, 3, seed)
        assert definition == ours


def test_multi_krum_is_a_mean_and_no_sum() -> None:
    vectors = torch.ones(7, 3)
    assert torch.equal(MultiKrum(2)(vectors), torch.ones(3))


def test_bulyan_chooses_again_after_each_choice() -> None:
    """A peer's scores are never updated: the selection is that of one Krum, and another one in some cases."""
    others = 0
    for seed in range(80):
        vectors = np.random.default_rng(seed).standard_normal((7, 2))
        once = set(krum_order(vectors, 1)[:5])
        gram = torch.from_numpy(vectors @ vectors.T)
        ours = set(Bulyan(1).judge(gram, torch.ones(7, dtype=torch.float64)).nonzero().view(-1).tolist())
        assert ours == set(bulyan_choice(vectors, 1))
        others += ours != once
    assert others > 5


# -- Kardam ------------------------------------------------------------------------------------------------------------


def test_kardam_lets_no_fast_worker_through_and_none_too_often() -> None:
    rule, state, generator = Kardam(1, 5), KardamState(), random.Random(4)
    accepted: list[int] = []
    lies = honest = 0
    for _ in range(3000):
        worker = generator.randrange(5)
        change = generator.uniform(0.5, 1.5) * (1000 if worker == 4 else 1)
        state, is_accepted = rule.seen(state, worker=worker, change=change, moved=1.0)
        if is_accepted:
            accepted.append(worker)
            lies, honest = lies + (worker == 4), honest + (worker != 4)
    assert lies <= 1, "only the very first may pass, which there is nothing to compare with"
    assert honest > 1000
    for begin in range(len(accepted) - 2):
        window = accepted[begin : begin + 3]
        assert max(window.count(worker) for worker in window) <= 1


def test_kardam_takes_nothing_that_is_infinite() -> None:
    state, accepted = Kardam(0, 1).seen(KardamState(), worker=0, change=1.0, moved=0.0)
    assert not accepted
    assert Kardam(0, 1).seen(state, worker=0, change=0.0, moved=0.0)[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "n", "says"),
    [
        (Krum(2), 6, "Krum(faulty=2) needs at least 7 contributions, and there are 6. Use faulty=1, or more workers"),
        (Bulyan(1), 6, "needs at least 7 contributions, and there are 6. Use more workers, or Median()"),
        (TrimmedMean(3), 6, "needs at least 7 contributions, and there are 6. Use faulty=2"),
        (MultiKrum(1, best=4), 6, "needs at least 7"),
    ],
)
def test_too_few_are_refused(rule: Rule, n: int, says: str) -> None:
    assert says in rule.check(n)
    with pytest.raises(ValueError, match=re.escape(f"Cannot combine: {short_name(rule)} needs")):
        rule(torch.zeros(n, 2))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Krum(-1), "Cannot expect -1 faulty contributions"),
        (lambda: TrimmedMean(1.5), "Cannot expect 1.5"),  # type: ignore[arg-type]
        (lambda: MultiKrum(1, best=0), "one at least"),
        (lambda: ClippedMean(0.0), "choose one above 0"),
        (lambda: GeometricMedian(iterations=0), "1 or more"),
        (lambda: CentredClipping(radius=-1.0), "above 0"),
        (lambda: Kardam(2, 6), "It takes more than 6. Use faulty=1"),
    ],
)
def test_what_makes_no_rule_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says).replace("It", "[Ii]t")):
        make()


def test_a_reference_is_asked_for_where_there_is_a_use_for_it() -> None:
    with pytest.raises(ValueError, match="needs a reference"):
        FLTrust()(torch.ones(2, 2))
    with pytest.raises(ValueError, match="takes no reference"):
        Median()(torch.ones(2, 2), reference=torch.ones(2))


# -- the check finds what it looks for ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SaysItBearsHalf(Mean):
    def most_faulty(self, n: int) -> int:
        return (n - 1) // 2


@dataclasses.dataclass(frozen=True)
class TakesTheFirst(Median):
    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        return stack_ND[0].clone()


@dataclasses.dataclass(frozen=True)
class LooksAtAll(Median):
    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        return stack_ND.nan_to_num(7.0).median(0).values


@dataclasses.dataclass(frozen=True)
class SortsInPlace(Median):
    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        stack_ND.copy_(stack_ND.sort(0).values)
        return super().combine(stack_ND, scales_N)


@dataclasses.dataclass(frozen=True)
class AddsUp(Mean):
    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weights


@dataclasses.dataclass(frozen=True)
class NeedsTheWhole(Median):
    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        return stack_ND[int(stack_ND.norm(dim=1).argsort()[len(stack_ND) // 2])].clone()


@dataclasses.dataclass(frozen=True)
class SmoothsByOne(GeometricMedian):
    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        scales = super().judge(gram, weights)
        return weights / weights.sum() if bool((scales == 0).any()) else scales


@dataclasses.dataclass(frozen=True)
class NeedsMore(Krum):
    def check(self, n: int) -> str:
        return "" if n > self.least() else "too few"


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (SaysItBearsHalf(), "times the truth move it"),
        (TakesTheFirst(), "the order makes"),
        (LooksAtAll(), "looks at what was rejected"),
        (SortsInPlace(), "changed the contributions"),
        (AddsUp(), "of equal contributions"),
        (NeedsTheWhole(), "block by block"),
        (NeedsMore(1), "it refuses 5"),
        (SmoothsByOne(), "of 5 contributions are equal"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_check_finds(rule: Rule, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_rule(rule)


# -- validators ------------------------------------------------------------------------------------------------------

V = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    ("update", "eta", "accepted"),
    [
        (V, -0.001, True),
        (-V, -0.001, False),
        (-0.0009 * V, -0.001, True),
        (-0.0011 * V, -0.001, False),
        (torch.zeros(2), -0.001, True),
        (torch.zeros(2), 0.0, False),
        (V * 1.6**0.5 * 0.9999, -0.001, True),
        (V * 1.6**0.5 * 1.0001, -0.001, False),
        (torch.tensor([-4.0, 3.0]), -0.001, True),
    ],
)
def test_zeno_ps_by_hand(update: torch.Tensor, eta: float, accepted: bool) -> None:
    rule = ZenoPS(eta=eta)
    together = torch.stack((update, V))
    scales = rule.judge(gram_of(torch.cat((together, V[None])).double()), torch.ones(2, dtype=torch.float64))
    assert bool(scales[0] > 0) is accepted
    assert scales[2] == 0, "the reference is never applied"
    assert float(scales.sum()) == 1


def test_of_nothing_that_is_accepted_nothing_is_made() -> None:
    for rule in (ZenoPS(), ZenoPlusPlus(), FLTrust()):
        assert not rule(torch.stack((-V, -6 * V)), reference=V).any()


def test_zeno_plus_plus_punishes_the_norm_of_before() -> None:
    """An attack that is ten times as long is punished a hundredfold, although it would be shortened."""
    rule = ZenoPlusPlus(penalty=0.011)
    assert rule((9 * V)[None], reference=V).allclose(V)
    assert not rule((10 * V)[None], reference=V).any()
    assert not ZenoPlusPlus(penalty=0.0)(torch.tensor([[-4.0, 3.0]]) - 0.01 * V, reference=V).any()
    assert ZenoPlusPlus(penalty=0.0, epsilon=0.02)(torch.tensor([[-4.0, 3.0]]) - 0.01 * V, reference=V).any()
    assert torch.allclose(ZenoPlusPlus()((V / 2)[None], reference=V), V)
    assert torch.allclose(ZenoPlusPlus(shrinks=True)((V / 2)[None], reference=V), V / 2)


def test_zeno_ps_one_at_a_time_never_leads_away() -> None:
    generator = torch.Generator().manual_seed(9)
    for _ in range(200):
        update = torch.randn(5, generator=generator) * 3
        reference = torch.randn(5, generator=generator)
        moved = ZenoPSAsync(eta=0.0)(update[None], reference=reference)
        assert float(moved @ reference) >= -1e-6
        assert float(moved.norm()) <= 0.4 * float(reference.norm()) + 1e-6


def test_zeno_takes_those_that_lower_the_loss() -> None:
    rule = Zeno(2, penalty=0.1)
    scores = rule.scores(1.0, [0.5, 0.7, float("nan"), 0.4], [0.0, 0.0, 1.0, 9.0])
    assert scores.tolist() == pytest.approx([0.5, 0.3, -float("inf"), -0.3])
    given = torch.diag(torch.tensor([0.0, 0.0, 1.0, 9.0])), torch.ones(4), [1.0, 0.5, 0.7, float("nan"), 0.4]
    assert rule.judge(*given).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert rule.check(3) == ""
    assert "Use faulty=1" in rule.check(2)
    alike = torch.ones(2, 2), torch.ones(2)
    assert Zeno(1).judge(*alike, [1.0, 0.5, 0.5]).tolist() == [1.0, 0.0], "of equal ones the first"
    assert Zeno(1).judge(*alike).tolist() == [0.0, 0.0], "without losses nothing is accepted"
    nan = float("nan")
    assert Zeno(0).judge(*alike, [1.0, nan, 0.5]).tolist() == [0.0, 1.0], "what is not finite never counts"
    assert Zeno(0).judge(*alike, [nan, 0.5, 0.5]).tolist() == [0.0, 0.0]


def test_zeno_of_a_stack_takes_its_losses() -> None:
    stack = torch.tensor([[1.0], [3.0], [9.0]])
    assert Zeno(1)(stack, losses=[5.0, 4.0, 3.0, 9.0]).tolist() == [2.0]
    with pytest.raises(ValueError, match=re.escape("takes no reference, and needs 4 losses")):
        Zeno(1)(stack, losses=[5.0, 4.0])
    with pytest.raises(ValueError, match=re.escape("Zeno(faulty=3) leaves out all of 3")):
        Zeno(3)(stack, losses=[5.0, 4.0, 3.0, 9.0])
    with pytest.raises(PlanError, match=r"whole number from 0 - at `plan\.validator\.faulty`"):
        Zeno(-1)


@pytest.mark.parametrize("rule", [ZenoPS(), ZenoPSAsync(), ZenoPlusPlus(), FLTrust()], ids=repr)
def test_calibrated_is_as_with_a_longer_reference(rule: ReferenceRule) -> None:
    generator = torch.Generator().manual_seed(3)
    given, reference = torch.randn(5, 7, generator=generator) + 1, torch.ones(7) * 0.5
    longer = type(rule)(calibrate=2.5)  # type: ignore[call-arg]
    assert torch.equal(longer(given, reference=reference), rule(given, reference=2.5 * reference))
    judged = Judge(longer, print).scales(gram_of(torch.cat((given, reference[None]))), range(5), [1.0] * 5)
    assert torch.equal(rule.combine(torch.cat((given, reference[None])), judged), longer(given, reference=reference))
    assert not torch.equal(longer(given, reference=reference), rule(given, reference=reference))


@pytest.mark.parametrize("calibrate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_calibration_that_is_no_length(calibrate: float) -> None:
    with pytest.raises(PlanError, match=r"times as long as the reference.* - at `plan\.validator\.calibrate`"):
        ZenoPS(calibrate=calibrate)
