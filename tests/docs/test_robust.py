"""The plans in docs/robust.md can be made, and the one in Python is the one in TOML."""

from __future__ import annotations

import re
from pathlib import Path

import offbeat
from benchmarks.page import robust_page
from offbeat import Plan

PAGE = (Path(__file__).parents[2] / "docs/robust.md").read_text()


def test_the_plan_of_the_page() -> None:
    told = [Plan.from_toml(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
    names = {"offbeat": offbeat}
    (code,) = re.findall(r"```python\nplan = (.*?)\nrun = ", PAGE, re.DOTALL)
    assert eval(code, names) == told[0]
    assert {plan.rule or plan.validator or plan.privacy for plan in told} == {
        offbeat.robust.TrimmedMean(2),
        offbeat.robust.ZenoPS(),
        offbeat.privacy.GaussianMechanism(max_norm=1.0, noise=30.0),
    }


def test_the_table_of_rules_and_lies_is_what_was_measured() -> None:
    assert robust_page() == PAGE, "`make results-page` writes it"
