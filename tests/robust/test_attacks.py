"""Attacks: each is what its paper says, and takes from the mean what it is meant to take."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.robust import Krum, Mean, Median
from offbeat.testing import attacks
from offbeat.testing.attacks import (
    BitFlip,
    Distance,
    Gaussian,
    Inflate,
    InnerProduct,
    LineSearch,
    LittleIsEnough,
    Mimic,
    NotFinite,
    RandomDirection,
    SignFlip,
    Zero,
    flipped_labels,
    hiding_deviations,
)

if TYPE_CHECKING:
    from offbeat.testing.attacks import Attack

N, D = 8, 400


def honest() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(D, generator=generator) + 0.5 * torch.randn(N, D, generator=generator)


def forged(attack: Attack) -> torch.Tensor:
    stack = honest()
    return attack.forge(stack[3], stack, torch.Generator().manual_seed(2))


def test_lies_are_as_defined() -> None:
    stack = honest()
    own, mean = stack[3], stack.mean(0)
    assert torch.equal(forged(SignFlip()), -6 * own)
    assert torch.equal(forged(BitFlip()), -stack[0])
    assert torch.allclose(forged(InnerProduct(0.1)), -0.1 * mean)
    assert torch.equal(forged(Mimic(2)), stack[2])
    assert torch.equal(forged(Zero()), torch.zeros(D))
    assert torch.equal(forged(Inflate()), 1000 * own)
    assert float(forged(Gaussian(3.0)).std()) == pytest.approx(3.0, rel=0.1)
    direction = forged(RandomDirection())
    assert float(direction.norm()) == pytest.approx(8 * float(own.norm()), rel=1e-4)
    assert abs(float(torch.cosine_similarity(direction, own, dim=0))) < 0.2
    little = forged(LittleIsEnough(z=0.3))
    assert torch.allclose(little, mean - 0.3 * stack.std(0, correction=0))
    assert forged(NotFinite()).isnan().sum() == 4
    assert forged(NotFinite(math.inf, part=1e-9)).isinf().sum() == 1


def test_the_deviations_are_those_of_the_formula() -> None:
    # n = 50, f = 24: s = 2, and 24 of 26 honest workers are below.
    assert hiding_deviations(50, 24) == pytest.approx(1.4261, abs=1e-3)
    assert hiding_deviations(10, 2) == 0
    assert hiding_deviations(4, 3) >= 0


@pytest.mark.parametrize("measure", ["max", "sum"])
def test_a_lie_within_the_distances_is_as_far_as_it_can_be(measure: str) -> None:
    stack = honest()
    lie = forged(Distance(measure))  # type: ignore[arg-type]
    among = torch.cdist(stack, stack).square()
    away = (stack - lie).square().sum(1)
    here, allowed = (away.max(), among.max()) if measure == "max" else (away.sum(), among.sum(1).max())
    assert float(here) == pytest.approx(float(allowed), rel=1e-3)
    assert float(lie @ stack.mean(0)) < float(stack.mean(0).square().sum())


def test_a_line_search_does_more_harm_than_a_flip() -> None:
    stack = honest()
    for rule in (Median(), Krum(2)):

        def harm(lie: torch.Tensor) -> float:
            return float((rule(torch.cat((stack, lie.repeat(2, 1)))) - stack.mean(0)).norm())  # noqa: B023

        assert harm(forged(LineSearch(rule, liars=2))) >= harm(forged(SignFlip()))
    assert float(forged(LineSearch(Mean())).norm()) > 500 * float(stack.mean(0).norm())


def test_flipped_labels_are_flipped_back() -> None:
    labels = torch.arange(10)
    assert torch.equal(flipped_labels(flipped_labels(labels, 10), 10), labels)


def test_every_attack_can_be_drawn_again() -> None:
    kinds: list[Any] = [
        kind
        for kind in vars(attacks).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not LineSearch
    ]
    assert len(kinds) == 13
    for kind in kinds:
        torch.testing.assert_close(forged(kind()), forged(kind()), equal_nan=True)
