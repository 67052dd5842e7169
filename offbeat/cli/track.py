"""`offbeat track`: tell TensorBoard, Weights & Biases or MLflow how the workers of a run train, or trained."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.errors import ScenarioError
from offbeat.integrations.figures import METRICS, RunFigures
from offbeat.integrations.trackers import MLflow, TensorBoard, WeightsAndBiases, tell
from offbeat.report.records import has_ended

if TYPE_CHECKING:
    from offbeat.integrations.trackers import Tracker

_LOOK_S = 2.0


def track(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run, which has a metrics.jsonl.", show_default=False)],
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write event files into this folder.", show_default=False)
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            help="Make a run in this project of Weights & Biases; WANDB_MODE=offline sends nothing.", show_default=False
        ),
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(help="Make a run of MLflow in the store at this URI.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that one point stands for.", min=1)] = 10,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run has ended.")] = False,
) -> None:
    """Tell TensorBoard, Weights & Biases or MLflow how the workers of a run train: waiting, bytes, staleness, swaps."""
    if not (run_dir / METRICS).is_file():
        raise ScenarioError(
            f"Cannot track {run_dir}: it has no {METRICS}. Give a folder that `offbeat run` left, or that was given to "
            "offbeat.init(run_dir=...)."
        )
    if (tensorboard, wandb, mlflow) == (None, None, None):
        raise ScenarioError("Cannot track for nobody: give --tensorboard, --wandb or --mlflow.")
    with ExitStack() as closing:
        trackers: list[Tracker] = []
        if tensorboard is not None:
            trackers.append(TensorBoard(tensorboard))
        if wandb is not None:
            trackers.append(WeightsAndBiases(project=wandb, name=run_dir.resolve().name))
        if mlflow is not None:
            trackers.append(MLflow(mlflow, experiment="offbeat"))
        for tracker in trackers:
            closing.callback(tracker.close)
        figures = RunFigures(run_dir, is_all=True)
        tell(figures.windows(steps), trackers)
        while follow and not has_ended(run_dir / METRICS):
            time.sleep(_LOOK_S)
            tell(figures.windows(steps), trackers)
        tell(figures.windows(steps), trackers)
