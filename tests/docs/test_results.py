"""Claims of speed stand on files: pages are made from them, and the files are what they say."""

from __future__ import annotations

import itertools
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import schedules, switch_page, torch_tests, windows
from benchmarks.claims import CLAIMS, IDEAL
from benchmarks.first_screen import PICTURE, ROWS, course, draw
from benchmarks.page import PAGE, RESULTS, measured, page
from offbeat.lab import results
from offbeat.scenario import Scenario
from offbeat.switch.strategy import compile_policy
from offbeat.sync import ASP, SSP

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_page_is_made_from_the_files() -> None:
    assert PAGE.read_text() == page(), "run `make results-page`"


def test_every_claim_speaks_of_rows_that_are_there() -> None:
    for name, claims in CLAIMS.items():
        scenario = Scenario.from_toml((ROOT / f"benchmarks/scenarios/{name}.toml").read_text())
        rows = {row.name for row in scenario.row} | {""}
        assert {claim.row for claim in claims} <= rows
        assert {claim.against for claim in claims if claim.measure != IDEAL} <= rows


def test_every_scenario_has_its_claims() -> None:
    assert {path.stem for path in (ROOT / "benchmarks/scenarios").glob("*.toml")} == set(CLAIMS)


# A strict mark: whoever measures again takes it away.
OUTDATED: dict[str, str] = {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=OUTDATED[name], strict=True)) if name in OUTDATED else name
        for name in measured()
    ],
)
def test_files_hold_the_scenario_they_were_measured_with(name: str) -> None:
    report = results.read(RESULTS / f"{name}.json")
    assert Scenario.from_toml(report.scenario).scenario.name == name
    assert report.digest == Scenario.from_toml((ROOT / f"benchmarks/scenarios/{name}.toml").read_text()).digest, (
        "the scenario has changed since: measure again"
    )
    assert (RESULTS / f"{name}.png").stat().st_size > 10_000
    for row in report.rows:
        repeats = [raw for raw in report.raw if raw.row == row.row]
        assert len({raw.repeat for raw in repeats}) == row.repeats
        # The median of the rows is that of the raw records.
        means = []
        for repeat in range(row.repeats):
            steps = [step for raw in repeats if raw.repeat == repeat for step in raw.step_s]
            means.append(sum(steps) / len(steps))
        assert statistics.median(means) == pytest.approx(row.seconds_per_step.median, rel=1e-6)


def test_the_readme_quotes_the_files() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("uniform", "mnist", "loopback"):
        report = results.read(RESULTS / f"{name}.json")
        row = next(row for row in report.rows if row.row == "offbeat")
        (quoted,) = re.findall(rf"\| \[{name}\]\([^)]*\) \|.*\| ([\d.]+) x \|", text)
        assert quoted == f"{row.ratio_to_baseline:.3f}"


def test_the_readme_shows_before_it_tabulates() -> None:
    """What it is, the change to a script, the commands, one picture, and why; only then tables."""
    text = (ROOT / "README.md").read_text()
    first, table = text.split("\n|", 1)
    order = ["# offbeat", "```diff", "offbeat run --workers", f"]({PICTURE.relative_to(ROOT)})", "Why you may want it"]
    assert sorted(order, key=first.index) == order
    assert len(first.splitlines()) <= 45, "a screen"
    for words in ("of times less is better", "the room"):
        assert words not in text
    assert "| --- |" in table


def test_the_picture_of_the_readme_is_made_from_a_result(tmp_path: Path) -> None:
    report = results.read(RESULTS / "kill.json")
    draw(report, tmp_path / "drawn.png")
    width, height = (int.from_bytes((tmp_path / "drawn.png").read_bytes()[at : at + 4]) for at in (16, 20))
    assert (width, height) == (1200, 435)
    assert PICTURE.stat().st_size > 10_000
    longest = {}
    for row in ROWS:
        times_s, steps = course(report, row)
        assert steps == list(range(steps[0], steps[0] + len(steps))), "each step once"
        longest[row] = max(later - earlier for earlier, later in itertools.pairwise(times_s))
    usual_s = report.rows[0].seconds_per_step.median
    assert longest["elastic"] < 2 * usual_s
    assert longest["asp"] < 2 * usual_s
    assert longest["ddp+restarts"] > 11, "what README.md says"


@pytest.mark.slow
def test_columns_have_plain_headings() -> None:
    headings = {cell for line in re.findall(r"(\|.*)\n\| --- \|", page()) for cell in line.strip("| ").split(" | ")}
    assert "physical limit, ms per step" in headings
    assert not headings & {"row", "limit", "uneven", "idle", "final", "stale, mean/max", "others, s", "back, s", "min"}
    assert not [heading for heading in headings if re.match(r"x \w", heading)]


@pytest.mark.parametrize(
    ("workers", "ratios"),
    [(4, {2: 0.78, 8: 0.74, 16: 0.73, None: 0.73}), (8, {2: 0.66, 8: 0.61, 16: 0.60, None: 0.60})],
)
def test_windows_save_what_order_statistics_say(workers: int, ratios: dict[int | None, float]) -> None:
    """By a simulation of 30 lines of the switch's rule alone, as by that of the policies."""
    found = windows.read()
    assert {window: found.ratio(workers, window) for window in ratios} == pytest.approx(ratios, abs=0.02)


def test_what_schedules_come_to_is_what_the_timeline_says() -> None:
    found = schedules.read()
    assert [(cell.latency_ms, cell.gap_ms, cell.rate_gbps) for cell in found.cells] == schedules.links()
    assert schedules.simulate(*schedules.links()[-2]) == found.cells[-2], "run `make schedules`"
    for cell in found.cells:
        assert set(cell.step_ms) == set(schedules.COLUMNS)
        assert min(cell.step_ms.values()) == cell.step_ms[schedules.BOUND] >= found.backward_ms + found.forward_ms
        assert cell.step_ms["Credit, best"] <= cell.step_ms["Credit"]
    within_bound, beside_credit, beside_fifo = schedules.claims(found)
    assert within_bound[2]
    assert beside_fifo[2]
    assert not beside_credit[2], "by 0.03 ms, where it costs nothing to send each gradient by itself"
    assert max(cell.ratio("Prophet", "Credit") for cell in found.cells) < 1.0002
    assert all(cell.ratio("Prophet", "Credit") <= 1 for cell in found.cells if cell.gap_ms)


@pytest.mark.slow
def test_the_file_of_windows_is_what_the_simulator_says() -> None:
    cell = next(cell for cell in windows.read().cells if (cell.workers, cell.window) == (4, 2))
    assert windows.simulate(4, 2) == cell, "run `make windows`"
    assert compile_policy(SSP(48)).window_in(64) == 48
    assert compile_policy(ASP()).window_in(64) == 62, "none of the windows is bounded by the switch's ring"


def test_the_section_on_switches_says_what_is_wrong() -> None:
    def row(what: str, target: str = "udp", **changes: Any) -> dict[str, Any]:
        told = {"checked": 100, "wrong": 0, "errors": [], "garbage": {}, "refused": {}, "proof": None, "clocks": 0}
        told |= {"workers": 2, "values": 64, "slack": 0, "loss_percent": 0.0, "median": 1000.0, "gb_per_s": 0.25}
        return told | {"what": what, "target": target} | changes

    proof = {
        "swaps": 7, "asked_again": 1, "us_per_swap": 250.0, "grants": 900, "by_lead": {"0": 600, "1": 300}, "mixed": 0,
        "other_windows": 0, "violations": 0, "clocks_to_effect": 5, "too_late": 0,
    }  # fmt: skip
    rows = [
        row("results"),
        row("results", "ebpf", median=2500.0),
        row("garbage", median=900.0, garbage={"cut": 10, "foreign": 5}, refused={"foreign": 15, "STALE_COOKIE": 2}),
        row("swaps", values=0, checked=0, loss_percent=3.0, clocks=450, proof=proof),
    ]
    about = {
        "settings": {"seconds": 1.0, "repeats": 1, "garbage_per_s": 10_000.0}, "command": "offbeat bench switch",
        "date": "today", "hardware": {"cores": 2, "processor": "some"},
    }  # fmt: skip

    def told() -> str:
        return switch_page.section({"rows": rows, **about}, lambda headings, lines: f"{headings} {list(lines)}")

    text = told()
    assert "**0 of 300** (met)" in text
    assert "**2.50 to 2.50 x** (met)" in text
    assert "**0 of 900 steps, over 7 changes** (met)" in text
    assert "'900', '1,000', '15', '0 of 100'" in text, "beside garbage, and without"
    assert "450 steps of each worker" in text
    assert "15 foreign, 2 stale cookie" in text
    rows[0]["wrong"], rows[1]["median"], rows[1]["errors"] = 3, 1500.0, ["it hung"]
    proof["mixed"] = proof["too_late"] = 2
    text = told()
    for one in (
        "**3 of 300** (missed)",
        "**1.50 to 1.50 x** (missed)",
        "**2 of 900 steps",
        "**2** (missed)",
        "it hung",
    ):
        assert one in text


def test_each_difference_in_torchs_own_tests_has_its_reason() -> None:
    assert {one.name for one in torch_tests.read().tests if one.is_worse} == set(torch_tests.EXPLAINED)
