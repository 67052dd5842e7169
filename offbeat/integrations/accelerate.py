"""Hugging Face Accelerate with a plan: `OffbeatAccelerator(Plan(...))` in place of `Accelerator()`.

    accelerator = OffbeatAccelerator(Plan(sync=LocalSGD(8)), cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Accelerate deals out data, accumulates, clips and casts as ever; what would be DistributedDataParallel is a replica of
offbeat's. The worker's handle is `accelerator.run`, such as for `accelerator.run.swap(sync=SSP(4))`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import recursively_apply

from offbeat.errors import ModelError, WorkerLostError
from offbeat.integrations import state_files
from offbeat.integrations.figures import RunFigures
from offbeat.integrations.step_meetings import StepMeetings
from offbeat.integrations.worker_start import ACCELERATE, begin, suited
from offbeat.run.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from offbeat.plan import Plan
    from offbeat.run.run import Run

_STATE = "offbeat"


class OffbeatAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose replicas go by a plan. Make it before anything else of Accelerate's.

    It may be made again: with no plan, or the same one, it shares the run that is open.

    Args:
        plan: as of `offbeat.init`; None for that of `offbeat run`, or `Plan()`.
        run: that was begun already, instead.
        run_dir: where metrics are written; None for that of `offbeat run`, or nowhere.
        options: Accelerator's own.

    Raises:
        PlanError: if the plan needs what Accelerate does by itself.
    """

    def __init__(
        self, plan: Plan | None = None, *, run: Run | None = None, run_dir: str | None = None, **options: Any
    ) -> None:
        self.run = begin(ACCELERATE, plan, run_dir=run_dir) if run is None else suited(ACCELERATE, run)
        self._meetings = StepMeetings(self.run)
        self.way_out = "Gather once in a while"  # for those to whom meetings in every step are told
        self._figures = None if self.run.run_dir is None else RunFigures(Path(self.run.run_dir))
        super().__init__(**options)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedules, as Accelerate does; a model together with its optimizer.

        Raises:
            ModelError: if a model that trains comes without its optimizer, or there are several.
        """
        models = [one for one in args if _trains(one)]
        optimizers = [
            one for one in args if isinstance(one, torch.optim.Optimizer) and not isinstance(one, AcceleratedOptimizer)
        ]
        if models and (len(models), len(optimizers)) != (1, 1):
            raise ModelError(
                f"Cannot prepare {len(models)} models with {len(optimizers)} optimizers in one call: a replica is made "
                "of one of each. Call accelerator.prepare(model, optimizer, ...) for each pair."
            )
        if models:
            replica = self._replica(models[0], optimizers[0], args, device_placement)
            args = tuple(replica if one is models[0] else one for one in args)
        return super().prepare(*args, device_placement=device_placement)

    def _replica(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, args: Any, placement: Any) -> Replica:
        place = None if placement is None else next(p for one, p in zip(args, placement, strict=True) if one is model)
        # What it does but for DistributedDataParallel: device, autocast, compilation.
        placed = super().prepare_model(model, device_placement=place, evaluation_mode=True)
        self._models.remove(placed)
        replica, _ = self.run.prepare(placed, optimizer)
        replica._is_accelerate_prepared = True  # type: ignore[assignment]  # its mark of what is left as it is
        return replica

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """The model that was prepared."""
        return super().unwrap_model(model.module if isinstance(model, Replica) else model, *args, **options)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Show what is trained, for an evaluation: replicas are made equal, or averaged within. Collective."""
        self.run.settle()
        with self.run.averaged():
            yield

    # -- what all workers do together ----------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all workers; on `Elastic()`, of those that are left."""
        self._meetings.note("Accelerator.gather", self.way_out)
        if not self._outlives_workers:
            return super().gather(tensor)
        return recursively_apply(lambda one: torch.cat(self._parts("gather", one)), tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what a metric is computed from; objects that are no tensors use torch's own group.

        Raises:
            WorkerLostError: if objects are to be gathered after a worker was lost.
        """
        with self._naming_the_lost("Accelerator.gather_for_metrics", "Gather tensors, which outlive a lost worker"):
            return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors of all workers; on `Elastic()`, of those that are left."""
        self._meetings.note("Accelerator.reduce", self.way_out)
        if not self._outlives_workers or reduction not in ("sum", "mean"):
            way_out = "Use reduction='sum' or 'mean', which outlive a lost worker"
            with self._naming_the_lost(f"Accelerator.reduce(reduction={reduction!r})", way_out):
                return super().reduce(tensor, reduction, scale)

        def combined(one: torch.Tensor) -> torch.Tensor:
            stacked = torch.cat(self._parts("reduce", one[None]))
            return stacked.sum(0).to(one.dtype) if reduction == "sum" else stacked.sum(0) / len(stacked)

        return recursively_apply(combined, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Wait for all; on `Elastic()`, for those that are left."""
        self._meetings.note("Accelerator.wait_for_everyone", self.way_out)
        if self._outlives_workers:
            self.run._session.context.control.sum("Accelerator.wait_for_everyone")
        else:
            super().wait_for_everyone()

    @property
    def _outlives_workers(self) -> bool:
        """Whether the run's own group carries what Accelerate asks of all, since torch's dies with a worker."""
        session = self.run._session
        return session.context.group is not None and session.server is None

    def _parts(self, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of the workers that are left, in the order of their ranks."""
        own = tensor if tensor.ndim else tensor[None]
        parts = self.run._session.context.control.tensors(f"Accelerator.{what}", own.detach().cpu().contiguous())
        return [one.to(tensor.device) for one in parts.values()]

    @contextmanager
    def _naming_the_lost(self, what: str, way_out: str) -> Iterator[None]:
        """Say who is lost, and what to do, where torch's own group fails for it."""
        try:
            yield
        except RuntimeError as error:
            group = self.run._session.context.group
            lost = {} if group is None or group.gone is None else group.gone()
            if not lost:
                raise
            named = "; ".join(f"rank {rank} {why.rstrip(' .')}" for rank, why in sorted(lost.items()))
            raise WorkerLostError(
                f"Cannot finish {what}: {named}, and it uses torch's own process group, which ends with its first lost "
                f"worker. {way_out}; save with run.settle() and offbeat.Checkpoints, which need no such group."
            ) from error

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log to Accelerate's trackers, with how the workers train."""
        super().log({**values, **self.new_figures()}, step=step, log_kwargs=log_kwargs or {})

    def new_figures(self) -> dict[str, float]:
        """Tell how the workers have trained since the last call, on the main process; names as in `figures`."""
        if self._figures is None or not self.is_main_process:
            return {}
        return self._figures.new().with_markers

    # -- checkpoints and end -------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Save all that was prepared, of replicas that are equal, and the run. Collective."""
        self.run.settle()
        folder = super().save_state(output_dir, *args, **options)
        state_files.save(self.run, os.path.join(folder, _STATE))
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Load what `save_state` saved. Collective."""
        if input_dir is None:
            raise ModelError("Cannot load the run's state without its folder: give load_state(folder).")
        super().load_state(input_dir, *args, **options)
        state_files.load(self.run, os.path.join(input_dir, _STATE))

    def end_training(self) -> None:
        """Close the run with the others, and trackers."""
        self.run.close()  # first: Accelerate ends all process groups
        super().end_training()


def _trains(one: Any) -> bool:
    return (
        isinstance(one, torch.nn.Module)
        and not isinstance(one, Replica)
        and any(parameter.requires_grad for parameter in one.parameters())
    )
