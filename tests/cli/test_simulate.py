"""`offbeat simulate`, as users run it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.cli.commands import offbeat

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "benchmarks/scenarios/ps_uniform.toml"
SCRIPT = ROOT / "benchmarks/scenarios/mnist.toml"
RESULT = ROOT / "benchmarks/results/mnist.json"
POWERSGD = """
[scenario]
name = "two"
[hosts]
count = 2
rate_mbps = 100
[workload]
kind = "replay"
profile = "resnet50"
[run]
baseline = "powersgd"
[[row]]
name = "powersgd"
system = "ddp+powersgd"
"""


def test_every_row_is_predicted(tmp_path: Path) -> None:
    code, output = offbeat("simulate", SCENARIO, "--steps", 5, "--json", tmp_path / "out.json", folder=tmp_path)
    assert code == 0, output
    assert "ps_uniform, simulated" in output
    assert "s of training in" in output
    told = {one["row"]: one["seconds_per_step"] for one in json.loads((tmp_path / "out.json").read_text())}
    assert list(told) == ["bsp", "asp", "ssp(5)", "round-robin", "ddp"]
    assert told["bsp"] > 1.5 * told["round-robin"]


def test_more_workers_than_a_lab_has(tmp_path: Path) -> None:
    code, output = offbeat("simulate", SCENARIO, "--steps", 1, "--workers", 64, folder=tmp_path)
    assert code == 0, output


def test_predictions_go_beside_what_was_measured(tmp_path: Path) -> None:
    result = tmp_path / "mnist.json"
    shutil.copy(RESULT, result)
    code, output = offbeat("simulate", SCRIPT, "--like", result, "--write", folder=tmp_path)
    assert code == 0, output
    assert "error" in output
    assert len(json.loads(result.read_text())["simulated"]) == 5


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "powersgd.toml").write_text(POWERSGD)
    for arguments, told in (
        ((SCRIPT,), "Cannot simulate the script"),
        ((SCRIPT,), f"There is one: --like {SCRIPT.parent.parent / 'results' / 'mnist.json'}."),
        ((SCENARIO, "--like", "missing.json"), "Cannot read the result missing.json"),
        ((SCENARIO, "--like", "no.json"), "Cannot read the result no.json"),
        ((SCENARIO, "--write"), "Cannot write predictions beside a measurement: no result is named"),
        ((SCENARIO, "--like", RESULT, "--write"), "the result is of another scenario"),
        ((SCRIPT, "--like", RESULT, "--write", "--steps", 3), "another number of them was asked for"),
        ((ROOT / "benchmarks/scenarios/slow_worker.toml", "--workers", 4), "the scenario has a table for each"),
        ((SCENARIO, "--json", "nowhere/out.json"), "there is no folder nowhere"),
        (("powersgd.toml",), "Cannot simulate two: none of its rows is modelled"),
        (("missing.toml",), "Cannot read the scenario missing.toml"),
    ):
        code, output = offbeat("simulate", *arguments, folder=tmp_path)
        assert code == 2, (arguments, output)
        assert told in " ".join(output.split())
        assert "Traceback" not in output
