"""What parts are made of is checked when they are made, in one place: nothing that only looks like a number."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offbeat.codec import GRBS, QSGD, Carry, ErrorReset, FixedPoint, PowerSGD, RandomK, TopK
from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.plan import Plan
from offbeat.privacy import GaussianMechanism
from offbeat.robust import (
    CentredClipping,
    ClippedMean,
    FLTrust,
    GeometricMedian,
    Kardam,
    Krum,
    MultiKrum,
    Zeno,
    ZenoPlusPlus,
    ZenoPS,
    ZenoPSAsync,
)

NO_NUMBER: tuple[Any, ...] = (True, "a", "4", math.nan, [1])
NO_WHOLE: tuple[Any, ...] = (*NO_NUMBER, 2.5, 8.0)
PARTS: list[tuple[type, dict[str, Any], str, tuple[Any, ...]]] = [
    (TopK, {}, "ratio", NO_NUMBER),
    (RandomK, {}, "ratio", NO_NUMBER),
    (GRBS, {}, "ratio", (*NO_NUMBER, math.inf)),
    (GRBS, {"ratio": 4}, "block", NO_WHOLE),
    (QSGD, {}, "bits", NO_WHOLE),
    (QSGD, {"bits": 8}, "group", NO_WHOLE),
    (FixedPoint, {}, "bits", NO_WHOLE),
    (PowerSGD, {}, "rank", NO_WHOLE),
    (ErrorReset, {}, "every", NO_WHOLE),
    (Krum, {}, "faulty", NO_WHOLE),
    (MultiKrum, {"faulty": 1}, "best", NO_WHOLE),
    (Kardam, {"faulty": 1}, "workers", NO_WHOLE),
    (CentredClipping, {}, "radius", NO_NUMBER),
    (CentredClipping, {}, "iterations", NO_WHOLE),
    (ClippedMean, {}, "norm", NO_NUMBER),
    (GeometricMedian, {}, "iterations", NO_WHOLE),
    (GeometricMedian, {}, "smoothing", NO_NUMBER),
    (Zeno, {}, "faulty", NO_WHOLE),
    (Zeno, {"faulty": 1}, "penalty", NO_NUMBER),
    (FLTrust, {}, "calibrate", NO_NUMBER),
    (ZenoPS, {}, "eta", NO_NUMBER),
    (ZenoPS, {}, "rho", NO_NUMBER),
    (ZenoPSAsync, {}, "eta", NO_NUMBER),
    (ZenoPSAsync, {}, "alpha", NO_NUMBER),
    (ZenoPlusPlus, {}, "penalty", NO_NUMBER),
    (ZenoPlusPlus, {}, "epsilon", NO_NUMBER),
    (GaussianMechanism, {"noise": 1.0}, "max_norm", NO_NUMBER),
    (GaussianMechanism, {"max_norm": 1.0}, "noise", NO_NUMBER),
    (GaussianMechanism, {"max_norm": 1.0, "noise": 1.0}, "delta", NO_NUMBER),
]


@pytest.mark.parametrize(
    ("kind", "rest", "name", "value"),
    [(*row[:3], value) for row in PARTS for value in row[3]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_nonsense_is_refused_with_the_value_and_the_path(
    kind: type, rest: dict[str, Any], name: str, value: object
) -> None:
    with pytest.raises(PlanError) as caught:
        kind(**rest, **{name: value})
    assert str(caught.value).startswith("Cannot ")
    assert repr(value) in str(caught.value)
    assert " - at `plan." in str(caught.value)


def test_from_toml_as_well() -> None:
    with pytest.raises(PlanError, match=r"Cannot compare with eta=nan: choose a number.* - at `plan\.validator\.eta`"):
        Plan.from_toml('[validator]\nkind = "ZenoPS"\neta = nan\n')


def test_an_error_that_is_kept_already_is_not_reset() -> None:
    with pytest.raises(PlanError, match="what it does not send is kept already"):
        ErrorReset(Carry(GRBS(4)), every=4)


def test_what_is_in_a_range() -> None:
    assert [value for value in range(6) if value in WholeNumbers(2, 4)] == [2, 3, 4]
    values = (-1, 0, 0.0, 0.5, 1, 1.0, 2)
    assert [value for value in values if value in RealNumbers(0, below=1)] == [0, 0.0, 0.5]
    assert [value in RealNumbers(above=0, finite=finite) for finite in (True, False) for value in (math.inf, 1)] == [
        False, True, True, True,
    ]  # fmt: skip
    assert 10**400 not in RealNumbers(), "it is no float"
