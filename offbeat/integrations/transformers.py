"""The Hugging Face Trainer with a plan: `OffbeatTrainer(..., plan=Plan(...))` in place of `Trainer(...)`.

Other trainers get it in front of their own class: class Mine(OffbeatTraining, Seq2SeqTrainer). What the Trainer
does (accumulation, clipping, mixed precision, evaluation, early stopping, checkpoints, `save_pretrained`) it goes on
doing; the worker's handle is `trainer.run`.

On CPUs make the arguments behind `offbeat.init(plan)` and pass `run=` where the plan is `Elastic()`: TrainingArguments
begin a process group of their own otherwise, which no worker is to be lost from.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from transformers import Trainer, trainer

from offbeat.integrations import state_files
from offbeat.integrations.accelerate import OffbeatAccelerator
from offbeat.integrations.figures import RUN_DIR
from offbeat.integrations.worker_start import TRAINER, begin
from offbeat.run.environment import Environment

if TYPE_CHECKING:
    from offbeat.plan import Plan
    from offbeat.run.run import Run

_STATE = "offbeat"


class OffbeatTraining:
    """Behaviour by which a Trainer's replicas go by a plan; stands in front of the Trainer's class.

    Args:
        args: of the Trainer.
        plan: as of `offbeat.init`; None for that of `offbeat run`, or `Plan()`.
        run: that was begun already, instead.
        options: of the Trainer.
    """

    def __init__(self, *args: Any, plan: Plan | None = None, run: Run | None = None, **options: Any) -> None:
        arguments = options.get("args") or next((one for one in args if hasattr(one, "output_dir")), None)
        folder = os.path.join(getattr(arguments, "output_dir", None) or "trainer_output", RUN_DIR)
        self.run = run or begin(TRAINER, plan, run_dir=Environment().run_dir or folder)
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Have the Trainer make offbeat's Accelerator, with the arguments that it gives its own."""
        usual = trainer.Accelerator  # the Trainer has no other place in which to say which one it makes
        trainer.Accelerator = functools.partial(OffbeatAccelerator, run=self.run)
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            trainer.Accelerator = usual

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """The batches of one step."""
        accelerator: OffbeatAccelerator = self.accelerator  # type: ignore[attr-defined]
        accelerator.way_out = "Give TrainingArguments(average_tokens_across_devices=False)"
        return super().get_batch_samples(*args, **options)  # type: ignore[misc]

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, and leave all replicas equal."""
        output = super().train(*args, **options)  # type: ignore[misc]
        if not self.args.load_best_model_at_end:  # type: ignore[attr-defined]
            self.run.settle()
        return output

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate what is trained: while it is, replicas are made equal, or averaged meanwhile."""
        # Afterwards the model may be the best one, which is not what a server has.
        with self.accelerator.averaged() if self.is_in_train else nullcontext():  # type: ignore[attr-defined]
            return super().evaluation_loop(*args, **options)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        self.run.settle()  # nothing is to come from others behind it
        super()._load_best_model()  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log, with how the workers train."""
        super().log({**logs, **self.accelerator.new_figures()}, *args, **options)  # type: ignore[misc, attr-defined]

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.run.settle()
        super()._save_checkpoint(*args, **options)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        """Each worker's own part of a checkpoint, and so that of its run."""
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        state_files.save(self.run, os.path.join(output_dir, _STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            state_files.load(self.run, os.path.join(checkpoint, _STATE))


class OffbeatTrainer(OffbeatTraining, Trainer):  # type: ignore[misc]
    """The Trainer, whose replicas go by a plan."""
