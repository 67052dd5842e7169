"""What trackers are told of a run: figures of all workers, and markers where something happened."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import PlanError
from offbeat.integrations.figures import RunFigures
from offbeat.integrations.trackers import MLflow, TensorBoard, WeightsAndBiases, track
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PLAN = offbeat.Plan(fabric=offbeat.ParameterServer())


class Remembers:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Mapping[str, float]]] = []
        self.events: list[tuple[str, str]] = []
        self.is_closed = False

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, values))

    def event(self, step: int, what: str, text: str) -> None:
        self.events.append((what, text))

    def close(self) -> None:
        self.is_closed = True


class Fails(Remembers):
    """A tracker whose disk is full."""

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError("no room")


def train(folder: str, plan: offbeat.Plan) -> Any:
    said, remembers = listen(), Remembers()
    with offbeat.init(plan, run_dir=folder) as run, track(run, Fails(), remembers, every_s=0.05):
        model = nn.Linear(4, 2)
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(20):
            replica(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 9 and run.rank == 0:
                run.swap(sync=offbeat.SSP(4))
        run.settle()
    return remembers.told, remembers.events, remembers.is_closed, said


def test_trackers_are_told_of_all_workers_and_of_a_swap(tmp_path: Path) -> None:
    (told, events, is_closed, said), (others, *_) = run_workers(2, train, str(tmp_path), PLAN)
    assert is_closed
    assert not others, "the first worker alone tells"
    step, values = told[-1]
    assert step == 19
    assert values["offbeat/bytes_sent"] > 0
    assert {"offbeat/rank0/wait_s", "offbeat/rank1/compute_s", "offbeat/staleness"} <= set().union(
        *(v for _, v in told)
    )
    assert any(what == "swap" and "SSP" in text for what, text in events)
    assert [line for line in said if "Fails is not told of this run any more: no room" in line]


def test_what_is_there_comes_in_windows(tmp_path: Path) -> None:
    run_workers(2, train, str(tmp_path), PLAN)
    windows = list(RunFigures(tmp_path, is_all=True).windows(5))
    assert [window.step for window in windows if window.values] == [4, 9, 14, 19]
    sent = [window.values["offbeat/bytes_sent"] for window in windows if window.values]
    assert sent == sorted(sent)
    assert sent[0] > 0


def test_a_run_that_writes_nothing_is_refused() -> None:
    with (
        offbeat.init() as run,
        pytest.raises(PlanError, match="Cannot track a run that writes its metrics nowhere"),
        track(run, Remembers()),
    ):
        pass


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offbeat", "track", *arguments], capture_output=True, text=True, timeout=50, check=False
    )


def test_the_command_refuses_what_is_no_run(tmp_path: Path) -> None:
    done = command(str(tmp_path), "--tensorboard", str(tmp_path))
    assert done.returncode == 2
    assert "it has no metrics.jsonl" in done.stderr
    (tmp_path / "metrics.jsonl").touch()
    assert "Cannot track for nobody" in command(str(tmp_path)).stderr


def test_tensorboard_shows_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_workers(2, train, str(tmp_path / "run"), PLAN)
    done = command(str(tmp_path / "run"), "--tensorboard", str(tmp_path / "tb"), "--steps", "5")
    assert done.returncode == 0, done.stderr
    shown = EventAccumulator(str(tmp_path / "tb"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("offbeat/wait_s")] == [4, 9, 14, 19]
    assert any("swap" in tag for tag in shown.Tags()["tensors"])


def test_mlflow_shows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    with pytest.raises(PlanError, match=r"Cannot begin a run of MLflow: .*MLFLOW_ALLOW_FILE_STORE"):
        MLflow(f"file:{tmp_path / 'ml'}", experiment="mine")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file:{tmp_path / 'ml'}"
    tracker = MLflow(store, experiment="mine")
    tracker.figures(3, {"offbeat/wait_s": 0.5})
    tracker.event(3, "swap", "BSP() to ASP()")
    tracker.close()
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert run.data.metrics["offbeat/wait_s"] == 0.5
    assert run.data.tags["offbeat/swap.3"] == "BSP() to ASP()"


def test_wandb_shows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WeightsAndBiases(project="mine", dir=str(tmp_path))
    tracker.figures(3, {"offbeat/wait_s": 0.5})
    tracker.event(3, "swap", "BSP() to ASP()")
    tracker.close()
    (file,) = tmp_path.rglob("*.wandb")
    assert b"offbeat/wait_s" in file.read_bytes()


@pytest.mark.skipif("torch.utils.tensorboard" in sys.modules, reason="it is loaded")
def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PlanError, match="Cannot tell TensorBoard of this run: it is not installed"):
        TensorBoard(tmp_path)
