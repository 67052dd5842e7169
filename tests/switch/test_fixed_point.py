"""Fixed point: exponents hold, totals are within the bound, and what a float32 can say exactly stays exact."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import NumericsError
from offbeat.switch.fixed_point import LEAST_EXPONENT, MOST_EXPONENT, error_bound, exponents, to_floats, to_integers

floats = st.floats(-(2.0**100), 2.0**100, width=32)
chunks = st.lists(floats, min_size=1, max_size=16)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@given(st.integers(1, 64), st.lists(chunks, min_size=1, max_size=4))
def test_a_total_is_within_the_bound(workers: int, parts: list[list[float]]) -> None:
    width = max(map(len, parts))
    vectors = [np.array([part + [0.0] * (width - len(part))], np.float32) for part in parts[:workers]]
    exponent = np.max([exponents(vector) for vector in vectors], axis=0)
    if exponent[0] == -127:
        assert not np.any(vectors)
        return
    total = np.sum([to_integers(vector, exponent, workers).astype(np.int64) for vector in vectors], axis=0)
    assert np.abs(total).max() < 1 << 31
    got = to_floats(total.astype(np.int32), exponent, workers)
    exact = np.sum([vector.astype(np.float64) for vector in vectors], axis=0)
    bound = error_bound(int(exponent[0]), workers) + np.abs(exact) * 2**-23
    assert (np.abs(got - exact) <= bound).all()


@given(chunks)
def test_an_exponent_is_above_every_value(part: list[float]) -> None:
    (exponent,) = exponents(np.array([part], np.float32)).tolist()
    most = max(map(abs, part))
    if most:
        assert most < 2.0**exponent
        assert exponent == LEAST_EXPONENT or most >= 2.0 ** (exponent - 1)
    else:
        assert exponent == -127


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 64])
def test_what_is_near_the_largest_value_is_exact(workers: int) -> None:
    numbers = np.random.default_rng(0)
    spare = 7 - (workers - 1).bit_length()
    vector = (numbers.uniform(2.0**-spare, 1, (1, 64)) * numbers.choice([-1, 1], (1, 64))).astype(np.float32)
    exponent = exponents(vector)
    assert np.array_equal(to_floats(to_integers(vector, exponent, workers), exponent, workers), vector)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**MOST_EXPONENT])
def test_what_has_no_exponent_is_refused(value: float) -> None:
    with pytest.raises(NumericsError, match="through a switch"):
        exponents(np.array([[1.0, value]], np.float32))


def test_the_order_of_a_sum_does_not_matter() -> None:
    vectors = np.random.default_rng(1).normal(size=(8, 1, 256)).astype(np.float32)
    exponent = np.max([exponents(vector) for vector in vectors], axis=0)
    integers = [to_integers(vector, exponent, 8) for vector in vectors]

    def added(some: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.asarray(functools.reduce(np.add, some))

    assert not np.array_equal(added(list(vectors)), added(list(vectors[::-1]))), "of floats it does not matter either"
    forth, back = (to_floats(added(some), exponent, 8) for some in (integers, integers[::-1]))
    assert np.array_equal(forth, back)
