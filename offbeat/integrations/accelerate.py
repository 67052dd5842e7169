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

from offbeat.errors import ModelError
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
        """Gather tensors of all workers."""
        self._meetings.note("Accelerator.gather", self.way_out)
        return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors of all workers."""
        self._meetings.note("Accelerator.reduce", self.way_out)
        return super().reduce(tensor, reduction, scale)

    def wait_for_everyone(self) -> None:
        """Wait for all."""
        self._meetings.note("Accelerator.wait_for_everyone", self.way_out)
        super().wait_for_everyone()

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log to Accelerate's trackers, with how the workers train."""
        super().log({**values, **self.new_figures()}, step=step, log_kwargs=log_kwargs or {})

    def new_figures(self) -> dict[str, float]:
        """Tell how the workers have trained since the last call, on the main process; names as in `figures`."""
        if self._figures is None or not self.is_main_process:
            return {}
        return self._figures.new().with_markers

    # -- checkpoints and end -------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The state of a model, such as for `save_model`.

        Each tensor has memory of its own: a server's parameters are views of one buffer, of which Accelerate would keep
        one, and take the others for copies of it.
        """
        copies: dict[tuple[Any, ...], torch.Tensor] = {}  # what is tied stays so
        return {
            name: copies.setdefault((one.data_ptr(), one.shape, one.stride()), one.clone())
            if isinstance(one, torch.Tensor)
            else one
            for name, one in super().get_state_dict(model, unwrap).items()
        }

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = False, **options: Any) -> Any:
        """Save all that was prepared, of replicas that are equal, and the run. Collective.

        Args:
            safe_serialization: whether as safetensors, which loads nothing into parameters that are views of one
                buffer, as a server's are; else as torch saves it.
        """
        self.run.settle()
        folder = super().save_state(output_dir, safe_serialization, **options)
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
