"""One worker's part in a job, from the meeting to the good-bye.

It is opened in stages, and can be closed from each:

    meet        the workers find each other; a newcomer asks those that train        rank, world, where they met
    bind        the fabric for questions, the sentinels that explain stalls          the context of all parts
    assemble    data, plans, server, history, newcomers                              the parts
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import secrets
import sys
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch.distributed as dist

from offbeat.clock import WallClock
from offbeat.diagnosis.explain import END_OF_RUN, without_quoted
from offbeat.diagnosis.stall_witness import SentinelWitness
from offbeat.diagnosis.wait import BlockingWait, NullWitness
from offbeat.engine import (
    ControlGroup,
    FreshnessMode,
    HistoryRecorder,
    JoinClient,
    MetricsFile,
    StatusReporter,
    StepMetrics,
)
from offbeat.engine.factory import SynchronizerFactory
from offbeat.engine.model_registry import ModelRegistry
from offbeat.engine.run_log import RunLog
from offbeat.engine.sentinels import join_watch, start_watch
from offbeat.engine.server_session import leave_file
from offbeat.engine.worker_context import WorkerContext
from offbeat.errors import NetworkError, OffbeatError, PlanError, WorkerLostError
from offbeat.fabric import ElasticGroup, never_destroy
from offbeat.loading.manager import LoaderManager
from offbeat.plan import Plan
from offbeat.run import open_sessions, replica
from offbeat.run.elastic_join import ElasticJoin
from offbeat.run.fabric_binding import FabricBinding
from offbeat.run.plan_manager import PlanManager
from offbeat.run.refusal_hook import say_refusals_once
from offbeat.run.rendezvous import ended, join, leave_store, stay, store_of_job
from offbeat.run.rerouting import Rerouting
from offbeat.run.status import RunStatus
from offbeat.run.step_check import StepCheck
from offbeat.run.uneven_inputs import UnevenInputs
from offbeat.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta
    from pathlib import Path

    import torch
    from torch._C._distributed_c10d import Store

    from offbeat.diagnosis.sentinel_client import SentinelClient
    from offbeat.engine.join import JobInfo
    from offbeat.engine.server_session import ServerSession
    from offbeat.protocol.worker_status import TrainingStatus
    from offbeat.run.environment import Environment

_log = logging.getLogger("offbeat")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run, as of `offbeat.init`."""

    plan: Plan
    timeout: timedelta
    run_dir: Path | None = None
    seed: int = 0
    history: Path | None = None
    check_freshness: bool = False


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The knowledge of a worker once it has met the others.

    Args:
        plan: that the job goes by, or is to.
        rank: of this worker.
        world: number of workers with which it trains without a server.
        began_with: number of workers that the job began with.
        joins: whether it joins a job that trains already.
        store: where the workers met; None if they did not by offbeat, or this worker is alone.
        owns_group: whether offbeat has made torch's process group.
        newcomer, job: of one that joins a job without a server; else None.
    """

    plan: Plan
    rank: int
    world: int
    began_with: int
    joins: bool
    store: Store | None
    owns_group: bool
    newcomer: JoinClient | None = None
    job: JobInfo | None = None


class WorkerSession:
    """The parts of one worker's run, and their order at its beginning and its end.

    Args:
        settings: as of `offbeat.init`.
        environment: what the launcher has said.

    Attributes:
        pid: of the process that it is of.
        drains: whether this worker leaves behind its next step.
        has_left: whether it has left the others in order.
        came_with: digests of what a newcomer without a server was handed, until its first step.
        resources: released when it ends.
    """

    context: WorkerContext
    data: LoaderManager
    plans: PlanManager
    factory: SynchronizerFactory
    uneven: UnevenInputs
    fabrics: FabricBinding
    status: RunStatus

    def __init__(self, settings: RunSettings, environment: Environment) -> None:
        self._settings, self._environment = settings, environment
        self.pid = os.getpid()
        self.drains = self.has_left = self.is_closed = False
        self.came_with: list[str] = []
        self.resources = ExitStack()
        self.seed = settings.seed
        self.models = ModelRegistry()
        self.membership: ElasticJoin | None = None
        self.steps: StepCheck | None = None
        self._watch: SentinelClient | None = None
        self._witness: SentinelWitness | None = None
        self._reporter: StatusReporter | None = None
        self._log: RunLog | None = None
        if settings.run_dir is not None:
            _make_folder(settings.run_dir)
        report = None if settings.run_dir is None else settings.run_dir / f"stall-rank{environment.stated_rank}.json"
        self.waiter = BlockingWait(clock=WallClock(), timeout=settings.timeout, tell=self._on_stall, report_path=report)

    def open(self) -> None:
        """Go through the stages. Collective.

        Raises:
            OffbeatError: if one of them fails; then the session is closed.
        """
        self._has_parts = False
        self._meeting: Meeting | None = None
        try:
            self._meeting = meeting = self._meet()
            self._bind(meeting)
            self._assemble(meeting)
        except OffbeatError as error:
            self.close(error)
            raise

    # -- the stages ----------------------------------------------------------------------------------------------

    def _meet(self) -> Meeting:
        plan, environment = self._settings.plan, self._environment
        store = join(self.waiter, environment)
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        if store is not None:
            say_refusals_once(store, rank)
        joins = environment.joins if world == 1 else None
        if joins is None:
            return Meeting(plan, rank, world, world, joins=False, store=store, owns_group=store is not None)
        rank, began_with = joins
        store = store_of_job(plan, environment)
        if store is None:  # it goes to a server
            return Meeting(plan, rank, world, began_with, joins=True, store=None, owns_group=False)
        newcomer = JoinClient(store, rank, self.waiter, version=__version__)
        job = newcomer.ask(plan.to_toml(), lambda: ended(environment.store_file))
        if environment.is_first_here:
            _log.warning("Rank %d has reached the job, and prepares what its workers have.", rank)
        plan = Plan.from_toml(job.plan)
        return Meeting(plan, rank, began_with, began_with, True, store, False, newcomer, job)

    def _bind(self, meeting: Meeting) -> None:
        """Make what questions to the others need, and say where stalls are explained. Collective."""
        settings, waiter, plan, rank = self._settings, self.waiter, meeting.plan, meeting.rank
        clock = WallClock()
        self._metrics_file = _open_metrics(settings.run_dir)
        metrics = StepMetrics(rank, clock, self._metrics_file, waiter)
        group = None
        if plan.has_elastic_group and meeting.world > 1:
            group = ElasticGroup(_shared(meeting.store), rank, meeting.world, settings.timeout)
        launcher = self._environment.launcher(settings.timeout)
        self.fabrics = FabricBinding(rank, meeting.world, waiter, group, launcher, settings.timeout)
        members = None if group is None else lambda: group.members
        control = ControlGroup(self.fabrics.bind_control(plan), waiter, members)
        if meeting.newcomer is not None:
            control.newcomer_check = meeting.newcomer.compare
        speaks = meeting.joins and self._environment.is_first_here
        self._log = log = RunLog(
            metrics, lambda: self.models.step, lambda: self.context.is_first, speaks_for_newcomers=speaks
        )
        self.context = WorkerContext(
            rank=rank,
            world=meeting.world,
            began_with=meeting.began_with,
            joins=meeting.joins,
            seed=settings.seed,
            timeout=settings.timeout,
            run_dir=settings.run_dir,
            clock=clock,
            waiter=waiter,
            control=control,
            group=group,
            metrics=metrics,
            history=HistoryRecorder(self._environment.hash_every),
            log=log,
            launcher=launcher,
            freshness=self._check_freshness() if settings.check_freshness else None,
            is_validator=self._environment.is_validator,
        )
        self._put_together(plan)
        self._start_watch(meeting.job)

    def _check_freshness(self) -> FreshnessMode:
        freshness = FreshnessMode()
        freshness.open()
        self.resources.callback(freshness.close)
        return freshness

    def _start_watch(self, job: JobInfo | None) -> None:
        """Start this worker's sentinel, and have waits be explained by it. Collective."""
        context, group = self.context, self.context.group
        if job is not None:
            self._watch = join_watch(context.rank, context.world, hub=job.hub, token=job.token)
        elif context.world > 1:
            self._watch = start_watch(context.control, stays_without_worker=group is not None)
            if self._watch is not None and context.rank == 0 and context.run_dir is not None:
                about = {"address": self._watch.hub, "token": self._watch.token.hex()}
                leave_file(context.run_dir / "hub.json", about)
        if self._watch is None:
            self.waiter.witness = NullWitness()
            return
        members = None if group is None else lambda: group.members
        self.waiter.witness = self._witness = SentinelWitness(
            self._watch, context.rank, context.timeout, members, self._environment.worker_pids
        )
        if group is not None:
            group.gone, group.on_change = self._witness.gone, self._go_on_without
            context.launcher.note_survival(True)

    def _put_together(self, plan: Plan) -> None:
        """Make the parts, which know of each other by the context."""
        context = self.context
        self.data = LoaderManager(plan, context, self.models)
        self.uneven = UnevenInputs(context, self.models)
        self.rerouting = Rerouting(context, self.models)
        self.factory = SynchronizerFactory(context)
        self.plans = PlanManager(plan, context, self.models, self.data, self.factory)
        self.status = RunStatus(
            context, self.models, self.data, self.plans, lambda: self.has_left and self.told_at is not None
        )
        self._has_parts = True
        open_sessions.opened(self)
        atexit.register(self._close_at_exit)

    def _assemble(self, meeting: Meeting) -> None:
        """Agree on the plan, and bring in server, history and newcomers as it says. Collective."""
        context, plan = self.context, meeting.plan
        context.control.check_equal("plan", plan.to_toml(), "Start every worker with the same plan.")
        advice = "Give offbeat.init(seed=...) the same number on every worker."
        context.control.check_equal("seed", str(context.seed), advice)
        plan.check_world(context.world)
        if context.rank == 0 and plan.caution:
            _log.warning("%s", plan.caution)
        self.plans.connect()
        if self._watch is not None or self.server is not None:
            self._reporter = StatusReporter(self.status.collect, self._status_outlets)
        job = "" if meeting.job is None else meeting.job.history
        if self._settings.history is not None:
            job = self._open_history(self._settings.history, job)
        if context.group is not None:
            stay(self._environment.store_file)
            if context.run_dir is not None and context.rank == 0:
                leave_store(context.run_dir, _shared(meeting.store), plan, context.world, self._environment)
            self.membership = ElasticJoin(
                _shared(meeting.store),
                context,
                self.models,
                self.data,
                newcomer=meeting.newcomer,
                witness=self._witness,
                history=job,
            )
        if self.has_others or self.server is not None:
            self.steps = StepCheck(context.world, context.log.own if self.has_others else None)
            self.resources.callback(self.steps.close)
            open_sessions.has_others(self.steps)
        if self.has_others:
            replica.opened(self)

    def _open_history(self, folder: Path, job: str) -> str:
        """Have all workers' histories name the same job, this one if it has a name; that. Collective."""
        if self.server is not None:
            job = self.server.job
        elif not job:
            asked = self.context.control.texts("the name of this run's history", secrets.token_hex(8))
            job = asked[0]
        self.context.history.open(folder, job=job, rank=self.context.rank)
        return job

    # -- while it is open ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The one that holds."""
        return self.plans.plan

    @property
    def server(self) -> ServerSession | None:
        """The one at work; None without one."""
        return self.plans.server

    @property
    def has_others(self) -> bool:
        """Whether other workers take part, or may."""
        return self.context.world > 1 or self.context.joins

    @property
    def can_drain(self) -> bool:
        """Whether the others go on if this worker leaves behind a step."""
        return self.server is not None or (self.membership is not None and not self.membership.is_outside)

    @property
    def told_at(self) -> int | None:
        """The step behind which this worker leaves because it was asked to; None if it was not."""
        return self.models.step if open_sessions.is_leaving(self) else None

    def make_way(self) -> None:
        """Close it, since another one is to begin in this process.

        Raises:
            PlanError: if other workers take part.
        """
        if self.has_others:
            raise PlanError(
                f"Cannot begin a second run: this process is rank {self.context.rank} of {self.context.world} in one "
                "that is open. Call run.close() first, or write with offbeat.init() as run: around what belongs "
                "together."
            )
        _log.warning(
            "offbeat.init() is called a second time: the run that this process had open, at step %d, is closed. Train "
            "with what the new run's prepare returns.",
            self.models.step,
        )
        self.close(None)

    def _go_on_without(self, lost: Mapping[int, str]) -> None:
        """Say who is lost, and what that means for the batch and the learning rate."""
        assert self.context.group is not None
        changes = self.data.lose(lost)
        if not lost:
            text = "The workers had lost their connections, and have made new ones; nobody is missing."
        else:
            told = " ".join(f"Rank {rank} {why.rstrip(' .')}." for rank, why in sorted(lost.items()))
            left = ", ".join(map(str, self.context.group.members))
            text = (
                f"{told} The others, rank {left}, continue, and the step at hand is the mean of their gradients: "
                f"{changes}."
            )
        self.context.log.all("membership", text)

    def _status_outlets(self) -> Iterator[Callable[[TrainingStatus, bytes], None]]:
        """Yield the outlets of a status: the sentinel, and the server."""
        watch, server = self._watch, self.server
        if watch is not None:
            yield lambda _, data: watch.say_status(data)
        if server is not None and len(self.models) and not self.is_closed:
            yield lambda status, _: server.tell_status(status)

    def _on_stall(self, text: str) -> None:
        if self._log is None or not len(self.models):
            _log.warning("%s", text)
        else:
            self._log.stall(text)

    # -- its end -------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None) -> BaseException | None:
        """Leave the others, and release everything; again does nothing.

        Args:
            error: that it ends with; None if this worker is done.

        Returns:
            What it ended with, if not in order.
        """
        if self.is_closed:
            return error
        self.is_closed = True
        if os.getpid() != self.pid or not self._has_parts:  # a forked child has none of the worker's threads
            self._release(orderly=False)
            return error
        atexit.unregister(self._close_at_exit)
        self.plans.close()
        open_sessions.closed(self)
        replica.closed(self)
        self._tell_privacy()
        error = error or self.waiter.failure  # what a wait ended with, whoever caught it: the workers are apart
        error = self._leave(error)
        self.end_metrics(error)
        self.has_left = error is None
        if self._reporter is not None:
            self._reporter.close()
        if self._watch is not None:
            self._watch.close(well=error is None)
        self.resources.close()
        if self.has_others:
            for one in self.models.prepared:
                self._watch_late_steps(one.optimizer)
        self._release(orderly=error is None)
        return error

    def _leave(self, error: BaseException | None) -> BaseException | None:
        """Say good-bye, or what this worker dies of; what it ends with."""
        if error is not None:
            self.say_last_words(error)
            if self.server is not None:
                self.server.abort()
        elif self.server is not None:
            self._tell_pace()
            self.server.close(self.told_at)
        elif self.membership is not None and self.membership.is_outside:
            _log.warning("This worker is done, and has not joined: prepare what the job's workers have.")
        elif self.context.world > 1:
            self._tell_pace()
            self._record_given()
            error = self._leave_together()
        return error

    def say_last_words(self, error: BaseException) -> None:
        """Let the other workers know what this one dies of; a note on it says what offbeat may have to do with that."""
        for explanation in {text for one in self.models.synchronizers if (text := one.explain(error))}:
            error.add_note(explanation)
        if self._watch is None:
            return
        if isinstance(error, (WorkerLostError, NetworkError)):
            self._watch.last_words("lost", f"{type(error).__name__}: {without_quoted(str(error))}")
        else:
            self._watch.last_words("raised", "".join(traceback.format_exception(error)))

    def end_metrics(self, error: BaseException | None) -> None:
        """Write the last records of metrics and history."""
        why = None if error is None else f"{type(error).__name__}: {error}"
        self.context.history.close(why or "")
        left = error is None and self.told_at is not None
        self.context.metrics.end(self.models.step, why, left=left)
        self._metrics_file.close()

    def _leave_together(self) -> OffbeatError | None:
        # A worker that closed its sockets while another still reads its last bucket would look like a crash.
        try:
            for one in self.models.synchronizers:
                one.leave()
            if self.membership is None:
                self.context.control.sum(END_OF_RUN)
            else:
                self.membership.leave(self.told_at)
        except OffbeatError as error:
            _log.warning("This worker is done, but not all are: %s", error)
            return error
        return None

    def _tell_pace(self) -> None:
        """Leave a word about who paced the rounds, and why."""
        if self.context.rank != 0:
            return
        step, metrics = self.models.step, self.context.metrics
        told = self.data.explain()
        if self.server is not None:
            paced, fate = self.server.sum_up(self.waiter)
            told.append(paced)
            if fate:
                metrics.event("contributions", fate, step)
        if text := " ".join(filter(None, told)):
            metrics.event("pace", text, step)

    def _tell_privacy(self) -> None:
        """Say what this worker's contributions have spent, however the run ends."""
        privacy, count = self.plan.privacy, self.models.private_contributions
        if privacy is None or not count:
            return
        text = (
            f"Privacy: rank {self.context.rank} has spent epsilon {privacy.epsilon(count):.3g} at delta "
            f"{privacy.delta:g} in {count} contributions."
        )
        self.context.metrics.event("privacy", text, self.models.step)
        _log.warning("%s", text)

    def _record_given(self) -> None:
        """Write down what is in a mean with which the others step, and this worker does not."""
        samples = self.context.metrics.last_samples
        for model, one in enumerate(self.models.together):
            if (result := one.pending_result) is not None:
                self.context.history.record_contribution(model, one.step - 1, result, samples=samples)

    def _watch_late_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Say so if it steps behind the end."""

        def tell(*_: object) -> None:
            hook.remove()
            _log.warning(
                "Rank %d makes a step, and its run is closed: from here on its model is no longer that of the other "
                "workers. Call run.close() behind the last step.",
                self.context.rank,
            )

        hook = optimizer.register_step_pre_hook(tell)

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # what the interpreter dies of, and has printed
        self.close(error)
        for note in getattr(error, "__notes__", ()):
            _log.error("%s", note)

    def _release(self, *, orderly: bool) -> None:
        if hasattr(self, "fabrics"):
            self.fabrics.release(orderly=orderly)
        if self._meeting is None or not self._meeting.owns_group:
            return
        group = self.context.group if self._has_parts else None
        if orderly and (group is None or group.is_first_generation):
            dist.destroy_process_group()
        elif dist.group.WORLD is not None:
            never_destroy(dist.group.WORLD)


def _shared(store: Store | None) -> Store:
    if store is None:
        raise PlanError(
            "Cannot run Elastic() in a process group that offbeat did not make: those that are left would have nowhere "
            "to meet. Call offbeat.init(plan) before whatever makes one: init_process_group, TrainingArguments (then "
            "OffbeatTrainer(run=run)) or Accelerator. Ray Train always makes one: use ProcessGroup() or "
            "ParameterServer() there - at `plan.fabric`."
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
