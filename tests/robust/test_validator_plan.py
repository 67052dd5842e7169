"""Plans with a validator: which can be, and how they are written."""

from __future__ import annotations

import re
from typing import Any

import pytest

from offbeat import (
    ASP,
    BSP,
    GRBS,
    SSP,
    BatchTuning,
    Carry,
    Elastic,
    ErrorFeedback,
    ErrorReset,
    KSync,
    LocalSGD,
    LookAhead,
    ParameterServer,
    Plan,
    RandomK,
    Sign,
    TopK,
)
from offbeat.cli.part_syntax import read_part
from offbeat.errors import PlanError
from offbeat.robust import FLTrust, Krum, Median, Zeno, ZenoPlusPlus, ZenoPS, ZenoPSAsync
from offbeat.short_name import short_name

SERVER = ParameterServer()


@pytest.mark.parametrize(
    ("sync", "rule"),
    [
        (BSP(), ZenoPS(rho=1.0)),
        (LocalSGD(8), FLTrust()),
        (ASP(), ZenoPSAsync()),
        (ASP(), ZenoPlusPlus(penalty=0.1)),
        (LocalSGD(2), None),
        (LocalSGD(8, policy=ASP()), ZenoPSAsync()),
        (BSP(), Zeno(2)),
        (KSync(4), Zeno(2, penalty=0.01)),
        (LocalSGD(8), Zeno(1)),
    ],
    ids=repr,
)
def test_it_is_read_back(sync: Any, rule: Any) -> None:
    plan = Plan(sync=sync, fabric=SERVER, validator=rule)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert ("validator" in plan.to_toml()) == (rule is not None), "older plans keep their digest"


@pytest.mark.parametrize(
    ("sync", "codec", "rule"),
    [
        (LocalSGD(8), ErrorReset(GRBS(5)), ZenoPS()),
        (LocalSGD(8), Carry(GRBS(5)), ZenoPS(scope="block")),
        (LocalSGD(8, policy=ASP()), LookAhead(GRBS(5)), ZenoPSAsync()),
        (LocalSGD(8, policy=ASP()), Carry(GRBS(5)), ZenoPlusPlus()),
        (ASP(), ErrorFeedback(GRBS(32)), ZenoPlusPlus()),
        (BSP(), ErrorFeedback(Sign()), FLTrust()),
        (BSP(), ErrorFeedback(Sign()), Zeno(1)),
        (BSP(), ErrorFeedback(TopK(0.1)), Zeno(1)),
    ],
    ids=repr,
)
def test_zenops_is_one_plan(sync: Any, codec: Any, rule: Any) -> None:
    plan = Plan(sync=sync, codec=codec, fabric=SERVER, validator=rule)
    assert Plan.from_toml(plan.to_toml()) == plan


def test_as_on_the_command_line() -> None:
    assert read_part("validator", "ZenoPS(0.0, rho=1.0)") == ZenoPS(0.0, 1.0)
    with pytest.raises(PlanError, match=r"did you mean 'ZenoPS'.* - at `plan\.validator\.kind`"):
        read_part("validator", "ZenoPs")
    with pytest.raises(PlanError, match="such as 'ZenoPS"):
        read_part("validator", "1 +")


def test_an_error_ends_with_its_path() -> None:
    text = Plan(fabric=SERVER, validator=ZenoPS()).to_toml().replace("rho = 0.6", "rho = -2.0")
    with pytest.raises(PlanError, match=r"- at `plan\.validator\.rho`"):
        Plan.from_toml(text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plan(fabric=SERVER, rule=Median(), validator=ZenoPS()), "already combined by Median()"),
        (lambda: Plan(validator=ZenoPS()), "use fabric=ParameterServer()"),
        (lambda: Plan(fabric=Elastic(), validator=ZenoPS()), "use fabric=ParameterServer()"),
        (lambda: Plan(fabric=ParameterServer(collocated=True), validator=ZenoPS()), "that workers have no hold on"),
        (lambda: Plan(sync=KSync(2), fabric=SERVER, validator=ZenoPS()), "use BSP(), LocalSGD(...) or ASP()"),
        (lambda: Plan(sync=SSP(4), fabric=SERVER, validator=FLTrust()), "use BSP(), LocalSGD(...) or ASP()"),
        (lambda: Plan(sync=ASP(), fabric=SERVER, validator=ZenoPS()), "use ZenoPSAsync(), ZenoPlusPlus() or FLTrust()"),
        (lambda: Plan(fabric=SERVER, validator=ZenoPSAsync()), "use ZenoPS(), or ASP()"),
        (lambda: Plan(sync=LocalSGD(8), fabric=SERVER, validator=ZenoPSAsync()), "use ZenoPS(), or ASP()"),
        (
            lambda: Plan(sync=LocalSGD(8, policy=ASP()), fabric=SERVER, validator=ZenoPS()),
            "use ZenoPSAsync(), ZenoPlusPlus() or FLTrust()",
        ),
        (
            lambda: Plan(sync=LocalSGD(8), codec=Carry(TopK(0.1)), fabric=SERVER, validator=ZenoPS()),
            "a contribution and its reference are of different elements: use a codec whose elements are the same",
        ),
        (
            lambda: Plan(codec=ErrorFeedback(Sign()), fabric=SERVER, validator=ZenoPS()),
            "all contributions are equally long, whatever they were made of",
        ),
        (
            lambda: Plan(codec=ErrorFeedback(TopK(0.1)), fabric=SERVER, rule=Median()),
            "each worker sends other elements, and what is compared is which",
        ),
        (
            lambda: Plan(codec=ErrorFeedback(RandomK(0.1, "private")), fabric=SERVER, rule=Krum(1)),
            "each worker sends other elements, and what is compared is which",
        ),
        (lambda: Plan(fabric=SERVER, validator=ZenoPS(), tuning=BatchTuning()), "use tuning=None"),
        (lambda: Plan(fabric=SERVER, validator=Median()), "for rules without a reference there is rule="),
        (lambda: Plan(fabric=SERVER, validator=ZenoPS), "made with (...)"),  # type: ignore[arg-type]
        (
            lambda: Plan(fabric=SERVER, validator=ZenoPS()).swapped('fabric = { kind = "ProcessGroup" }'),
            "use fabric=ParameterServer()",
        ),
        (lambda: Plan(fabric=SERVER, validator=ZenoPS()).swapped('sync = { kind = "ASP" }'), "it is for updates of"),
        (
            lambda: Plan(fabric=SERVER, validator=ZenoPS()).swapped('sync = { kind = "LocalSGD", every = 8 }'),
            "until all have heard of it there are gradients and changes, which cannot be compared",
        ),
        (
            lambda: Plan(fabric=SERVER, rule=Median()).swapped('sync = { kind = "LocalSGD", every = 8 }'),
            "until all have heard of it there are gradients and changes, which cannot be compared",
        ),
        (
            lambda: Plan(sync=LocalSGD(4), fabric=SERVER, validator=ZenoPS()).swapped(
                'sync = { kind = "LocalSGD", every = 8 }'
            ),
            "there are changes of 4 and of 8 steps, which cannot be compared with each other",
        ),
        (lambda: Plan(fabric=SERVER, validator=ZenoPS()).check_world(257), "256 is the most. Use ASP()"),
        (
            lambda: Plan(sync=KSync(2, late="carry"), fabric=SERVER, validator=Zeno(1)),
            "a validator that is late waits for the next update, and nobody judges that: use KSync(k, late='drop')",
        ),
        (
            lambda: Plan(fabric=SERVER, rule=Median(), too_few="wait"),  # type: ignore[arg-type]
            "choose one of skip, hold, raise - at `plan.too_few`",
        ),
        (
            lambda: Plan(fabric=SERVER, too_few="hold"),
            "an update may be of any number of contributions: use too_few='skip' - at `plan.too_few`",
        ),
        (
            lambda: Plan(fabric=SERVER, rule=Median()).swapped('too_few = "hold"'),
            "start again with the other plan - at `plan.too_few`",
        ),
        (lambda: Plan(fabric=SERVER).swapped('validator = { kind = "ZenoPS" }'), "Cannot swap None for ZenoPS"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make()


ONE_WORKERS = (
    "it keeps the best contributions of an update, and with {} each is of one worker: use ZenoPlusPlus() and ASP(), "
    "or BSP(), KSync(k) or LocalSGD(...) - at `plan.validator`."
)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *(
            (
                lambda sync=sync: Plan(sync=sync, fabric=SERVER, validator=Zeno(2)),
                f"Cannot judge by Zeno(faulty=2): {ONE_WORKERS.format(short_name(sync))}",
            )
            for sync in (ASP(), SSP(4), LocalSGD(8, policy=ASP()))
        ),
        (
            lambda: Plan(sync=KSync(2), fabric=SERVER, validator=Zeno(2)),
            "Cannot judge with KSync(k=2): Zeno(faulty=2) leaves out all of 2 "
            "contributions. Use faulty=1, or more workers - at `plan.validator`.",
        ),
        (
            lambda: Plan(fabric=SERVER, validator=Zeno(3)).check_world(3),
            "Cannot judge: Zeno(faulty=3) leaves out all of 3 contributions. Use faulty=2, or more "
            "workers - at `plan.validator`.",
        ),
        (
            lambda: Plan(fabric=SERVER, rule=Zeno(1)),
            "Cannot combine by Zeno(faulty=1): it compares losses on trusted data, which only a "
            "validator can bring: give it as validator=, or use Median(), MultiKrum(...) or GeometricMedian(), which "
            "compare them with each other - at `plan.rule`.",
        ),
        (
            lambda: Plan(fabric=SERVER, validator=Zeno(1), tuning=BatchTuning()),
            "use tuning=None - at `plan.validator`.",
        ),
        (lambda: Zeno(-1), "choose a whole number from 0 - at `plan.validator.faulty`."),
    ],
)
def test_what_zeno_cannot_judge_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make()


def test_a_validator_comes_alone() -> None:
    Plan(fabric=SERVER, validator=Zeno(3)).check_world(1)
