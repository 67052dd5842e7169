"""The front end: `offbeat.init()` and `Run`.

    run = offbeat.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()

Call order: (all ranks) `init`; (all ranks) `prepare`, once per model; (each rank) the loop; (all ranks) `close`, or the
end of a ``with`` block, or of the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist

from offbeat.clock import WallClock
from offbeat.engine import (
    Awaited,
    Buffers,
    Control,
    Meter,
    MetricsFile,
    Reducer,
    Waiter,
    Watched,
    distinct,
    start_watch,
)
from offbeat.engine.sparse import sparse_names
from offbeat.errors import ModelError, NetworkError, OffbeatError, PlanError, WorkerLostError
from offbeat.fabric import InMemory, ProcessGroup
from offbeat.layout import arrange
from offbeat.loader import Loader
from offbeat.plan import Plan
from offbeat.rendezvous import join
from offbeat.replica import Replica
from offbeat.trainable import check_modules, check_optimizer, trainable
from offbeat.wire.culprit import END_OF_RUN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from offbeat.fabric import Fabric

_log = logging.getLogger("offbeat")
_TIMEOUT = timedelta(seconds=5)
_runs: set[Run] = set()  # open ones
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def init(
    plan: Plan | None = None,
    *,
    timeout: timedelta | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Run:
    """Join the other workers. Collective: every rank calls it.

    It takes part in an already initialised process group; else it reads the environment that `offbeat run` and
    `torchrun` set; else this worker is alone.

    Args:
        plan: what is composed; that of `offbeat run --plan`, or `Plan()`, if None.
        timeout: a wait longer than this is explained (who has not arrived, and why); 5 s, or that of `offbeat run`.
        run_dir: where metrics are written; that of `offbeat run`, or nowhere.
        seed: of the order in which a prepared loader deals out samples.

    Raises:
        PlanError: if the plan cannot work here.
    """
    if plan is None:
        text = os.environ.get("OFFBEAT_PLAN")
        plan = Plan.from_toml(text) if text else Plan()
    if not isinstance(plan, Plan):
        raise PlanError(f"Cannot use {plan!r} as a plan: make one with offbeat.Plan(...) or Plan.from_toml(text).")
    if timeout is None:
        timeout = timedelta(seconds=float(os.environ.get("OFFBEAT_TIMEOUT_S", _TIMEOUT.total_seconds())))
    if timeout <= timedelta(0):
        raise PlanError(f"Cannot explain waits after {timeout.total_seconds()} s: the timeout must be above 0.")
    if run_dir is None:
        run_dir = os.environ.get("OFFBEAT_RUN_DIR") or None
    return Run(plan, timeout=timeout, run_dir=None if run_dir is None else Path(run_dir), seed=seed)


class Run:
    """One worker's part in a job. Made by `init`."""

    def __init__(self, plan: Plan, *, timeout: timedelta, run_dir: Path | None, seed: int) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self._seed = seed
        self._reducers: list[Reducer] = []
        self._loaders: list[Loader] = []
        self._closed = False
        self._clock = WallClock()
        self._resources = ExitStack()
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        self._waiter = Waiter(
            clock=self._clock,
            timeout=timeout,
            tell=self._tell_stall,
            report_path=None if run_dir is None else run_dir / f"stall-rank{os.environ.get('RANK', '0')}.json",
        )
        if join(self._waiter):
            self._resources.callback(dist.destroy_process_group)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self._metrics = MetricsFile(None if run_dir is None else run_dir / "metrics.jsonl")
        self._resources.callback(self._metrics.close)
        self._meter = Meter(self.rank, self._clock, self._metrics, self._waiter)
        self._control = Control(self._bind("gloo"), self._waiter)
        self._watch = start_watch(self._control) if self.world > 1 else None
        if self._watch is not None:
            self._waiter.witness = Watched(self._watch, self.rank, timeout)
        _runs.add(self)
        self._control.agree("plan", plan.to_toml(), "Start every worker with the same plan.")
        atexit.register(self.close)

    # -- preparing -----------------------------------------------------------------------------------------------

    @overload
    def prepare(self, model: torch.nn.Module, optimizer: OptimizerT) -> tuple[Replica, OptimizerT]: ...
    @overload
    def prepare(
        self, model: torch.nn.Module, optimizer: OptimizerT, loader: Iterable[Any]
    ) -> tuple[Replica, OptimizerT, Any]: ...
    def prepare(
        self, model: torch.nn.Module, optimizer: OptimizerT, loader: Iterable[Any] | None = None
    ) -> tuple[Replica, OptimizerT] | tuple[Replica, OptimizerT, Any]:
        """Make `model` one of `world` equal replicas. Collective: every rank calls it, with the same model.

        Args:
            model: on its device, in its final dtype. Rank 0's parameters and buffers overwrite the others'.
            optimizer: any `torch.optim` optimizer over parameters of `model`; returned as it is.
            loader: an iterable of batches; a `DataLoader` is dealt out to the workers (see `offbeat.loader`).

        Returns:
            The replica and the optimizer, and the loader if one was given.

        Raises:
            ModelError: if the model, the optimizer or the loader cannot be prepared.
            DisagreementError: if the models differ between ranks; it names the first parameter that does.
        """
        parameters = trainable(model)
        check_modules(model)
        check_optimizer(optimizer, model)
        layout = arrange(parameters, bucket_bytes=self.plan.bucket_bytes, sparse=sparse_names(model) & set(parameters))
        self._control.agree(
            "model",
            layout.describe(),
            "Build the same model on every worker: the same layers, order, dtypes and requires_grad.",
        )
        prepared_loader = None if loader is None else self._prepare_loader(loader)
        device = next(iter(parameters.values())).device
        fabric = self._bind("nccl" if device.type == "cuda" else "gloo")
        self._broadcast(model, fabric)
        reducer = Reducer(
            parameters=parameters,
            layout=layout,
            plan=self.plan,
            fabric=fabric,
            control=self._control,
            buffers=Buffers(model, fabric) if self.world > 1 else None,
            waiter=self._waiter,
            meter=self._meter,
        )
        self._resources.callback(reducer.close)
        self._reducers.append(reducer)
        hook = optimizer.register_step_pre_hook(lambda *_: reducer.on_step())
        self._resources.callback(hook.remove)
        replica = Replica(model, reducer)
        self._write_start(model, reducer)
        if prepared_loader is None:
            return replica, optimizer
        return replica, optimizer, prepared_loader

    def _prepare_loader(self, loader: Iterable[Any]) -> Loader:
        prepared = Loader(loader, control=self._control, drawn=self._on_batch, seed=self._seed)
        self._loaders.append(prepared)
        self._meter.loader_counts = True
        return prepared

    def _on_batch(self, *, real: bool, source: int, samples: int) -> None:
        self._meter.samples += samples
        for reducer in self._reducers:
            reducer.share.draw(real=real, source=source)

    def _bind(self, backend: str) -> Fabric:
        fabric: Fabric
        if self.world == 1:
            fabric = InMemory().bind()
        elif isinstance(self.plan.fabric, ProcessGroup):
            spec = self.plan.fabric
            fabric = self._waiter.call(lambda: spec.bind(backend=backend), Awaited("the connection to the others"))
        else:
            raise PlanError(
                f"Cannot run {self.world} worker processes over {self.plan.fabric!r}: it lives in one process. "
                "Use ProcessGroup() - at `plan.fabric`."
            )
        self._resources.callback(fabric.close)
        return fabric

    def _broadcast(self, model: torch.nn.Module, fabric: Fabric) -> None:
        """Give every rank rank 0's parameters (frozen ones too) and buffers."""
        if self.world == 1:
            return
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        named = [*model.named_parameters(), *model.named_buffers()]
        with torch.no_grad():
            for name, tensor in named:
                if name in ignored or not tensor.numel():
                    continue
                own = distinct(tensor.detach())
                whole = own.contiguous()
                self._waiter.wait(fabric.broadcast(whole, 0), Awaited(f"the first broadcast of {name}"))
                if whole.data_ptr() != own.data_ptr():
                    own.copy_(whole)

    def _write_start(self, model: torch.nn.Module, reducer: Reducer) -> None:
        from offbeat import __version__

        buckets = [
            {"index": b.index, "size_bytes": b.size_bytes, "parameters": [s.name for s in b.slots]}
            for b in reducer.layout.buckets
        ]
        self._meter.begin(
            world=self.world,
            host=os.uname().nodename,
            pid=os.getpid(),
            torch=str(torch.__version__),
            offbeat=__version__,
            plan=repr(self.plan),
            model=type(model).__name__,
            buckets=buckets,
        )

    # -- while training ------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Exchanges so far, of the model prepared first."""
        return self._reducers[0].step if self._reducers else 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward passes inside do not communicate, for any prepared model."""
        before = [reducer.sync for reducer in self._reducers]
        for reducer in self._reducers:
            reducer.sync = False
        try:
            yield
        finally:
            for reducer, sync in zip(self._reducers, before, strict=True):
                reducer.sync = sync

    def log(self, **values: float | torch.Tensor) -> None:
        """Record values of this step, such as ``loss=loss``; shown live, in the report and in metrics.jsonl."""
        numbers = {n: float(v.detach() if isinstance(v, torch.Tensor) else v) for n, v in values.items()}
        self._meter.log(max(0, self.step - 1), numbers)

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """The weighted mean of a number over all workers, such as an accuracy. Collective.

        Args:
            value: this worker's.
            weight: how much it counts, such as the number of samples behind it.

        Raises:
            ValueError: if all weights are 0.
        """
        total, weights = self._control.sum("the mean over all workers", (float(value) * weight, weight))
        if weights == 0:
            raise ValueError("Cannot take a mean: all weights are 0.")
        return float(total / weights)

    def state_dict(self) -> dict[str, Any]:
        """Plan, counts of steps and epochs, and the codec's state, for a checkpoint beside model and optimizer."""
        return {
            "plan": self.plan.to_toml(),
            "seed": self._seed,
            "models": [reducer.state_dict() for reducer in self._reducers],
            "epochs": [loader.epoch for loader in self._loaders],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; after `prepare`.

        Raises:
            ModelError: if another number of models or loaders was prepared.
        """
        for what, mine in (("models", self._reducers), ("epochs", self._loaders)):
            if len(state[what]) != len(mine):
                raise ModelError(
                    f"Cannot load this state: it has {len(state[what])} {what}, this run {len(mine)}. "
                    "Prepare the same models and loaders before load_state_dict."
                )
        saved = Plan.from_toml(state["plan"])
        for name, (here, there) in self.plan.diff(saved).items():
            _log.warning("The checkpoint was written with %s=%r; this run goes on with %r.", name, there, here)
        self._seed = int(state["seed"])
        for reducer, one in zip(self._reducers, state["models"], strict=True):
            reducer.load_state_dict(one)
        for loader, epoch in zip(self._loaders, state["epochs"], strict=True):
            loader.epoch = int(epoch)

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until every worker is done, then release everything; a second call does nothing."""
        self._close(error=None)

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        _runs.discard(self)
        # What the interpreter dies of, at exit; or what a wait ended with, whoever caught it: the workers are apart.
        error = error or getattr(sys, "last_value", None) or self._waiter.failure
        self._meter.end(self.step, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            self._say_last_words(error)
        elif self.world > 1:
            error = self._leave_together()
        if self._watch is not None:
            self._watch.close(well=error is None)
        self._resources.close()

    def _tell_stall(self, text: str) -> None:
        _log.warning("%s", text)
        if self._reducers:
            self._meter.event("stall", text, self.step)

    def _say_last_words(self, error: BaseException) -> None:
        """Let the other workers know what this one dies of."""
        if self._watch is not None:
            phase = "lost" if isinstance(error, (WorkerLostError, NetworkError)) else "raised"
            self._watch.last_words(phase, "".join(traceback.format_exception(error)))

    def _leave_together(self) -> OffbeatError | None:
        # A worker that closed its sockets while another still reads its last bucket would look like a crash.
        try:
            self._control.sum(END_OF_RUN)
        except OffbeatError as error:
            _log.warning("This worker is done, but not all are: %s", error)
            return error
        return None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close(error)


def say_last_words(error: BaseException) -> None:
    """Let the other workers know what this process dies of; for whoever ends it without closing its runs."""
    for run in tuple(_runs):
        run._say_last_words(error)
