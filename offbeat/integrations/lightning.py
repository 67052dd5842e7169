"""Lightning's Trainer with a plan: `Trainer(strategy=OffbeatStrategy(Plan(...)), devices=2)`.

Lightning deals out data (DistributedSampler), starts processes or finds those of `offbeat run` and torchrun, saves and
resumes; the plan says the rest. The worker's handle is `trainer.strategy.run`, such as for `run.swap(sync=SSP(4))`.

What Lightning asks of all workers together (means of what is logged, decisions to stop, names of folders) goes by the
run, and so outlives workers on `Elastic()`.
"""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from offbeat.errors import ModelError, PlanError
from offbeat.integrations import state_files
from offbeat.integrations.figures import RUN_DIR, RunFigures
from offbeat.integrations.step_meetings import StepMeetings
from offbeat.integrations.worker_start import LIGHTNING, begin, say_where
from offbeat.run.environment import Environment
from offbeat.run.replica import Replica

_log = logging.getLogger("offbeat")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from offbeat.plan import Plan
    from offbeat.run.run import Run


class OffbeatStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's strategy: replicas go by a plan.

    Args:
        plan: as of `offbeat.init`; None for that of `offbeat run`, or `Plan()`.
        run_dir: where metrics are written; None for that of `offbeat run`, or "offbeat-run" in the trainer's folder,
            but for `fast_dev_run`.
        options: of `offbeat.init` (timeout, history, seed), and of Lightning's strategies for several processes
            (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin).
    """

    def __init__(self, plan: Plan | None = None, *, run_dir: str | None = None, **options: Any) -> None:
        of_run = {name: options.pop(name) for name in ("timeout", "history", "seed") if name in options}
        super().__init__(**options)
        if self._ddp_kwargs:
            raise PlanError(
                f"Cannot pass {', '.join(self._ddp_kwargs)} to OffbeatStrategy: no DistributedDataParallel wraps the "
                "model here. Unused parameters and buffers need no option, and what is sent is the plan's codec."
            )
        self._plan, self._run_dir, self._of_run = plan, run_dir, of_run
        self._run: Run | None = None
        self._meetings: StepMeetings | None = None
        self._figures: RunFigures | None = None
        self._evaluation = ExitStack()

    @property
    def run(self) -> Run:
        """The worker's handle on the job.

        Raises:
            ModelError: before `trainer.fit`, and after it.
        """
        if self._run is None:
            raise ModelError("Cannot use the run yet: Trainer.fit begins it, and ends it.")
        return self._run

    # -- beginning and end ---------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Begin the run, in place of a process group."""
        reset_seed()
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None, "Lightning has set it"
        say_where(
            self.global_rank, self.local_rank, self.world_size, self.num_processes, environment.main_address,
            environment.main_port,
        )  # fmt: skip
        run_dir = self._run_dir or Environment().run_dir
        if run_dir is None and not self._trainer.fast_dev_run:  # which leaves no files
            run_dir = Path(self._trainer.default_root_dir) / RUN_DIR
        self._run = run = begin(LIGHTNING, self._plan, run_dir=run_dir, **self._of_run)
        self._meetings = StepMeetings(run)
        self._figures = None if run_dir is None else RunFigures(Path(run_dir))
        _heed_own_signals(self._trainer)

    def configure_ddp(self) -> None:
        """Do nothing yet: a replica is made of the model and its optimizer."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizer, and this worker's replica."""
        super().setup_optimizers(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise ModelError(
                f"Cannot train with {len(self.optimizers)} optimizers under OffbeatStrategy: it keeps one model with "
                'one optimizer together. Use DDPStrategy(process_group_backend="offbeat"), or a loop of your own with '
                "a run.prepare for each."
            )
        replica, _ = self.run.prepare(self.model, self.optimizers[0])  # type: ignore[has-type]
        self.model = replica

    def teardown(self) -> None:
        """End the run with the others."""
        run, self._run = self._run, None
        self._evaluation.close()
        if run is not None:
            run.settle()
            run.close()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """End the run without them: they are told why."""
        run, self._run = self._run, None
        self._evaluation = ExitStack()
        if run is not None:
            run.__exit__(type(exception), exception, None)

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # -- training ------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        """Compute, and only then step: a step is an exchange, whose gradients have to be there."""
        model = model or self.lightning_module
        if getattr(self.precision_plugin, "scaler", None) is not None:  # it does so as well
            return super().optimizer_step(optimizer, closure, model, **options)
        computed = functools.partial(self.precision_plugin._wrap_closure, model, optimizer, closure)()
        optimizer.step(**options)
        return computed

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients."""
        with self.run.no_sync():
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Have Lightning's loggers told how the workers train, as often as they are told anything."""
        trainer = self._trainer
        if self._figures is None or not self.is_global_zero or batch_idx % max(1, trainer.log_every_n_steps):
            return
        values = self._figures.new().with_markers
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)

    def on_validation_start(self) -> None:
        """Show what is trained: replicas are made equal, or are averaged while it lasts."""
        self.run.settle()
        self._evaluation.enter_context(self.run.averaged())

    def on_validation_end(self) -> None:
        """Give each worker its own replica again."""
        self._evaluation.close()

    # -- what all workers do together ----------------------------------------------------------------------------

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all."""
        if self._run is not None and isinstance(self.model, Replica):
            self._run.mean(0.0)
        elif self._run is not None:  # a server knows nobody yet
            self._run.share(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Hand all what the first worker has; it has to be what JSON holds."""
        if src != 0:
            raise ModelError(
                f"Cannot broadcast from rank {src} under OffbeatStrategy: the first worker shares its value with all. "
                "Have that one bring it, or call torch.distributed."
            )
        return obj if self._run is None else self._run.share(obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all workers: the mean or the sum of a number by the run, all else by torch's group."""
        if not isinstance(tensor, torch.Tensor) or self._run is None:
            return tensor
        how = str(reduce_op).lower().rpartition(".")[2]  # a word, or one of torch's operations
        if tensor.numel() != 1 or group is not None or how not in ("mean", "avg", "sum"):
            return super().reduce(tensor, group, reduce_op)
        module = self.lightning_module
        if module is not None and module._current_fx_name == "training_step" and self._meetings is not None:
            self._meetings.note("self.log(..., on_step=True, sync_dist=True)", "Log with on_epoch=True, on_step=False")
        value = self._run.mean(tensor)
        if how == "sum":
            value *= len(self._run._session.context.control.members)
        if tensor.is_floating_point():
            return torch.full_like(tensor, value)
        if how == "sum":
            return torch.full_like(tensor, round(value))
        return torch.full_like(tensor, value, dtype=torch.float32)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers say so, or any."""
        if self._run is None:
            return decision
        part = self._run.mean(float(decision))
        return part == 1.0 if all else part > 0.0

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, of replicas that are equal."""
        if self._run is not None:
            self._run.settle()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint, and beside it what this worker's run has."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._run is not None:
            state_files.save(self._run, str(filepath))
        elif self.is_global_zero:
            _log.warning(
                "%s has the model, but not what its run had, such as what a server or a codec keeps: that has ended. "
                "Use ModelCheckpoint, which saves while it lasts, for what is to be resumed.",
                filepath,
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's checkpoint."""
        self._resumed_from = str(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, and behind it the run's."""
        super().load_optimizer_state_dict(checkpoint)
        state_files.load(self.run, self._resumed_from)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint with all that is beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            state_files.remove(str(filepath))


def _heed_own_signals(trainer: Any) -> None:
    """Have each worker end by the SIGTERM that it gets itself.

    Since 2.6 Lightning has the first worker broadcast in each step, by torch's group, whether it got one: all others
    would wait for it there, whatever the plan says. Who ends tells the others by the run.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop

    def note(signum: int, _: Any) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note
    loop._broadcast_sigterm_tensor = lambda: None
