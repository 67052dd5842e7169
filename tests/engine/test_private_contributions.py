"""Contributions are clipped and noised as a whole; what is not finite is no valid one."""

from __future__ import annotations

import functools
import math
import os
from typing import TYPE_CHECKING

import pytest
import torch

from offbeat import GaussianMechanism
from offbeat.engine.private_contributions import PrivateContributions, clip_reference_
from offbeat.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

MECHANISM = GaussianMechanism(max_norm=3.0, noise=0.5)


def protected(*vectors: torch.Tensor, draw_key: Callable[[int], bytes] = os.urandom) -> torch.Tensor:
    own = [vector.clone() for vector in vectors]
    PrivateContributions(draw_key).protect_(own, MECHANISM)
    return torch.cat([vector.double() for vector in own])


def test_all_blocks_are_clipped_together_and_each_element_is_noised() -> None:
    known = functools.partial(protected, draw_key=lambda size: bytes(range(size)))
    long = torch.full((60_000,), 4.0), torch.full((40_000,), 2.0, dtype=torch.float64)
    noise = known(torch.zeros(60_000), torch.zeros(40_000))
    norm = math.hypot(*(float(vector.norm()) for vector in long))
    clipped = (known(*long) - noise).norm()
    assert float(clipped) == pytest.approx(3.0, rel=1e-3)
    torch.testing.assert_close(
        known(*long) - noise, torch.cat([v.double() for v in long]) * 3 / norm, atol=1e-6, rtol=0
    )
    short = torch.full((100_000,), 1e-3)
    torch.testing.assert_close(known(short) - noise, short.double(), atol=1e-6, rtol=0)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.03)
    assert float(noise.std()) == pytest.approx(1.5, rel=0.02)
    assert float(noise.pow(4).mean()) == pytest.approx(3 * 1.5**4, rel=0.05)
    assert torch.equal(noise, noise.float().double()), "no bit of a wider type is left of what was there"


def test_noise_is_nobody_elses() -> None:
    """It is another each time, and does not go by torch's or NumPy's generators."""
    torch.manual_seed(0)
    first = protected(torch.zeros(1000))
    torch.manual_seed(0)
    second = protected(torch.zeros(1000))
    assert abs(float((first * second).sum() / first.norm() / second.norm())) < 0.2
    assert torch.initial_seed() == 0
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_turned_into_noise(wrong: float) -> None:
    vectors = [torch.ones(5), torch.ones(3)]
    vectors[1][2] = wrong
    one = PrivateContributions()
    one.protect_(vectors, MECHANISM)
    assert all(bool(vector.isnan().all()) for vector in vectors), "nothing of it is sent without noise"
    assert one.count == 1, "somebody sees that there was one"
    clip_reference_(vectors, MECHANISM)


def test_a_norm_that_no_float32_holds() -> None:
    huge = protected(torch.full((1000,), 3e38))
    assert float(huge.norm()) < 3 + 2 * 1.5 * math.sqrt(1000)


def test_a_reference_is_clipped_alone() -> None:
    vectors = [torch.full((4,), 3.0), torch.full((5,), 0.0)]
    clip_reference_(vectors, MECHANISM)
    torch.testing.assert_close(vectors[0], torch.full((4,), 1.5))
    assert not vectors[1].any()


def test_the_count_is_in_a_checkpoint() -> None:
    first, second = PrivateContributions(), PrivateContributions()
    assert first.state_dict() == {}
    for _ in range(3):
        first.protect_([torch.ones(2)], MECHANISM)
    second.load_state_dict(first.state_dict())
    assert second.count == 3
    second.protect_([torch.ones(2)], MECHANISM)
    second.load_state_dict(first.state_dict())
    assert second.count == 4, "what was spent since is spent"
    second.load_state_dict({})
    assert second.count == 4
    with pytest.raises(ModelError, match="private contributions is -1"):
        second.load_state_dict({"contributions": -1})
