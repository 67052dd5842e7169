"""Short names of parts of a plan: code that makes the same part, without what need not be said."""

from __future__ import annotations

import pytest

import offbeat
from offbeat.short_name import short_name

SHORT = {
    "RoundRobin()": offbeat.RoundRobin(),
    "RoundRobin(grace=0.25)": offbeat.RoundRobin(grace=0.25),
    "SSP(bound=4)": offbeat.SSP(4),
    "ParameterServer()": offbeat.ParameterServer(),
    "ParameterServer(addresses=('a:1',))": offbeat.ParameterServer(addresses=("a:1",)),
    "WaitThreshold(loose=RoundRobin())": offbeat.WaitThreshold(loose=offbeat.RoundRobin()),
    "Plan()": offbeat.Plan(),
    "Plan(sync=ASP(), fabric=ParameterServer())": offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.ParameterServer()),
    "None": None,
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_name_makes_the_same_part(name: str) -> None:
    assert short_name(SHORT[name]) == name
    assert eval(name, {public: getattr(offbeat, public) for public in offbeat.__all__}) == SHORT[name]
