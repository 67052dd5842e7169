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
import operator
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist

from offbeat.clock import WallClock, to_timedelta
from offbeat.diagnosis.explain import END_OF_RUN, without_quoted
from offbeat.diagnosis.stall_witness import SentinelWitness
from offbeat.diagnosis.wait import BlockingWait, NullWitness, WaitContext
from offbeat.engine import (
    AllReduceSwitch,
    ControlGroup,
    HistoryRecorder,
    JoinClient,
    MetricsFile,
    StatusReporter,
    StepMetrics,
    SynchronizerProxy,
    happenings,
    ignored_names,
    leave_file,
    named_values,
    shortened,
    state_checks,
)
from offbeat.engine.factory import PreparedModel, SynchronizerFactory
from offbeat.engine.sentinels import join_watch, start_watch
from offbeat.engine.sparse import sparse_names
from offbeat.errors import ModelError, NetworkError, OffbeatError, PlanError, WorkerLostError
from offbeat.exit_codes import LEFT
from offbeat.fabric import BindContext, Binds, ElasticGroup, InMemory, ProcessGroup, never_destroy
from offbeat.loading import position
from offbeat.loading.manager import LoaderManager
from offbeat.plan import Plan
from offbeat.protocol.worker_status import TrainingStatus
from offbeat.run.elastic_join import ElasticJoin, JoinResult
from offbeat.run.model_checks import Kinds, check_given, check_modules, check_optimizer, inventory, trainable
from offbeat.run.plan_manager import PlanManager
from offbeat.run.rendezvous import ended, join, joins, leave_store, stay, store_of_job
from offbeat.run.replica import Replica, closed, opened
from offbeat.run.step_check import StepCheck
from offbeat.run.uneven_inputs import UnevenInputs
from offbeat.run.wrapper_check import WrapperCheck
from offbeat.short_name import short_name
from offbeat.sync import BSP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch._C._distributed_c10d import Store

    from offbeat.diagnosis.sentinel_client import SentinelClient
    from offbeat.engine.server_session import ServerSession
    from offbeat.fabric import Fabric

_log = logging.getLogger("offbeat")
_TIMEOUT = timedelta(seconds=5)
_MOST_SHOWN = 4096  # characters of a plan
_MOST_EXPECTED = 1 << 53
_MOST_SEEDS = 1 << 64
_runs: set[Run] = set()  # open ones
_told: list[Run] = []  # to leave
_apart: list[StepCheck] = []  # of this process's runs with several workers
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def init(
    plan: Plan | None = None,
    *,
    timeout: timedelta | float | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    history: str | os.PathLike[str] | None = None,
) -> Run:
    """Join the other workers of a job and return this worker's `Run`. Collective: every rank calls it.

    One process takes part in one run at a time: that of a worker that is alone ends when another begins, as where a
    notebook's cell is run again.

    It takes part in an already initialised process group; else it reads the environment that `offbeat run` and
    `torchrun` set; else this worker is alone.

    Args:
        plan: what is composed; that of `offbeat run --plan`, or `Plan()`, if None.
        timeout: a wait longer than this is explained (who has not arrived, and why): seconds, or a timedelta; 5 s, or
            that of `offbeat run`.
        run_dir: where metrics are written; that of `offbeat run`, or nowhere.
        seed: of the order in which a prepared loader deals out samples; the same on every worker.
        history: folder in which this worker records what it has after each step, for `offbeat verify-run`; that of
            `offbeat run --history`, or none.

    Raises:
        PlanError: if the plan cannot work here, a folder cannot be written to, or this process is in a run with other
            workers, which is open.
    """
    if plan is None:
        text = os.environ.get("OFFBEAT_PLAN")
        plan = Plan.from_toml(text) if text else Plan()
    if not isinstance(plan, Plan):
        raise PlanError(f"Cannot use {plan!r} as a plan: make one with offbeat.Plan(...) or Plan.from_toml(text).")
    if timeout is None:
        text = os.environ.get("OFFBEAT_TIMEOUT_S")
        timeout = _timeout(text) if text else _TIMEOUT
    timeout = to_timedelta(timeout, "Cannot explain waits")
    seed = _seed(seed)
    if run_dir is None:
        run_dir = os.environ.get("OFFBEAT_RUN_DIR") or None
    if history is None:
        history = os.environ.get("OFFBEAT_HISTORY") or None
    for run in [one for one in _runs if one._pid == os.getpid()]:
        run._make_way()
    return Run(
        plan,
        timeout=timeout,
        run_dir=None if run_dir is None else Path(run_dir),
        seed=seed,
        history=None if history is None else Path(history),
    )


class Run:
    """A worker's handle on its job: it prepares the model, and knows rank, step and plan. Made by `init`."""

    def __init__(
        self, plan: Plan, *, timeout: timedelta, run_dir: Path | None, seed: int, history: Path | None = None
    ) -> None:
        self.run_dir = run_dir
        self._seed = seed
        self._timeout = timeout
        self._pid = os.getpid()
        self._reducers: list[SynchronizerProxy] = []
        self._prepared_models: list[PreparedModel] = []
        self._models: list[torch.nn.Module] = []
        self._ignored: set[int] = set()  # ids of parameters that the user asked not to average
        self._prepared: dict[int, str] = {}  # names of the parameters of all models, by id
        self._fabrics: list[Fabric] = []
        self._came_with: list[str] = []  # what a newcomer without a server was handed, until its first step
        self._total_epochs, self._total_steps = 0.0, 0
        self._trains_since_s = self._waited_before_s = 0.0
        self._closed = self._told_untuned = self._drains = self._has_left = False
        self._clock = WallClock()
        self._resources = ExitStack()
        self._reporter: StatusReporter | None = None
        if run_dir is not None:
            _make_folder(run_dir)
        self._waiter = BlockingWait(
            clock=self._clock,
            timeout=timeout,
            tell=self._tell_stall,
            report_path=None if run_dir is None else run_dir / f"stall-rank{os.environ.get('RANK', '0')}.json",
        )
        store = join(self._waiter)
        self._owns_group = store is not None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self._joins = None if self.world > 1 else joins()
        self.rank, began_with = self._joins or (self.rank, self.world)
        newcomer, told = None, None
        if self._joins is not None and store is None and (store := store_of_job(plan)) is not None:
            self.world = began_with
            newcomer = JoinClient(store, self.rank, self._waiter, version=_version())
            told = newcomer.ask(plan.to_toml(), ended)
            if self._speaks_for_newcomers:
                _log.warning("Rank %d has reached those that train, and prepares what they have.", self.rank)
            plan = Plan.from_toml(told.plan)
        self._metrics = _open_metrics(run_dir)
        self._meter = StepMetrics(self.rank, self._clock, self._metrics, self._waiter)
        elastic = plan.outlives and self.world > 1
        self._circle = ElasticGroup(_shared(store), self.rank, self.world, timeout) if elastic else None
        members = None if self._circle is None else lambda: self._circle.members  # type: ignore[union-attr]
        self._control = ControlGroup(self._bind(plan, "gloo"), self._waiter, members)
        if newcomer is not None:
            self._control.compares = newcomer.compare
        self._data = LoaderManager(
            plan,
            control=self._control,
            waiter=self._waiter,
            meter=self._meter,
            world=began_with,
            seed=seed,
            outlives=elastic,
            reducers=self._reducers,
            models=self._models,
            begins=lambda: self._swapping.at_border(),
            draws=lambda: self._take_in(drawing=True),
            tell=self._warn,
        )
        self._diary = HistoryRecorder(_every(os.environ.get("OFFBEAT_HASH_EVERY", "1")))
        self._uneven = UnevenInputs(
            self._control,
            self._diary,
            prepared=self._prepared_models,
            exchangers=self._reducers,
            is_elastic=elastic,
            tell=lambda text: self._tell_all("join", text),
        )
        self._exchanging = SynchronizerFactory(self._control, self._waiter, self._meter, self._diary)
        self._swapping = PlanManager(
            plan,
            control=self._control,
            waiter=self._waiter,
            clock=self._clock,
            timeout=timeout,
            meter=self._meter,
            diary=self._diary,
            data=self._data,
            exchanging=self._exchanging,
            prepared=self._prepared_models,
            reducers=self._reducers,
            rank=self.rank,
            seed=seed,
            run_dir=run_dir,
            joins=self._joins,
            circle=self._circle,
            tell=lambda text: self._tell_all("swap", text),
            tell_of_server=self._tell_of_server,
        )
        self._watch, watched = None, None
        if told is not None:
            self._watch = join_watch(self.rank, self.world, hub=told.hub, token=told.token)
        elif self.world > 1:
            self._watch = start_watch(self._control, outlives=elastic)
            if self._watch is not None and self.rank == 0 and run_dir is not None:
                leave_file(run_dir / "hub.json", {"address": self._watch.hub, "token": self._watch.token.hex()})
        if self._watch is not None:
            self._waiter.witness = watched = self._witness(self._watch, timeout)
        else:
            self._waiter.witness = NullWitness()
        _runs.add(self)
        atexit.register(self._close_at_exit)
        self._membership: ElasticJoin | None = None
        try:
            self._control.agree("plan", plan.to_toml(), "Start every worker with the same plan.")
            self._control.agree("seed", str(seed), "Give offbeat.init(seed=...) the same number on every worker.")
            plan.check_world(self.world)
            self._swapping.connect()
            if self._watch is not None or self._server is not None:
                self._reporter = StatusReporter(self._status, self._status_outlets)
            job = "" if told is None else told.history
            if history is not None:
                job = self._open_diary(history, job)
            if self._circle is not None:
                stay()
                if run_dir is not None and self.rank == 0:
                    leave_store(run_dir, plan, self.world)
                self._membership = ElasticJoin(
                    _shared(store),
                    version=_version(),
                    newcomer=newcomer,
                    control=self._control,
                    circle=self._circle,
                    waiter=self._waiter,
                    watch=self._watch,
                    watched=watched,
                    data=self._data,
                    models=self._models,
                    exchangers=lambda: self._swapping.together,
                    history=job,
                )
        except OffbeatError as error:
            self._close(error)
            raise
        if self._has_others:
            opened(self)
            self._steps = StepCheck(self.world, self._warn)
            self._resources.callback(self._steps.close)
            _apart.append(self._steps)

    @property
    def _has_others(self) -> bool:
        """Whether other workers take part, or may."""
        return self.world > 1 or self._joins is not None

    def _witness(self, watch: SentinelClient, timeout: timedelta) -> SentinelWitness:
        circle = self._circle
        if circle is None:
            return SentinelWitness(watch, self.rank, timeout)
        watched = SentinelWitness(watch, self.rank, timeout, members=lambda: circle.members)
        circle.gone, circle.changed = watched.gone, self._go_on_without
        if "OFFBEAT_OUTLIVES" in os.environ:  # for the launcher: a worker that is lost does not end the job
            Path(os.environ["OFFBEAT_OUTLIVES"]).touch()
        return watched

    def _go_on_without(self, lost: Mapping[int, str]) -> None:
        """Say who is lost, and what that means for the batch and the learning rate."""
        assert self._circle is not None
        changes = self._data.lose(lost)
        if not lost:
            text = "The workers had lost their connections, and have made new ones; nobody is missing."
        else:
            told = " ".join(f"Rank {rank} {why.rstrip(' .')}." for rank, why in sorted(lost.items()))
            left = ", ".join(map(str, self._circle.members))
            text = (
                f"{told} What is left, rank {left}, goes on, and the step at hand is the mean of their gradients: "
                f"{changes}."
            )
        self._tell_all("membership", text)

    def _open_diary(self, folder: Path, job: str) -> str:
        """Have all workers' histories name the same job, this one if it has a name; that. Collective."""
        if self._server is not None:
            job = self._server.job
        elif not job:
            job = self._control.texts("the name of this run's history", secrets.token_hex(8))[0]
        self._diary.open(folder, job=job, rank=self.rank)
        return job

    @property
    def plan(self) -> Plan:
        """The plan that holds; a swap changes it."""
        return self._swapping.plan

    @property
    def _server(self) -> ServerSession | None:
        return self._swapping.server

    # -- preparing -----------------------------------------------------------------------------------------------

    @overload
    def prepare(self, model: torch.nn.Module, optimizer: OptimizerT) -> tuple[Replica, OptimizerT]: ...
    @overload
    def prepare(
        self, model: torch.nn.Module, optimizer: OptimizerT, loader: Iterable[Any]
    ) -> tuple[Replica, OptimizerT, Any]: ...
    def prepare(
        self, model: torch.nn.Module, optimizer: OptimizerT, loader: Iterable[Any] | None = None, *others: object
    ) -> tuple[Replica, OptimizerT] | tuple[Replica, OptimizerT, Any]:
        """Make `model` one of `world` equal replicas. Collective: every rank calls it, with the same model.

        Args:
            model: on its device, in its final dtype. Rank 0's parameters and buffers overwrite the others'.
            optimizer: any `torch.optim` optimizer over parameters of `model`; returned as it is.
            loader: an iterable of batches; a `DataLoader` is dealt out to the workers (see
                `offbeat.loading.sharded_loader`).

        Returns:
            The replica and the optimizer, and the loader if one was given.

        Raises:
            ModelError: if the model, the optimizer or the loader cannot be prepared.
            DisagreementError: if the models differ between ranks; it names the first parameter that does.
        """
        self._check_open("prepare a model")
        check_given(loader, others)
        check_modules(model)
        parameters = trainable(model)
        check_optimizer(optimizer, model)
        device = next(iter(parameters.values())).device
        backend = "nccl" if device.type == "cuda" else "gloo"
        sparse = sparse_names(model) & set(parameters) if self._server is None else set()
        self._control.agree(
            "model",
            inventory(model, sparse),
            "Build the same model on every worker: the same layers, order, dtypes, requires_grad and buffers.",
        )
        self._claim(model, parameters)
        one = PreparedModel(len(self._reducers), model, parameters, optimizer, self._bind(self.plan, backend))
        if self._membership is None or not self._membership.is_outside:
            self._exchanging.broadcast(one)
        self._exchanging.agree_on_optimizer(one, is_served=self._server is not None)
        if self._server is not None:
            reducer = SynchronizerProxy(self._exchanging.serve(one, self.plan, self._server))
        else:
            reducer = SynchronizerProxy(self._exchanging.replicate(one, self.plan))
        self._prepared_models.append(one)
        self._resources.callback(reducer.close)
        self._reducers.append(reducer)
        self._models.append(model)
        prepared_loader = None if loader is None else self._data.prepare(loader)
        kinds, wrappers = Kinds(parameters), WrapperCheck(model)
        self._resources.callback(wrappers.close)

        def step() -> None:
            wrappers.step()
            self._before_step(optimizer, reducer)

        def begin(replica: Replica) -> None:
            kinds.check()
            wrappers.forward(replica)
            if not self._uneven.is_open:
                self._take_in(drawing=False)

        before = optimizer.register_step_pre_hook(lambda *_: step())
        after = optimizer.register_step_post_hook(lambda *_: self._after_step(reducer, parameters))
        self._resources.callback(before.remove)
        self._resources.callback(after.remove)
        replica = Replica(model, reducer, begin, self._join)
        if self._membership is not None and self._membership.is_due:
            if self._speaks_for_newcomers:
                _log.warning("Rank %d is ready, and waits to be taken in behind one of their steps.", self.rank)
            self._tell_of(came := self._membership.come_in())
            self._swapping.plan = came.plan
            self._swapping.joined(came.ranks)
            self._meter.start_anew()
            self._came_with = self._held()
        if self._joins is not None and self._server is not None and not self._trains_since_s:
            self._tell_all("membership", f"Rank {self.rank} has joined at version {self._server.version(one.number)}.")
        if not self._trains_since_s:
            self._trains_since_s, self._waited_before_s = self._clock.now_s(), self._waiter.waited_s
        if self._has_others:
            self._steps.prepared()
        self._write_start(model, reducer)
        self._diary.trains(len(self._reducers) - 1, self.plan, self.world, parameters.values())
        if prepared_loader is None:
            return replica, optimizer
        return replica, optimizer, prepared_loader

    def _claim(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        taken = [name for name, p in parameters.items() if id(p) in self._prepared]
        if taken:
            raise ModelError(
                f"Cannot prepare {taken[0]} twice: it is {self._prepared[id(parameters[taken[0]])]} of a model that "
                "was prepared before, and would be averaged twice. Prepare one module that holds all parts."
            )
        self._prepared.update({id(p): name for name, p in parameters.items()})
        ignored = ignored_names(model)
        self._ignored |= {id(p) for name, p in model.named_parameters() if name in ignored}

    def _before_step(self, optimizer: torch.optim.Optimizer, reducer: SynchronizerProxy) -> None:
        if self.plan.tuning is not None and self.world > 1 and not self._data.loaders and not self._told_untuned:
            self._told_untuned = True
            _log.warning("Batches are not tuned: %s needs a prepared DataLoader.", short_name(self.plan.tuning))
        self._data.stepped()
        self._swapping.take_plan()
        reducer.on_step()
        for group in optimizer.param_groups if self.world > 1 else ():
            for p in group["params"]:
                if p.grad is not None and id(p) not in self._prepared and id(p) not in self._ignored:
                    raise ModelError(
                        f"Cannot step: a parameter of shape {list(p.shape)} has a gradient that was not averaged, "
                        "because it was frozen, or not there, when the model was prepared. Unfreeze and add parameters "
                        "before prepare."
                    )

    def _after_step(self, reducer: SynchronizerProxy, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        reducer.after_step()
        self._came_with = []
        if self._server is None and reducer.step:
            model, samples = self._reducers.index(reducer), self._meter.last_samples
            weights = reducer.now.take_weights() if isinstance(reducer.now, AllReduceSwitch) else ()
            self._diary.has(model, reducer.step - 1, parameters.values(), samples=samples, weights=weights)
        if self._uneven.is_open:
            pass  # those that are done make no step, behind which all could confer
        elif isinstance(reducer.now, AllReduceSwitch):
            called = reducer.now.take_call()
            looks = self.is_first
            wanted = self._swapping.calls(looks=looks)
            if self._membership is not None:
                self._membership.stepped(self._reducers.index(reducer))
                wanted |= self._membership.calls(self.plan, looks=looks)
            reducer.now.calls = wanted
            if called:
                self._confer()
        else:
            if self._membership is not None and self._server is not None:
                self._membership.turn_away(looks=self.is_first)
            if not self._data.leased:
                self._swapping.at_border()
        if self._drains:  # not before the script is through with this step
            self._drains = False
            for prepared in self._models:
                prepared.register_forward_pre_hook(lambda *_: self._drain())

    @contextmanager
    def _join(self, *, divides_by_all: bool, raises: bool) -> Iterator[None]:
        """What a replica's `join` does."""
        self._check_open("join the other workers")
        if self.world == 1 or self._data.loaders:
            yield
        elif self._server is None:
            self._take_in(drawing=False)
            with self._uneven.join(divides_by_all=divides_by_all, raises=raises):
                yield
        elif divides_by_all or raises:
            option = "divide_by_initial_world_size" if divides_by_all else "throw_on_early_termination"
            raise PlanError(
                f"Cannot join with {option} at a server: it goes by what those bring that are there. Leave it out, or "
                "use ProcessGroup() - at `plan.fabric`."
            )
        else:
            yield
            self.settle()

    def _confer(self) -> None:
        """Have another plan hold, and expect newcomers, if that is wanted. Collective, behind a step of all."""
        self._swapping.confer()
        if self._membership is not None:
            self._membership.expect()
        for one in self._swapping.together:
            one.calls = False

    def _take_in(self, *, drawing: bool) -> None:
        """Have those come in that are expected, if all are where a newcomer begins. Collective there."""
        if self._membership is None or self._server is not None:
            return
        if came := self._membership.take_in(self.plan, drawing=drawing):
            self._tell_of(came)
            self._diary.admits(came.ranks)
            self._swapping.joined(came.ranks)

    def _tell_of(self, came: JoinResult) -> None:
        one = len(came.ranks) == 1
        assert self._circle is not None
        self._tell_all(
            "membership",
            f"Rank {', '.join(map(str, came.ranks))} {'has' if one else 'have'} joined at step {self.step}: "
            f"{len(self._circle.members)} workers take part; {came.changes}.",
        )

    def _tell_all(self, what: str, text: str) -> None:
        """What all workers have to say alike, said once."""
        if self.is_first or self._speaks_for_newcomers:
            _log.warning("%s", text)
        self._meter.event(what, text, self.step, plan=self.plan.to_toml() if what == "swap" else "")

    def _tell_of_server(self, text: str) -> None:
        """What the server has told all workers; where it runs it stands in the log already."""
        if self._speaks_for_newcomers:
            _log.warning("%s", text)
        self._meter.event("server", text, self.step)

    @property
    def _speaks_for_newcomers(self) -> bool:
        """Whether this worker is the first of some that have joined together, whose log has nothing of the others'."""
        return self._joins is not None and os.environ.get("LOCAL_RANK", "0") == "0"

    def _warn(self, text: str) -> None:
        """What this worker has to say about itself, once."""
        _log.warning("%s", text)
        self._meter.event("warning", text, self.step)

    def _make_way(self) -> None:
        """Another run is to begin in this process."""
        if self._has_others:
            raise PlanError(
                f"Cannot begin a second run: this process is rank {self.rank} of {self.world} in one that is open. "
                "Call run.close() first, or write with offbeat.init() as run: around what belongs together."
            )
        _log.warning(
            "offbeat.init() is called a second time: the run that this process had open, at step %d, is closed. Train "
            "with what the new run's prepare returns.",
            self.step,
        )
        self.close()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ModelError(
                f"Cannot {what}: this run is closed. Call run.close() behind all that the workers do together."
            )

    def out_of_memory(self) -> None:
        """Give up the batch at hand, because it does not fit into memory; later ones of this worker are smaller.

            try:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
                run.out_of_memory()
                continue

        Its samples are computed by others. Batches shrink only with `Plan(tuning=BatchTuning())`.

        Raises:
            ModelError: where all workers compute each step together, and one cannot be left out.
        """
        self._data.crowded()

    def _bind(self, plan: Plan, backend: str) -> Fabric:
        # Beside a server a process group carries what is agreed on at the beginning; who is alone needs none.
        spec = InMemory() if self.world == 1 else ProcessGroup() if plan.is_served else plan.fabric
        assert isinstance(spec, Binds), "checked when the plan was made"
        context = BindContext(self.rank, self.world, backend, self._circle)
        fabric = self._waiter.call(lambda: spec.bind(context), WaitContext("the connection to the others"))
        self._fabrics.append(fabric)
        return fabric

    def _write_start(self, model: torch.nn.Module, reducer: SynchronizerProxy) -> None:
        buckets = [
            {"index": b.index, "size_bytes": b.size_bytes, "parameters": [s.name for s in b.slots]}
            for b in reducer.layout.buckets
        ]
        self._meter.begin(
            world=self.world,
            host=os.uname().nodename,
            pid=os.getpid(),
            torch=str(torch.__version__),
            offbeat=_version(),
            plan=repr(self.plan),
            model=type(model).__name__,
            buckets=buckets,
        )

    # -- while training ------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those that train: it writes what is written once, as a checkpoint is.

        Without a server that is another one when the first is lost; with one it is rank 0.
        """
        return self.rank == (0 if self._circle is None else self._circle.members[0])

    @property
    def has_joined(self) -> bool:
        """Whether this worker has joined a job that trained already, and begins with what the others have."""
        return self._joins is not None

    @property
    def step(self) -> int:
        """Exchanges so far, of the model prepared first."""
        return self._reducers[0].step if self._reducers else 0

    @property
    def has_data(self) -> bool:
        """Whether the batch at hand counts; False while a prepared loader repeats its last one."""
        return self._data.has_data

    @property
    def progress(self) -> float:
        """Epochs so far of the loader prepared first, as a float: of all workers together, with the batch at hand.

        For schedules: with leased data workers make different numbers of steps, and this is alike on all. Never less
        than before. Where the length of an epoch is not known it counts whole ones.

        Raises:
            ModelError: if no loader was prepared.
        """
        return self._data.progress

    def expect(self, *, epochs: float | None = None, steps: int | None = None) -> None:
        """Say how long this run is to be, as `progress` or as `step` counts, so that `offbeat top` tells what is left.

        Nothing else follows from it: the run ends when the script ends it. A later call replaces an earlier one.

        Args:
            epochs: at which `progress` it ends.
            steps: at which `step`, if that is what it goes by.

        Raises:
            ValueError: unless one of them is given, and above 0.
        """
        given = [value for value in (epochs, steps) if value is not None]
        if len(given) != 1 or not 0 < given[0] < _MOST_EXPECTED:
            raise ValueError(
                f"Cannot expect {epochs!r} epochs and {steps!r} steps: give one of them, as a number above 0."
            )
        self._total_epochs, self._total_steps = float(epochs or 0.0), int(steps or 0)

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
        numbers = {name: _number(value, name) for name, value in values.items()}
        self._meter.log(max(0, self.step - 1), numbers)

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """The weighted mean of a number over all workers, such as an accuracy. Collective.

        Args:
            value: this worker's.
            weight: how much it counts, such as the number of samples behind it.

        Raises:
            ValueError: if all weights are 0, or `value` is no single number.
        """
        self._check_open("take a mean over all workers")
        question, numbers = "the mean over all workers", (_number(value, "value") * weight, weight)
        if self._server is None:
            total, weights = self._control.sum(question, numbers)
        else:
            total, weights = self._server.sum(question, numbers, self._waiter)
            for reducer in self._reducers:
                reducer.refreshed()
        if weights == 0:
            raise ValueError("Cannot take a mean: all weights are 0.")
        return float(total / weights)

    def settle(self) -> None:
        """Make all replicas equal now; before an evaluation, a checkpoint, or the end. Collective.

        With `LocalSGD` the workers average; with a parameter server each takes the newest parameters, once all are
        there. Otherwise they are equal already, and nothing happens.
        """
        self._check_open("make replicas equal")
        for reducer in self._reducers:
            reducer.settle()
        if self._server is not None:
            self._server.settle(self._waiter)
            for reducer in self._reducers:
                reducer.refreshed()

    def swap(self, plan: Plan | None = None, **parts: Any) -> None:
        """Swap the policy while training, for all workers, such as ``run.swap(sync=SSP(4))``.

        Any worker may call it, at any time, or all. All are asked, and then it holds for all at once, between two
        updates: nothing that was computed or is on its way is lost. If one cannot go by it, the present one goes on.

        Without a server the workers meet only when they exchange something: then it returns at once, and the other plan
        holds from behind the next exchange on. What becomes of it is logged, and an event of the run.

        Args:
            plan: that is to hold.
            parts: of it, by name; the others stay as they are.

        Raises:
            PlanError: if it cannot be; then nothing has changed.
            NetworkError: if the server is gone.
        """
        self._check_open("swap the plan")
        self._swapping.swap(plan, **parts)

    def state_dict(self) -> dict[str, Any]:
        """Plan, step, place in the data, and the codec's state, for a checkpoint beside model and optimizer.

        It may be taken anywhere in the loop: after `load_state_dict` the loader goes on behind the batches given out.
        """
        return {
            "plan": self.plan.to_toml(),
            "seed": self._seed,
            "models": [reducer.state_dict() for reducer in self._reducers],
            "loaders": self._data.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; after `prepare`, and after the model's. Collective.

        A worker that has joined others without a server has what they have, and leaves the state as it is before its
        first step.

        Raises:
            ModelError: if another number of models or loaders was prepared, it lacks what this plan needs, or it is
                damaged; with a server on all ranks, if one of them cannot load its own; if this worker has just joined
                a job with a server, or has changed what others without one have handed it.
            DisagreementError: without a server, if the workers load different ones.
        """
        self._check_open("load a checkpoint")
        if self._came_with:
            if self._held() != self._came_with:  # its replica would not be theirs, and nothing would say so
                raise ModelError(
                    f"Cannot load a checkpoint as rank {self.rank}: this worker has just joined with what the others "
                    "have, and its script has put other values in their place. Have it load nothing where "
                    "run.has_joined, as offbeat.Checkpoints does."
                )
            _log.warning("Rank %d has joined with what the others have; the checkpoint is left as it is.", self.rank)
            return
        if self._joins is not None and self._server is not None and not self.step:  # it would wait for ever
            raise ModelError(
                f"Cannot load a checkpoint as rank {self.rank}: this worker has just joined a job that trains, whose "
                "workers do not load one now. Have its script load nothing where run.has_joined."
            )
        try:
            self._take_over(state)
        except Exception as error:
            if self._server is not None:  # where the others wait
                why = str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
                with suppress(OffbeatError):
                    self._server.take_over(self._waiter, why)
            raise
        if self._server is not None:
            self._server.take_over(self._waiter)
        self._diary.loaded()
        if self._server is not None:
            for reducer in self._reducers:
                reducer.refreshed()
        wanted = self._server is None and self._swapping.calls(looks=self.is_first)
        for one in self._swapping.together:
            one.calls = wanted

    def _take_over(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise state_checks.damaged(TypeError(f"it is a {type(state).__name__}, not a dict"))
        if why := state_checks.why_not(state):
            raise state_checks.damaged(ValueError(why))
        if lacked := [name for name in ("plan", "seed", "models", "loaders") if name not in state]:
            raise ModelError(f"Cannot load this state: it has no {lacked[0]!r}. It is damaged, or no run.state_dict().")
        for what, mine in (("models", self._reducers), ("loaders", self._data.loaders)):
            if not isinstance(state[what], (list, tuple)):
                raise state_checks.damaged(TypeError(f"its {what} are a {type(state[what]).__name__}, not a list"))
            if len(state[what]) != len(mine):
                raise ModelError(
                    f"Cannot load this state: it has {len(state[what])} {what}, this run {len(mine)}. "
                    "Prepare the same models and loaders before load_state_dict."
                )
        if not isinstance(state["plan"], str):
            raise state_checks.damaged(TypeError(f"its plan is a {type(state['plan']).__name__}, not a text"))
        seed = state_checks.whole(state["seed"], "seed", least=-(_MOST_SEEDS >> 1), most=_MOST_SEEDS - 1)
        try:
            self._compare_plans(state["plan"])
            self._seed = seed
            for reducer, one in zip(self._reducers, state["models"], strict=True):
                reducer.load_state_dict(one)
            self._data.load_state_dict(state["loaders"], seed=self._seed)
            if self._server is None and self.world > 1:  # behind all that one may refuse, so that the others hear of it
                self._compare_states(state)
        except KeyError as error:
            raise ModelError(
                f"Cannot load this state: it has no {state_checks.shown(error.args[0])}, which this plan needs. Resume "
                f"with the plan that it was written with, and with the same model. It was\n{_cut(state['plan'])}"
            ) from error
        except OffbeatError:
            raise
        except (TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError) as error:
            raise state_checks.damaged(error) from error

    def _held(self) -> list[str]:
        """Digests of all parameters, and of what the optimizers have gathered."""
        return [line for one in self._prepared_models for line in (*one.digests(), *one.digests_gathered())]

    def _compare_states(self, state: Mapping[str, Any]) -> None:
        """See that all workers go on from the same place, and with the same parameters if they have to. Collective."""
        lines = [f"seed {state['seed']}"]
        lines += [f"step {one['step']} of model {number}" for number, one in enumerate(state["models"])]
        lines += [f"{position.told(one)} of loader {number}" for number, one in enumerate(state["loaders"])]
        lines += [f"layout {one.layout.digest[:16]} of model {number}" for number, one in enumerate(self._reducers)]
        if isinstance(self.plan.sync, BSP):
            lines += [line for one in self._prepared_models for line in one.digests()]
        self._control.compare(
            "checkpoint",
            "\n".join(lines),
            "Load the same file on every worker: the model, the optimizer and run.load_state_dict, in this order.",
        )

    def _compare_plans(self, written: str) -> None:
        try:
            saved = Plan.from_toml(written)
        except PlanError:  # with a part that is not offbeat's own, or not any more
            if written != self.plan.to_toml():
                _log.warning("The checkpoint was written with another plan:\n%s", _cut(written))
            return
        self._swapping.go_on_from(saved)
        for name, (here, there) in self.plan.diff(saved).items():
            _log.warning(
                "The checkpoint was written with %s=%s; this run goes on with %s.",
                name, short_name(there), short_name(here),
            )  # fmt: skip

    def rng_state(self) -> dict[str, Any]:
        """Save this worker's random generators (Python's, NumPy's, torch's), which are not in `state_dict`.

        As each worker has its own, each saves it in a file of its own, as `offbeat.Checkpoints` does. It may be taken
        anywhere in the loop.
        """
        return self._data.rng_state()

    def load_rng_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the random numbers of `rng_state`; the last that is loaded.

        A prepared loader in whose middle it was taken draws its order and the batches that were given out once more,
        with the random numbers of then, before it goes on.

        Raises:
            ValueError: if it is damaged, or of other loaders; then nothing has changed.
        """
        self._data.load_rng_state(state)

    # -- for those who look --------------------------------------------------------------------------------------

    def _status(self) -> TrainingStatus:
        """How the training goes; asked for on another thread."""
        meter, loaders, plan = self._meter, self._data.loaders, self.plan
        used = meter.resources.sample()
        return TrainingStatus(
            host=os.uname().nodename[:64],
            step=self.step,
            exchanges=self._waiter.witness.exchanges,
            models=max(1, len(self._reducers)),
            samples=meter.total_samples,
            waited_s=self._waiter.waited_s - self._waited_before_s,
            computed_s=meter.total_own_s,
            here_s=self._clock.now_s() - self._trains_since_s if self._trains_since_s else 0.0,
            epochs=loaders[0].progress if loaders else -1.0,
            total_epochs=self._total_epochs,
            total_steps=self._total_steps,
            cpu_cores=used.cpu_cores if used is not None else 0.0,
            memory_bytes=used.memory_bytes if used is not None else 0,
            sent_bytes_per_s=used.sent_bytes_per_s if used is not None else 0.0,
            values=named_values(dict(meter.values)),
            policy=shortened(repr(plan.sync)),
            fabric=shortened(repr(plan.fabric)),
            events=happenings(tuple(meter.events)),
            left=self._has_left and self._told_at is not None,
        )

    def _status_outlets(self) -> Iterator[Callable[[TrainingStatus, bytes], None]]:
        watch, server = self._watch, self._server
        if watch is not None:
            yield lambda _, data: watch.say_status(data)
        if server is not None and self._reducers and not self._closed:
            yield lambda status, _: server.tell_status(status)

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until every worker is done, then release everything; a second call does nothing."""
        self._close(error=None)

    def _close(self, error: BaseException | None) -> BaseException | None:
        """What it ended with, if not in order."""
        if self._closed:
            return error
        self._closed = True
        if os.getpid() != self._pid:  # a forked child is not the worker, and has none of its threads
            self._release(orderly=False)
            return error
        atexit.unregister(self._close_at_exit)
        self._swapping.close()
        _runs.discard(self)
        closed(self)
        error = error or self._waiter.failure  # what a wait ended with, whoever caught it: the workers are apart
        if error is not None:
            self._say_last_words(error)
            if self._server is not None:
                self._server.abort()
        elif self._server is not None:
            self._tell_pace()
            self._server.close(self._told_at)
        elif self._membership is not None and self._membership.is_outside:
            _log.warning("This worker is done, and has not joined: prepare what those that train have.")
        elif self.world > 1:
            self._tell_pace()
            self._record_given()
            error = self._leave_together()
        self._end_metrics(error)
        self._has_left = error is None
        if self._reporter is not None:
            self._reporter.close()
        if self._watch is not None:
            self._watch.close(well=error is None)
        self._resources.close()
        if self._has_others:
            for one in self._prepared_models:
                self._watch_late_steps(one.optimizer)
        self._release(orderly=error is None)
        return error

    @property
    def _told_at(self) -> int | None:
        """Behind which of its steps this worker leaves because it was told to; None if it was not."""
        return self.step if self in _told else None

    def _watch_late_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Say so if it steps behind the end."""

        def tell(*_: object) -> None:
            hook.remove()
            _log.warning(
                "Rank %d makes a step, and its run is closed: from here on its model is no longer that of the other "
                "workers. Call run.close() behind the last step.",
                self.rank,
            )

        hook = optimizer.register_step_pre_hook(tell)

    def _close_at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))  # what the interpreter dies of

    def _release(self, *, orderly: bool) -> None:
        # After a failure an exchange may be under way that nobody will ever answer, and closing would wait for it.
        for fabric in reversed(self._fabrics):
            if orderly:
                fabric.close()
            else:
                fabric.abandon()
        if self._owns_group and orderly and (self._circle is None or self._circle.is_first):
            dist.destroy_process_group()
        elif self._owns_group and dist.group.WORLD is not None:
            never_destroy(dist.group.WORLD)

    def _end_metrics(self, error: BaseException | None) -> None:
        why = None if error is None else f"{type(error).__name__}: {error}"
        self._diary.close(why or "")
        self._meter.end(self.step, why, left=error is None and self._told_at is not None)
        self._metrics.close()

    def _tell_stall(self, text: str) -> None:
        _log.warning("%s", text)
        if self._reducers:
            self._meter.event("stall", text, self.step)

    def _say_last_words(self, error: BaseException) -> None:
        """Let the other workers know what this one dies of."""
        if self._watch is None:
            return
        if isinstance(error, (WorkerLostError, NetworkError)):
            self._watch.last_words("lost", f"{type(error).__name__}: {without_quoted(str(error))}")
        else:
            self._watch.last_words("raised", "".join(traceback.format_exception(error)))

    def _tell_pace(self) -> None:
        """Leave a word about who paced the rounds, and why."""
        if self.rank != 0:
            return
        told = self._data.explain()
        if self._server is not None:
            paced, fate = self._server.sum_up(self._waiter)
            told.append(paced)
            if fate:
                self._meter.event("contributions", fate, self.step)
        if text := " ".join(filter(None, told)):
            self._meter.event("pace", text, self.step)

    def _leave_together(self) -> OffbeatError | None:
        # A worker that closed its sockets while another still reads its last bucket would look like a crash.
        try:
            if self._membership is None:
                self._control.sum(END_OF_RUN)
            else:
                self._membership.part(self._told_at)
        except OffbeatError as error:
            _log.warning("This worker is done, but not all are: %s", error)
            return error
        return None

    def _record_given(self) -> None:
        """Write down what is in a mean with which the others step, and this worker does not."""
        for model, reducer in enumerate(self._reducers):
            if isinstance(reducer.now, AllReduceSwitch) and (weights := reducer.now.take_weights()):
                self._diary.gave(model, reducer.step - 1, samples=self._meter.last_samples, weights=weights)

    def _drain(self) -> None:
        """Leave the others in order, between two steps, and end as one who was told to."""
        if self._close(None) is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LEFT)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # To leave with exit code 0 is to be done.
        done = isinstance(error, SystemExit) and error.code in (None, 0)
        self._close(None if done else error)


def say_last_words(error: BaseException) -> None:
    """Write down what this process dies of; for whoever ends it without closing its runs."""
    for run in tuple(_runs):
        if os.getpid() == run._pid:  # a forked child is not the worker
            run._say_last_words(error)
            run._end_metrics(error)


def drain() -> bool:
    """Have this process leave its job behind its next step; whether it is in one whose others go on then."""
    asked = False
    for run in tuple(_runs):
        takes_part = run._membership is not None and not run._membership.is_outside
        if os.getpid() == run._pid and (takes_part or run._server is not None):
            run._drains = asked = True
            _told.append(run)
    return asked


def trained_unprepared() -> bool:
    """Whether this process has trained beside other workers, and never prepared a model."""
    return any(one.is_apart for one in _apart)


def has_left() -> bool:
    """Whether all runs that `drain` was for have left in order; what this process still does concerns no other."""
    return bool(_told) and all(run._has_left for run in _told)


def _number(value: float | torch.Tensor, name: str) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"Cannot take {shown} for {name}: a single number is needed.") from error


def _version() -> str:
    from offbeat.version import __version__

    return __version__


def _cut(plan: str) -> str:
    """A plan from a file, to be shown: it may be anything."""
    return plan if len(plan) <= _MOST_SHOWN else f"{plan[:_MOST_SHOWN]} ..."


def _shared(store: Store | None) -> Store:
    if store is None:
        raise PlanError(
            "Cannot run Elastic() in a process group that offbeat did not make: those that are left would have nowhere "
            "to meet. Leave init_process_group to offbeat.init(), or use ProcessGroup() - at `plan.fabric`."
        )
    return store


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"Cannot write to {folder}: {error.strerror}. Choose another folder as run_dir.") from error


def _open_metrics(folder: Path | None) -> MetricsFile:
    try:
        return MetricsFile(None if folder is None else folder / "metrics.jsonl")
    except OSError as error:
        raise PlanError(f"Cannot write to {folder}: {error.strerror}. Choose another folder as run_dir.") from error


def _timeout(text: str) -> timedelta:
    try:
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError) as error:
        raise PlanError(f"Cannot read OFFBEAT_TIMEOUT_S={text!r}: it must be a number of seconds.") from error


def _seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = _MOST_SEEDS
    if not -(_MOST_SEEDS >> 1) <= number < _MOST_SEEDS:  # as torch takes it
        raise PlanError(f"Cannot use {seed!r} as a seed: it must be a whole number of at most 64 bits.")
    return number


def _every(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise PlanError(f"Cannot read OFFBEAT_HASH_EVERY={text!r}: it must be a whole number of steps from 1.")
    return int(text)
