"""One normal form: plans are equal if and only if their digests are, and TOML in between changes neither."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from offbeat import ASP, GRBS, LocalSGD, OuterSGD, ParameterServer, Plan, TopK
from offbeat.errors import PlanError
from offbeat.plan import _KINDS, _ROOMS, table_of
from offbeat.robust import CentredClipping, ZenoPlusPlus

NUMBERS = (0, 1, 2, 4, 32, 0.0, -0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 1e7, math.inf)
WORDS = ("", "h0:7000", "h1:7000")


def values(hint: Any, room: str, depth: int) -> st.SearchStrategy[Any]:
    """Values of a field: numbers of the other type and other forms of the same are among them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0], room, depth), max_size=3).map(tuple)
    if arguments:  # one or the other
        return st.one_of(*(values(one, room, depth) for one in arguments))
    if hint in _ROOMS:
        room = room if room in _KINDS and _ROOMS[hint] in {room, "rule"} else _ROOMS[hint]
        return parts(room, depth - 1) if depth else st.nothing()
    if dataclasses.is_dataclass(hint):
        return made(hint, depth)
    if hint is type(None):
        return st.none()
    return {
        int: st.sampled_from([*(one for one in NUMBERS if isinstance(one, int)), 512]),
        float: st.sampled_from(NUMBERS),
        bool: st.booleans(),
        str: st.sampled_from(WORDS),
    }[hint]


@st.composite
def made(draw: st.DrawFn, kind: Any, depth: int = 2) -> Any:
    """One part, or plan, whose fields are anything, as far as they are not refused."""
    hints, arguments = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        needs_one = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needs_one or draw(st.booleans()):
            arguments[field.name] = draw(values(hints[field.name], field.name, depth))
    try:
        return kind(**arguments)
    except PlanError:
        assume(False)


def parts(room: str, depth: int = 2) -> st.SearchStrategy[Any]:
    return st.one_of(*(made(kind, depth) for kind in _KINDS[room].values()))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan with one or two parts of its own, on a server or without one."""
    rooms = draw(st.lists(st.sampled_from(sorted({f.name for f in dataclasses.fields(Plan)})), max_size=2))
    hints = typing.get_type_hints(Plan)
    fields = {name: draw(values(hints[name], name, 2)) for name in rooms}
    if draw(st.booleans()):
        fields.setdefault("fabric", ParameterServer())
    try:
        return Plan(**fields)
    except PlanError:
        assume(False)
        raise


def twin(value: Any) -> Any:
    """The same with numbers of other types, wherever that is accepted."""
    if isinstance(value, tuple):
        return tuple(map(twin, value))
    if not dataclasses.is_dataclass(value):
        is_whole = type(value) is float and value.is_integer()
        return int(value) if is_whole else value
    for name, one in ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value)):
        for other in (twin(one), -0.0 if one == 0 and type(one) is float else one):
            try:
                value = dataclasses.replace(value, **{name: other})  # type: ignore[type-var]
            except PlanError:
                continue
    return value


LOOSELY = settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@LOOSELY
@given(plans())
def test_equal_plans_have_equal_digests_and_toml_changes_neither(plan: Plan) -> None:
    other = twin(plan)
    assert other == plan
    assert other.digest == plan.digest
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert again.digest == plan.digest


@LOOSELY
@given(st.sampled_from(sorted(_KINDS)).flatmap(lambda room: st.tuples(parts(room), parts(room))))
def test_parts_are_equal_if_their_tables_are(pair: tuple[Any, Any]) -> None:
    one, other = pair
    assert (one == other) == (repr(table_of(one)) == repr(table_of(other)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Plan(codec=GRBS(4)), Plan(codec=GRBS(4.0))),
        (Plan(codec=TopK(1)), Plan(codec=TopK(1.0))),
        (Plan(sync=LocalSGD(4, outer=OuterSGD(1, 0, False))), Plan(sync=LocalSGD(4, outer=OuterSGD(1.0, -0.0, False)))),
        tuple(Plan(sync=ASP(), fabric=ParameterServer(), validator=ZenoPlusPlus(penalty=zero)) for zero in (0.0, -0.0)),
        (
            Plan(fabric=ParameterServer(patience_s=5), rule=CentredClipping(3)),
            Plan(fabric=ParameterServer(patience_s=5.0), rule=CentredClipping(3.0)),
        ),
    ],
)
def test_equal_plans_have_equal_digests(one: Plan, other: Plan) -> None:
    assert one == other
    assert one.digest == other.digest == Plan.from_toml(one.to_toml()).digest
