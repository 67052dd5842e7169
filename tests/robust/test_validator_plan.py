"""Plans with a validator: which can be, and how they are written."""

from __future__ import annotations

import re
from typing import Any

import pytest

from offbeat import ASP, BSP, SSP, BatchTuning, Elastic, KSync, LocalSGD, ParameterServer, Plan
from offbeat.cli.part_syntax import read_part
from offbeat.errors import PlanError
from offbeat.robust import FLTrust, Median, ZenoPlusPlus, ZenoPS, ZenoPSAsync

SERVER = ParameterServer()


@pytest.mark.parametrize(
    ("sync", "rule"),
    [
        (BSP(), ZenoPS(rho=1.0)),
        (LocalSGD(8), FLTrust()),
        (ASP(), ZenoPSAsync()),
        (ASP(), ZenoPlusPlus(penalty=0.1)),
        (LocalSGD(2), None),
    ],
    ids=repr,
)
def test_it_is_read_back(sync: Any, rule: Any) -> None:
    plan = Plan(sync=sync, fabric=SERVER, validator=rule)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert ("validator" in plan.to_toml()) == (rule is not None), "older plans keep their digest"


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
        (lambda: Plan(fabric=SERVER, validator=ZenoPS(), tuning=BatchTuning()), "use tuning=None"),
        (lambda: Plan(fabric=SERVER, validator=Median()), "for rules without a reference there is rule="),
        (lambda: Plan(fabric=SERVER, validator=ZenoPS), "made with (...)"),  # type: ignore[arg-type]
        (
            lambda: Plan(fabric=SERVER, validator=ZenoPS()).swapped('fabric = { kind = "ProcessGroup" }'),
            "use fabric=ParameterServer()",
        ),
        (lambda: Plan(fabric=SERVER, validator=ZenoPS()).swapped('sync = { kind = "ASP" }'), "it is for updates of"),
        (lambda: Plan(fabric=SERVER).swapped('validator = { kind = "ZenoPS" }'), "Cannot swap None for ZenoPS"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make()
