"""TensorBoard, Weights & Biases and MLflow: where people look at how training goes, told how its workers train.

    with offbeat.init(run_dir="run") as run, track(run, TensorBoard("tb")):
        ...                                            # or afterwards: offbeat track run --tensorboard tb

The first worker reads what all write to the run's metrics.jsonl, every few seconds, in a thread of its own: a step
costs nothing. Swaps, stalls and workers that come and go are markers.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from offbeat.errors import PlanError
from offbeat.integrations.figures import PREFIX, RunFigures

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from offbeat.integrations.figures import Window
    from offbeat.run.run import Run

_log = logging.getLogger("offbeat")
_EVERY_S = 5.0
_WRITTEN_S = 0.5  # by then all workers have written what they recorded


class Tracker(Protocol):
    """A place where figures are drawn."""

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        """Draw figures, which have names as in `offbeat.integrations.figures`, at a step."""

    def event(self, step: int, what: str, text: str) -> None:
        """Mark that something happened, such as a swap."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files for TensorBoard.

    Args:
        folder: where they go.

    Raises:
        PlanError: if TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        module = _imported("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder))

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, step: int, what: str, text: str) -> None:
        self._writer.add_text(f"{PREFIX}{what}", text, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases: the one that is open, or else a new one. Offline if `WANDB_MODE=offline` says so.

    Args:
        options: of `wandb.init`, such as project="mine", if none is open.

    Raises:
        PlanError: if wandb is not installed, or begins no run.
    """

    def __init__(self, **options: Any) -> None:
        wandb = _imported("wandb", "Weights & Biases", "wandb")
        self._is_own = wandb.run is None
        try:
            self._run = wandb.init(**options) if self._is_own else wandb.run
        except wandb.errors.Error as error:  # such as that nobody is logged in
            raise PlanError(
                f"Cannot begin a run of Weights & Biases: {error} WANDB_MODE=offline needs no login."
            ) from error
        # Its own steps only grow, and are the script's: these figures bring theirs.
        self._run.define_metric(f"{PREFIX}step")
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, f"{PREFIX}step": step})

    def event(self, step: int, what: str, text: str) -> None:
        self._run.log({f"{PREFIX}{what}": text, f"{PREFIX}step": step})

    def close(self) -> None:
        if self._is_own:
            self._run.finish()


class MLflow:
    """A run of MLflow: the one that is active, or else a new one. Events are metrics of value 1, and tags with a text.

    Args:
        uri: of its store, such as "file:./mlruns"; None for what MLflow goes by.
        experiment: the name of it.

    Raises:
        PlanError: if MLflow is not installed, or does not take that store.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        mlflow = _imported("mlflow", "MLflow", "mlflow")
        try:
            if uri is not None:
                mlflow.set_tracking_uri(uri)
            if experiment is not None:
                mlflow.set_experiment(experiment)
            self._mlflow, self._is_own = mlflow, mlflow.active_run() is None
            active = mlflow.start_run() if self._is_own else mlflow.active_run()
        except mlflow.exceptions.MlflowException as error:  # such as a store of files, which it has to be allowed
            raise PlanError(f"Cannot begin a run of MLflow: {error}") from error
        self._run_id, self._client = active.info.run_id, mlflow.MlflowClient()

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def event(self, step: int, what: str, text: str) -> None:
        self._client.log_metric(self._run_id, f"{PREFIX}{what}", 1.0, step=step)
        self._client.set_tag(self._run_id, f"{PREFIX}{what}.{step}", text)

    def close(self) -> None:
        if self._is_own:
            self._mlflow.end_run()


@contextmanager
def track(run: Run, *trackers: Tracker, every_s: float = _EVERY_S) -> Iterator[None]:
    """Have trackers follow a run within the block. On the first worker; on others it does nothing.

    A tracker that fails is said, once, and left out: the training goes on.

    Args:
        every_s: seconds between two looks at what is new.

    Raises:
        PlanError: if the run writes its metrics nowhere.
    """
    if run.run_dir is None:
        raise PlanError(
            "Cannot track a run that writes its metrics nowhere: give offbeat.init(run_dir=...), or start it with "
            "`offbeat run`."
        )
    if not run.is_first:
        yield
        return
    figures, left, over = RunFigures(run.run_dir), list(trackers), threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            tell([figures.new()], left)

    thread = threading.Thread(target=look, name="offbeat-trackers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        time.sleep(_WRITTEN_S)
        tell([figures.new()], left)
        for tracker in left:
            try:
                tracker.close()
            except Exception as error:
                _log.warning("%s was not closed: %s", type(tracker).__name__, error)


def tell(windows: Iterable[Window], trackers: list[Tracker]) -> None:
    """Tell trackers what is new; one that fails is taken out, and said."""
    for window in windows:
        for tracker in list(trackers):
            try:
                if window.values:
                    tracker.figures(window.step, window.values)
                for event in window.events:
                    tracker.event(event.step, event.what, event.text)
            except Exception as error:
                trackers.remove(tracker)
                _log.warning("%s is not told of this run any more: %s", type(tracker).__name__, error)


def _imported(module: str, name: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PlanError(f"Cannot tell {name} of this run: it is not installed. Run pip install {package}.") from error
