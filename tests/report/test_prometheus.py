"""The figures as a Prometheus server reads them."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from offbeat.protocol.worker_status import TableClock, TrainingStatus
from offbeat.report.prometheus import PHASES, Figures
from tests.report.fake_status import a_scene, seen

if TYPE_CHECKING:
    from offbeat.protocol.status import ModelStatus

SAID = TrainingStatus(
    epochs=3.5, total_epochs=12.0, epochs_per_s=0.5, samples_per_s=320.0, cpu_cores=1.25, memory_bytes=300_000_000,
    sent_bytes_per_s=1e6, values={"loss": 0.5},
)  # fmt: skip
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exposed(*scenes: ModelStatus) -> str:
    registry = CollectorRegistry()
    registry.register(Figures(scenes, 1700000000.0))
    return generate_latest(registry).decode()


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_figures_of_workers_and_models() -> None:
    found = samples(exposed(a_scene(), a_scene(model=1, version=7)))

    def value(name: str, **labels: str) -> float | None:
        return found.get((f"offbeat_{name}", frozenset({"model": "0", **labels}.items())))

    assert value("updates_total") == 1234
    assert value("updates_total", model="1") == 7
    assert value("running_seconds") == 20
    assert value("started") == 1
    assert value("policy_info", policy="SSP(bound=3)") == 1
    assert found["offbeat_seen_timestamp_seconds", frozenset()] == 1700000000
    assert value("worker_step", worker="2") == 98
    assert value("worker_ahead_steps", worker="1") == 3
    assert value("worker_contributions_total", worker="3", outcome="lost") == 1
    assert value("worker_contributions_total", worker="0", outcome="applied") == 100
    assert value("worker_staleness_updates_total", worker="0") == 150
    assert value("worker_staleness_updates_max", worker="0") == 4
    assert value("worker_waited_seconds_total", worker="0") == 5
    assert value("worker_computing_seconds", worker="2") == 0.1
    assert value("worker_turn_seconds", worker="2") == 0.02
    phases = {phase: value("worker_phase", worker="1", phase=phase) for phase in PHASES}
    assert phases == dict.fromkeys(PHASES, 0) | {"held": 1}


def test_the_figures_of_clocks_on_a_table() -> None:
    at = TableClock(worker=1, lag=3, waited_s=2.5, silent_s=None)
    found = samples(exposed(a_scene(seen(0), seen(1, table=at))))
    told = {name: value for (name, labels), value in found.items() if ("worker", "1") in labels}
    assert told["offbeat_worker_lag_steps"] == 3
    assert told["offbeat_worker_barrier_seconds_total"] == 2.5
    assert "offbeat_worker_silent_seconds" not in told, "nothing has come from it"
    assert not any(name.endswith("lag_steps") and ("worker", "0") in labels for name, labels in found)


def test_of_a_worker_that_is_gone_only_what_it_did_is_told() -> None:
    names = {name for name, labels in samples(exposed(a_scene())) if ("worker", "3") in labels}
    assert names == {
        "offbeat_worker_phase",
        "offbeat_worker_contributions_total",
        "offbeat_worker_script_step",
        "offbeat_worker_lead_steps_max",
        "offbeat_worker_staleness_updates_total",
        "offbeat_worker_staleness_updates_max",
        "offbeat_worker_waited_seconds_total",
    }


def test_it_is_what_prometheus_expects() -> None:
    text = exposed(a_scene(seen(0, status=SAID, table=TableClock(worker=0, lag=0, waited_s=1.0, silent_s=0.5))))
    families = list(text_string_to_metric_families(text))
    assert len(families) == text.count("# HELP offbeat_") == text.count("# TYPE offbeat_")
    for family in families:
        assert re.fullmatch(r"[A-Z0-9].*\.", family.documentation), family.name
        assert family.type in ("counter", "gauge")
        assert not re.search(r"_(ms|s|bytes_s|percent)(_|$)", family.name), "base units, in words"
        labels = {frozenset(sample.labels) for sample in family.samples}
        assert len(labels) == 1, family.name
        assert ("worker" in min(labels)) == ("_worker_" in family.name)


def test_what_the_workers_say_themselves() -> None:
    found = samples(exposed(a_scene(seen(0, status=SAID), seen(1), seen(2, status=TrainingStatus(), phase="paused"))))

    def value(name: str, worker: int, /, **labels: str) -> float | None:
        return found.get((f"offbeat_worker_{name}", frozenset({"model": "0", "worker": str(worker), **labels}.items())))

    assert value("logged", 0, name="loss") == 0.5
    assert (value("epochs", 0), value("samples_per_second", 0), value("remaining_seconds", 0)) == (3.5, 320.0, 17.0)
    assert (value("cpu_cores", 0), value("memory_bytes", 0), value("sent_bytes_per_second", 0)) == (1.25, 3e8, 1e6)
    assert {name for name, labels in found if ("worker", "1") in labels} >= {"offbeat_worker_script_step"}
    assert [value(name, worker) for name in ("epochs", "cpu_cores", "remaining_seconds") for worker in (1, 2)] == [
        None
    ] * 6, "nobody knows"
    assert value("phase", 2, phase="paused") == 1


def test_no_text_can_break_out_of_its_label() -> None:
    found = samples(exposed(a_scene(policy='P("x")\n\\offbeat_updates_total 9')))
    assert [value for (name, _), value in found.items() if name == "offbeat_updates_total"] == [1234]
    assert any(("policy", 'P("x")\n\\offbeat_updates_total 9') in labels for _, labels in found)


def test_no_model_yet() -> None:
    assert set(samples(exposed())) == {("offbeat_seen_timestamp_seconds", frozenset())}


@pytest.mark.parametrize("module", ["offbeat.report.prometheus", "offbeat.cli.top"])
def test_neither_torch_nor_the_extra_is_loaded_before_it_is_needed(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'prometheus_client'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
