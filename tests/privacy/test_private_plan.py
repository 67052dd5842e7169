"""Plans with privacy: which can be, and how they are written."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from offbeat import (
    ASP,
    BSP,
    GRBS,
    QSGD,
    Carry,
    Cast,
    Elastic,
    ErrorFeedback,
    GaussianMechanism,
    LocalSGD,
    ParameterServer,
    Plan,
    Prophet,
    Switch,
)
from offbeat.errors import PlanError
from offbeat.robust import CentredClipping, FLTrust, Krum, Median, ZenoPlusPlus, ZenoPS, ZenoPSAsync
from offbeat.short_name import short_name

SERVER, NOISE = ParameterServer(), GaussianMechanism(max_norm=0.5, noise=1.1)
NOISED = short_name(NOISE)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"codec": ErrorFeedback(GRBS(32))},
        {"sync": LocalSGD(8), "codec": QSGD(8)},
        {"sync": ASP()},
        {"rule": Median()},
        {"rule": Krum(1)},
        {"rule": CentredClipping()},
        {"validator": ZenoPS(), "sync": LocalSGD(4), "codec": GRBS(4)},
        {"validator": FLTrust(), "codec": Cast("bf16")},
        {"validator": ZenoPSAsync(), "sync": ASP()},
        {"validator": ZenoPlusPlus(), "sync": LocalSGD(8, policy=ASP())},
    ],
    ids=repr,
)
def test_it_is_read_back(parts: dict[str, Any]) -> None:
    plan = Plan(fabric=SERVER, privacy=NOISE, **parts)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert eval(repr(NOISE), {"GaussianMechanism": GaussianMechanism}) == NOISE
    without = Plan(fabric=SERVER, **parts)
    assert "privacy" not in without.to_toml(), "older plans keep their digest"
    assert without.digest != plan.digest


def test_an_error_ends_with_its_path() -> None:
    text = Plan(fabric=SERVER, privacy=NOISE).to_toml()
    with pytest.raises(PlanError, match=r"- at `plan\.privacy\.noise`\.$"):
        Plan.from_toml(text.replace("noise = 1.1", "noise = -1.0"))
    with pytest.raises(PlanError, match=r"Unknown key 'nose' .*did you mean 'noise'.* - at `plan\.privacy\.nose`"):
        Plan.from_toml(text.replace("noise = 1.1", "nose = 1.0"))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_numbers_that_cannot_be(value: float) -> None:
    for field, says in (
        (
            "max_norm",
            f"Cannot clip contributions to a norm of {value!r}: nothing would be left, or nothing clipped. Use a "
            "number above 0, such as the median of their norms - at `plan.privacy.max_norm`.",
        ),
        (
            "noise",
            f"Cannot hide contributions by noise={value!r}: without noise nothing is hidden. Use a number above 0, "
            "such as 1.0, or privacy=None - at `plan.privacy.noise`.",
        ),
        (
            "delta",
            f"Cannot tell epsilon at delta={value!r}: it is a probability. Use one far below 1 / samples, such as "
            "1e-5 - at `plan.privacy.delta`.",
        ),
    ):
        with pytest.raises(PlanError, match=f"^{re.escape(says)}$"):
            GaussianMechanism(**{field: value})
    with pytest.raises(PlanError, match="probability"):
        GaussianMechanism(delta=1.0)


OF_PARTS = "the first parts of a gradient leave before the norm of the whole is known: use fabric=ParameterServer()"
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({}, f"Cannot use {NOISED}: on ProcessGroup() {OF_PARTS} - at `plan.privacy`."),
    (
        {"fabric": Elastic()},
        f"Cannot use {NOISED}: on Elastic() {OF_PARTS} - at `plan.privacy`.",
    ),
    (
        {"fabric": Switch()},
        f"Cannot use {NOISED}: on Switch() {OF_PARTS} - at `plan.privacy`.",
    ),
    (
        {"fabric": SERVER, "sync": LocalSGD(8), "codec": Carry(GRBS(4))},
        f"Cannot use {NOISED}: with {short_name(Carry(GRBS(4)))} what is not sent stays in a worker's own "
        "parameters, and its noise would be clipped, and noised, with the next contribution: use ErrorFeedback(...) "
        "- at `plan.privacy`.",
    ),
    (
        {"fabric": SERVER, "scheduling": Prophet()},
        f"Cannot use {NOISED}: with Prophet() blocks are pushed before the norm of all of "
        "them is known: use scheduling=None - at `plan.privacy`.",
    ),
    (
        {"fabric": SERVER, "rule": CentredClipping(radius=1.0)},
        f"Cannot use {NOISED}: with CentredClipping(radius=1.0) all contributions are cut, "
        "since noise is in their distances and not in the radius: use CentredClipping(), which goes by their median "
        "- at `plan.privacy`.",
    ),
    (
        {"fabric": SERVER, "codec": QSGD(8), "validator": FLTrust()},
        f"Cannot use {short_name(FLTrust())} with privacy={NOISED}: with {short_name(QSGD(8))} elements, "
        "and the noise in them, are not sent as they are: use Dense(), Cast() or GRBS(4) - at `plan.validator`.",
    ),
    (
        {"fabric": SERVER, "validator": ZenoPS(rho=0.0)},
        f"Cannot use {short_name(ZenoPS(rho=0.0))} with privacy={NOISED}: what is shorter than the "
        "reference cannot be told from noise: use rho=0.6 - at `plan.validator`.",
    ),
]


@pytest.mark.parametrize(("parts", "says"), REFUSALS)
def test_what_cannot_be_is_refused(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(says)}$"):
        Plan(privacy=NOISE, **parts)


def test_another_thing_is_no_privacy() -> None:
    says = (
        "Cannot protect contributions by 1.0: use GaussianMechanism(max_norm=1.0, noise=1.0), or None - at "
        "`plan.privacy`."
    )
    with pytest.raises(PlanError, match=f"^{re.escape(says)}$"):
        Plan(fabric=SERVER, privacy=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("here", "there"), [(NOISE, None), (None, NOISE), (NOISE, GaussianMechanism())])
def test_it_is_not_swapped_while_training(here: Any, there: Any) -> None:
    """To train on with less is a decision of its own: a new run, from a checkpoint."""
    plan, new = (Plan(fabric=SERVER, privacy=privacy) for privacy in (here, there))
    says = (
        f"Cannot swap {short_name(here)} for {short_name(there)} while training: only the synchronization policy can "
        "be, its controller, and ProcessGroup() or Elastic() for ParameterServer() or back. Save a checkpoint, and "
        "start again with the other plan - at `plan.privacy`."
    )
    with pytest.raises(PlanError, match=f"^{re.escape(says)}$"):
        plan.swapped(new.to_toml(), whole=True)
    other = plan.swapped('sync = { kind = "LocalSGD", every = 4 }')
    assert (other.sync, other.privacy) == (LocalSGD(4), here), "while the policy is"
    assert plan.sync == BSP()
