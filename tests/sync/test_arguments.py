"""What a policy is made of is checked when it is made: nothing that only looks like a number, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.short_name import short_name
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, OuterSGD, Policy, RoundRobin

NO_WHOLE = (True, "3", -1, 2.5, math.nan, math.inf, [1])
NO_NUMBER = (True, None, "3", -1, math.nan, [1])
NO_TRUTH = (None, 1, "yes", math.nan)
MADE: list[tuple[type, dict[str, Any], str, str, tuple[Any, ...]]] = [
    (SSP, {}, "bound", "plan.sync", (*NO_WHOLE, None)),
    (DSSP, {"high": 4}, "low", "plan.sync", (*NO_WHOLE, None)),
    (DSSP, {"low": 2}, "high", "plan.sync", (*NO_WHOLE, None, 1)),
    (KSync, {}, "k", "plan.sync", (*NO_WHOLE, None, 0)),
    (KSync, {"k": 2}, "late", "plan.sync", (None, True, "Drop", 1)),
    (KSync, {"k": 2}, "wait_s", "plan.sync", (*NO_NUMBER, math.inf)),
    (LocalSGD, {}, "every", "plan.sync", (*NO_WHOLE, None, 0)),
    (LocalSGD, {"every": 2}, "after", "plan.sync", (*NO_WHOLE, None)),
    (LocalSGD, {"every": 2}, "outer", "plan.sync", (0.7, "OuterSGD", True, OuterSGD)),
    (LocalSGD, {"every": 2}, "delay", "plan.sync", (*NO_WHOLE, None, 2)),
    (LocalSGD, {"every": 2}, "policy", "plan.sync", (3, "ASP", ASP, KSync(2), RoundRobin(), LocalSGD(2))),
    (LocalSGD, {"every": 2}, "fragments", "plan.sync", (*NO_WHOLE, None, 0, 3)),
    (OuterSGD, {}, "lr", "plan.sync.outer", (*NO_NUMBER, 0, math.inf)),
    (OuterSGD, {}, "momentum", "plan.sync.outer", (*NO_NUMBER, 1, math.inf)),
    (OuterSGD, {}, "nesterov", "plan.sync.outer", NO_TRUTH),
    (RoundRobin, {}, "strict", "plan.sync", NO_TRUTH),
    (RoundRobin, {}, "half_duplex", "plan.sync", NO_TRUTH),
    (RoundRobin, {}, "slots", "plan.sync", (*NO_WHOLE, 0)),
    (RoundRobin, {}, "lead", "plan.sync", (*NO_WHOLE, None)),
    (RoundRobin, {}, "warmup", "plan.sync", (*NO_WHOLE, None)),
    (RoundRobin, {}, "gap_factor", "plan.sync", (*NO_NUMBER, 1.1)),
    (RoundRobin, {}, "grace", "plan.sync", NO_NUMBER),
    (RoundRobin, {}, "turn_lease_s", "plan.sync", (*NO_NUMBER, 0)),
    (RoundRobin, {}, "compute_lease_s", "plan.sync", (*NO_NUMBER, 0)),
    (Hybrid, {"outer": BSP(), "groups": 2}, "inner", "plan.sync", (None, "BSP", BSP, 3)),
    (Hybrid, {"inner": BSP(), "groups": 2}, "outer", "plan.sync", (None, "BSP", BSP, 3, LocalSGD(every=2))),
    (
        Hybrid,
        {"inner": BSP(), "outer": BSP()},
        "groups",
        "plan.sync",
        (*NO_WHOLE, None, 0, (), ((),), ((0, "1"),), ((True,),), ((0.0,),), ((0, 1), (1,)), ((-1,),)),
    ),
]


@pytest.mark.parametrize(
    ("kind", "rest", "name", "path", "value"),
    [(*row[:4], value) for row in MADE for value in row[4]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_nonsense_is_refused_with_the_value_and_the_path(
    kind: type, rest: dict[str, Any], name: str, path: str, value: object
) -> None:
    with pytest.raises(PlanError) as caught:
        kind(**rest, **{name: value})
    assert str(caught.value).startswith("Cannot ")
    assert (short_name(value) if not isinstance(value, LocalSGD) else "LocalSGD") in str(caught.value)
    assert str(caught.value).endswith(f"- at `{path}.{name}`.")


def test_every_argument_is_looked_at() -> None:
    looked_at = {(kind, name) for kind, _, name, *_ in MADE}
    kinds = {kind for kind, *_ in MADE}
    assert looked_at == {(kind, name) for kind in kinds for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RoundRobin(grace=1, turn_lease_s=2), RoundRobin(grace=1.0, turn_lease_s=2.0)),
        (LocalSGD(2, outer=OuterSGD(lr=1, momentum=0, nesterov=False)), LocalSGD(2, outer=OuterSGD(1.0, 0.0, False))),
    ],
    ids=["RoundRobin", "LocalSGD"],
)
def test_a_number_is_the_same_plan_however_it_is_written(one: Policy, other: Policy) -> None:
    plans = [Plan(sync=policy, fabric=ParameterServer()) for policy in (one, other)]
    assert plans[0].digest == plans[1].digest == Plan.from_toml(plans[0].to_toml()).digest
