"""docs/choosing.md: every plan on it works, and every figure is what the result file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import offbeat
from benchmarks.claims import COST, MEASURES
from benchmarks.page import RESULTS
from offbeat.lab import results
from offbeat.plan import Plan

PAGE = (Path(__file__).parent.parent.parent / "docs" / "choosing.md").read_text()
PLANS = sorted(set(re.findall(r"`(Plan\(.*?\))`", PAGE)))
LINK = r"\(\[(?P<scenario>\w+)\]\(\.\./benchmarks/results/README\.md#(?P=scenario)\)\)"
RATIO = re.compile(
    r"(?P<measure>time per step|time to target|throughput) of `(?P<row>[^`]+)` (?P<value>[\d.]+) x "
    rf"`(?P<against>[^`]+)`'s\s+{LINK}"
)
WAITED = re.compile(rf"the others waited (?P<value>[\d.]+) s at most with `(?P<row>[^`]+)` {LINK}")


@pytest.mark.parametrize("text", PLANS)
def test_every_plan_works(text: str) -> None:
    plan = eval(text, {name: getattr(offbeat, name) for name in offbeat.__all__})
    assert Plan.from_toml(plan.to_toml()) == plan
    plan.check_world(8)


def test_every_figure_is_that_of_the_file() -> None:
    for pattern in (RATIO, WAITED):
        for found in pattern.finditer(PAGE):
            report = results.read(RESULTS / f"{found['scenario']}.json")
            measure, against = (COST, "") if pattern is WAITED else (found["measure"], found["against"])
            value = MEASURES[measure](report, found["row"], against)
            assert f"{value:.2f}" == found["value"], found[0]
    figures = re.findall(r"\d\.\d+ (?:x|s) ", PAGE)
    assert len(figures) == len(RATIO.findall(PAGE)) + len(WAITED.findall(PAGE)) >= 15, "no figure stands by itself"


def test_all_policies_and_fabrics_are_there() -> None:
    for name in ("BSP", "LocalSGD", "SSP", "RoundRobin", "Hybrid", "ASP", "ProcessGroup", "Elastic", "ParameterServer"):
        assert f"{name}(" in PAGE
    assert len(PLANS) >= 10


@pytest.mark.parametrize("word", ["spot", "preempt", "Wi-Fi"])
def test_what_people_look_for_has_a_row(word: str) -> None:
    assert re.search(rf"^\| [^|]*{word}[^|]* \| `Plan\(", PAGE, re.MULTILINE)
