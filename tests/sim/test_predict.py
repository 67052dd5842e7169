"""Predictions stand beside measurements, and are not far from them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.claims import EXPLAINED, FAR_OFF
from benchmarks.page import PAGE, RESULTS, measured
from offbeat.errors import ScenarioError
from offbeat.fabric import ObjectStore
from offbeat.lab import results
from offbeat.lab.predictions import errors, known_of, predictions
from offbeat.plan import Plan
from offbeat.scenario import Scenario
from offbeat.sim import Known, is_modelled, predict

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
# What is measured there is this machine's two cores: steps of a few milliseconds, or next to nothing that is sent.
OURS_ALONE = {"byzantine", "loopback", "robust_cost", "slow_links_chars", "slow_links_mnist"}


# Simulated again in three seconds or more, each: `make test-slow`.
LONG = {
    "accuracy_chars",
    "accuracy_mnist",
    "innetwork_stragglers",
    "innetwork_stragglers_eight",
    "pause",
    "schedule_accuracy",
    "schedule_stragglers",
    "slow_worker",
    "stragglers",
    "stragglers_four",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in measured()]
)
def test_every_result_says_what_the_simulator_says_today(name: str) -> None:
    report = results.read(RESULTS / f"{name}.json")
    scenario = Scenario.from_toml(report.scenario)
    found = predictions(scenario, SCENARIOS, known_of(scenario, report))
    modelled = [row.name for row in scenario.row if is_modelled(row, scenario.workload)]
    if scenario.topology.is_star and not any(fault.stays for fault in scenario.fault):
        assert [one.row for one in found] == modelled
    assert {one.row for one in found} <= set(modelled)
    assert [one.row for one in report.simulated] == [one.row for one in found], "run `make predictions`"
    for theirs, ours in zip(report.simulated, found, strict=True):
        assert theirs.seconds_per_step == pytest.approx(ours.seconds_per_step, rel=1e-6), "run `make predictions`"


def test_no_row_is_far_off_without_a_sentence_that_says_why() -> None:
    found = {name: errors(results.read(RESULTS / f"{name}.json")) for name in measured()}
    far = {name: {row for row, error in rows.items() if abs(error) > FAR_OFF} for name, rows in found.items()}
    assert {name: rows for name, rows in far.items() if rows} == {name: set(rows) for name, rows in EXPLAINED.items()}
    text = PAGE.read_text()
    assert all(sentence in text for rows in EXPLAINED.values() for sentence in rows.values())


def test_predictions_are_within_a_tenth_of_what_was_measured() -> None:
    names = [name for name in measured() if name not in OURS_ALONE]
    off = [abs(error) for name in names for error in errors(results.read(RESULTS / f"{name}.json")).values()]
    assert statistics.median(off) < 0.1
    assert statistics.quantiles(off, n=10)[-1] < 0.2


def test_a_script_needs_a_measurement() -> None:
    scenario = Scenario.from_toml((SCENARIOS / "mnist.toml").read_text())
    with pytest.raises(ScenarioError, match=r"Cannot simulate the script .*--like RESULT\.json"):
        known_of(scenario, None)
    with pytest.raises(ScenarioError, match="it has another workload"):
        known_of(scenario, results.read(RESULTS / "loopback.json"))


def test_sums_in_stores_are_not_predicted_as_a_ring() -> None:
    scenario = Scenario.from_toml((SCENARIOS / "small.toml").read_text())
    row, plan = scenario.row[-1], Plan(fabric=ObjectStore())
    assert is_modelled(row, scenario.workload, Plan())
    assert not is_modelled(row, scenario.workload, plan)
    with pytest.raises(ScenarioError, match=r"ObjectStore\(.* not modelled. Measure it with `offbeat lab run`"):
        predict(scenario, row, plan, Known.of(scenario))


def test_a_schedule_of_a_script_is_not_predicted_and_the_other_rows_are() -> None:
    scenario = Scenario.from_toml((SCENARIOS / "schedule_chars.toml").read_text())
    found = predictions(scenario, SCENARIOS, Known([0.02, 0.02], 450_000, 16))
    assert [one.row for one in found] == ["ddp", "ddp, 0.1 MB", "offbeat"]
