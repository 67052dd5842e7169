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

import dataclasses
import json
import logging
import math
import operator
import os
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from offbeat.clock import to_timedelta
from offbeat.engine.prepared_model import PreparedModel
from offbeat.engine.sparse import sparse_names
from offbeat.errors import ModelError, PlanError
from offbeat.plan import Plan
from offbeat.run import open_sessions, run_state
from offbeat.run.environment import Environment
from offbeat.run.model_checks import Kinds, check_given, check_modules, check_optimizer, inventory, trainable
from offbeat.run.replica import Replica
from offbeat.run.replica_check import ReplicaCheck
from offbeat.run.run_state import MOST_SEEDS
from offbeat.run.session import RunSettings, WorkerSession
from offbeat.run.step_hooks import KEEP_IT, StepHooks
from offbeat.run.wrapper_check import WrapperCheck
from offbeat.safe_write import write_whole
from offbeat.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from offbeat.engine import SwitchableSync

_log = logging.getLogger("offbeat")
_TIMEOUT = timedelta(seconds=5)
_MOST_EXPECTED = 1 << 53
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def init(
    plan: Plan | None = None,
    *,
    timeout: timedelta | float | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    history: str | os.PathLike[str] | None = None,
    check_freshness: bool | None = None,
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
        check_freshness: to debug a script whose plan has a scheduler: whether an operation that uses a parameter before
            the optimizer's last step is in it raises a `ModelError`; if None, that of `offbeat run --check-freshness`.

    Raises:
        PlanError: if the plan cannot work here, a folder cannot be written to, or this process is in a run with other
            workers, which is open.
    """
    environment = Environment()
    asked = Plan.from_toml(environment.plan) if environment.plan else Plan()
    if plan is None:
        plan = asked
    elif environment.joins is None and asked not in (plan, Plan()):
        raise PlanError(
            "Cannot go by two plans: the script passes one to offbeat.init(), and the command line or OFFBEAT_PLAN "
            "asks for another. Call offbeat.init() without a plan; or leave out --plan, --sync and the other parts; "
            "or have the parts replace those of the script's plan with --refine."
        )
    if not isinstance(plan, Plan):
        raise PlanError(f"Cannot use {plan!r} as a plan: make one with offbeat.Plan(...) or Plan.from_toml(text).")
    if environment.plan_parts:
        plan = plan.refined(environment.plan_parts)
    if timeout is None:
        timeout = environment.timeout or _TIMEOUT
    timeout = to_timedelta(timeout, "Cannot explain waits")
    settings = RunSettings(
        plan,
        timeout,
        run_dir=environment.run_dir if run_dir is None else Path(run_dir),
        seed=_seed(seed),
        history=environment.history if history is None else Path(history),
        check_freshness=environment.check_freshness if check_freshness is None else check_freshness,
    )
    for session in open_sessions.of_this_process():
        session.make_way()
    run = Run(settings, environment)
    if plan != asked and run.rank == 0 and settings.run_dir is not None and environment.joins is None:
        write_whole(settings.run_dir / "plan.toml", plan.to_toml().encode())  # `offbeat run` could not know of it
    return run


class Run:
    """A worker's handle on its job: it prepares the model, and knows rank, step and plan. Made by `init`.

    Attributes:
        rank, world: of this worker; how many workers there are.
        run_dir: where metrics are written.
    """

    def __init__(self, settings: RunSettings, environment: Environment) -> None:
        self._session = session = WorkerSession(settings, environment)
        session.open()
        self.run_dir = settings.run_dir
        self.rank, self.world = session.context.rank, session.context.world
        self._hooks = session.data.observer = StepHooks(session)
        self._wrapper_checks: list[WrapperCheck] = []  # of each prepared model

    @property
    def plan(self) -> Plan:
        """The plan that holds; a swap changes it."""
        return self._session.plan

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

        Call it again with the replica and another optimizer, as for a second phase of the training, and that optimizer
        steps the replica from then on. A server keeps the first one.

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
        session = self._session
        check_given(loader, others)
        pair = session.models.pair_of(model.module) if isinstance(model, Replica) else None
        if isinstance(model, Replica) and pair is not None and optimizer is not pair[0].optimizer:
            replica = model
            self._replace_optimizer(*pair, optimizer)
            prepared_loader = None if loader is None else session.data.prepare(loader)
            self._join_if_due()
        else:
            one, synchronizer = self._synchronize(model, optimizer)
            prepared_loader = None if loader is None else session.data.prepare(loader)
            replica = self._attach(one, synchronizer)
            self._begin(one, synchronizer)
        if prepared_loader is None:
            return replica, optimizer
        return replica, optimizer, prepared_loader

    def _synchronize(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[PreparedModel, SwitchableSync]:
        """Have the model kept together with those of the others. Collective."""
        session, models, factory = self._session, self._session.models, self._session.factory
        check_modules(model)
        parameters = trainable(model)
        check_optimizer(optimizer, model)
        sparse = sparse_names(model) & set(parameters) if session.server is None else set()
        session.context.control.check_equal(
            "model",
            inventory(model, sparse),
            "Build the same model on every worker: the same layers, order, dtypes, requires_grad and buffers.",
        )
        self._hooks.claim(model, parameters)
        backend = "nccl" if next(iter(parameters.values())).device.type == "cuda" else "gloo"
        one = PreparedModel(len(models), model, parameters, optimizer, session.fabrics.bind(self.plan, backend))
        if session.membership is None or not session.membership.is_outside:
            factory.broadcast(one)
        factory.check_optimizers_equal(one, is_served=session.server is not None)
        if session.server is not None:
            synchronizer = factory.serve(one, self.plan, session.server)
        else:
            synchronizer = factory.replicate(one, self.plan)
        models.add(one, synchronizer)
        session.resources.callback(synchronizer.close)
        return one, synchronizer

    def _replace_optimizer(
        self, one: PreparedModel, synchronizer: SwitchableSync, optimizer: torch.optim.Optimizer
    ) -> None:
        """Have another optimizer step a prepared model from here on. Collective."""
        session = self._session
        check_optimizer(optimizer, one.model)
        if session.server is not None:
            raise ModelError(
                f"Cannot replace the {type(one.optimizer).__name__} of this model with another optimizer: the server "
                f"steps the parameters with a copy of it. {KEEP_IT}"
            )
        session.factory.check_optimizers_equal(dataclasses.replace(one, optimizer=optimizer), is_served=False)
        if session.steps is not None:
            session.steps.replaced(one.optimizer)
        synchronizer.step_with(optimizer)
        self._hooks.attach(one, synchronizer, self._wrapper_checks[one.number].step)

    def _attach(self, one: PreparedModel, synchronizer: SwitchableSync) -> Replica:
        """Hang the hooks on the model and its optimizer."""
        session, hooks = self._session, self._hooks
        kinds, wrappers = Kinds(one.parameters), WrapperCheck(one.model)
        self._wrapper_checks.append(wrappers)

        def before_forward(replica: Replica) -> None:
            kinds.check()
            wrappers.forward(replica)
            hooks.before_forward()

        hooks.attach(one, synchronizer, wrappers.step)
        replicas = ReplicaCheck(one.model, synchronizer, session.context.log.own)
        for release in (wrappers.close, replicas.close):
            session.resources.callback(release)
        session.resources.callback(hooks.detach, one.number)
        return Replica(one.model, synchronizer, before_forward, self._join)

    def _join_if_due(self) -> None:
        """Join those that train without a server, if this worker is to, and has prepared what they have."""
        session = self._session
        if session.membership is not None and session.membership.is_due:
            session.context.log.newcomers(
                f"Rank {self.rank} is ready, and waits to be admitted behind one of their steps."
            )
            self._hooks.tell_of(joined := session.membership.join())
            session.plans.plan = joined.plan
            session.plans.joined(joined.ranks)
            session.context.metrics.start_anew()
            session.came_with = session.models.digests()

    def _begin(self, one: PreparedModel, synchronizer: SwitchableSync) -> None:
        """Join those that train, if this worker is to; from here on it trains."""
        session, context = self._session, self._session.context
        self._join_if_due()
        if context.joins and session.server is not None and not session.status.has_begun:
            version = session.server.version(one.number)
            does = "validates from" if context.is_validator else "has joined at"
            at = " on" if context.is_validator else ""
            context.log.all("membership", f"Rank {self.rank} {does} version {version}{at}.")
        session.status.begin()
        self._write_start(one.model, synchronizer)
        context.history.record_model(one.number, self.plan, self.world, one.parameters.values())

    def _write_start(self, model: torch.nn.Module, synchronizer: SwitchableSync) -> None:
        buckets = [bucket.record for bucket in synchronizer.layout.buckets]
        context = self._session.context
        context.metrics.begin(
            world=self.world,
            first_here=context.launcher.first_here,
            here=context.launcher.here,
            host=os.uname().nodename,
            pid=os.getpid(),
            torch=str(torch.__version__),
            offbeat=__version__,
            plan=repr(self.plan),
            model=type(model).__name__,
            buckets=buckets,
        )

    @contextmanager
    def _join(self, *, divides_by_all: bool, raises: bool) -> Iterator[None]:
        """Do what a replica's `join` does."""
        self._check_open("join the other workers")
        session = self._session
        if self.world == 1 or session.data.loaders:
            yield
        elif session.server is None and not self.plan.is_tabled:
            self._hooks.admit(drawing=False)
            with session.uneven.join(divides_by_all=divides_by_all, raises=raises):
                yield
        elif divides_by_all or raises:
            option = "divide_by_initial_world_size" if divides_by_all else "throw_on_early_termination"
            raise PlanError(
                f"Cannot join with {option} where workers go on by themselves: they decide that. Leave it out, or "
                "use ProcessGroup() - at `plan.fabric`."
            )
        else:
            yield
            self.settle()

    def _check_open(self, what: str) -> None:
        if self._session.is_closed:
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
        self._session.data.out_of_memory()

    # -- while training ------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those that train: it writes what is written once, as a checkpoint is.

        Without a server that is another one when the first is lost; with one it is rank 0.
        """
        return self._session.context.is_first

    @property
    def has_joined(self) -> bool:
        """Whether this worker has joined a job that trained already, and begins with what the others have.

        A validator has, unless no update was made before it came: then the job begins with its parameters.
        """
        session = self._session
        if session.context.is_validator and session.server is not None and len(session.models):
            return session.models.step > 0 or session.server.version(0) > 0
        return session.context.joins

    @property
    def is_validator(self) -> bool:
        """Whether this process computes, on data that is trusted, what workers are judged by (`Plan(validator=...)`).

        What it takes part in with others is nothing but that: `mean` returns its own value, and `settle` does nothing.
        """
        return self._session.context.is_validator

    @property
    def epsilon(self) -> float:
        """The privacy that this worker has spent so far: epsilon, at the delta of the plan's `privacy`.

        Compared with its contributions being zero; infinite without such a plan, and on a validator, which is trusted.
        """
        session = self._session
        if self.plan.privacy is None or session.context.is_validator:
            return math.inf
        return self.plan.privacy.epsilon(session.models.private_contributions)

    @property
    def step(self) -> int:
        """Exchanges so far, of the model prepared first."""
        return self._session.models.step

    @property
    def has_data(self) -> bool:
        """Whether the batch at hand counts; False while a prepared loader repeats its last one."""
        return self._session.data.has_data

    @property
    def progress(self) -> float:
        """Epochs so far of the loader prepared first, as a float: of all workers together, with the batch at hand.

        For schedules: with leased data workers make different numbers of steps, and this is alike on all. Never less
        than before. Where the length of an epoch is not known it counts whole ones.

        Raises:
            ModelError: if no loader was prepared.
        """
        return self._session.data.progress

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
        self._session.status.expect(float(epochs or 0.0), int(steps or 0))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward passes inside do not communicate, for any prepared model."""
        models = list(self._session.models.synchronizers)
        before = [one.sync for one in models]
        for one in models:
            one.sync = False
        try:
            yield
        finally:
            for one, sync in zip(models, before, strict=True):
                one.sync = sync

    def log(self, **values: float | torch.Tensor) -> None:
        """Record values of this step, such as ``loss=loss``; shown live, in the report and in metrics.jsonl."""
        numbers = {name: _number(value, name) for name, value in values.items()}
        self._session.context.metrics.log(max(0, self.step - 1), numbers)

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
        session = self._session
        if session.server is None or not session.models.synchronizers:  # a server knows nobody without a model
            total, weights = session.context.control.sum(question, numbers)
        else:
            total, weights = session.server.sum(question, numbers, session.waiter)
            for one in session.models.synchronizers:
                one.refreshed()
        if weights == 0:
            raise ValueError("Cannot take a mean: all weights are 0.")
        return float(total / weights)

    def share(self, value: Any) -> Any:
        """The first worker's value, on all, such as the name of a folder. Collective.

        A worker that has joined a job with a server has its own: the others do not wait for it there.

        Args:
            value: this worker's; what JSON holds.

        Raises:
            ValueError: if JSON does not hold it.
        """
        self._check_open("share a value")
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Cannot share {value!r} with all workers: {error}. Share text, numbers, None, and lists and dicts of "
                "these; nothing else is read from the network."
            ) from error
        control = self._session.context.control
        texts = control.texts("a value that all share", text if control.is_leader else "")
        return json.loads(texts[control.leader])

    def settle(self) -> None:
        """Make all replicas equal now; before an evaluation, a checkpoint, or the end. Collective.

        With `LocalSGD` the workers average; with a parameter server each takes the newest parameters, once all are
        there. Otherwise they are equal already, and nothing happens.
        """
        self._check_open("make replicas equal")
        session, models = self._session, self._session.models.synchronizers
        if session.context.is_validator:
            return
        for one in models:
            one.settle()
        if session.server is not None and models:
            session.server.settle(session.waiter)
            session.plans.take_plan()  # one may have been agreed upon while this worker waited for the others
            for one in models:
                one.refreshed()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the models be the mean of all workers' replicas within; for an evaluation. Collective, where it begins.

        Where workers step by themselves (`LocalSGD`, `ErrorReset`) no replica is the one that is trained: their mean
        is. Floating-point buffers, such as those of BatchNorm, are averaged, too. Behind it each worker has its own
        again, to the bit, and goes on as if nothing had been; train nothing within. With a parameter server, and
        wherever replicas are equal, nothing changes.
        """
        self._check_open("average replicas")
        with ExitStack() as stack:
            for one in self._session.models.synchronizers:
                stack.enter_context(one.averaged())
            yield

    def synchronize(self) -> None:
        """Have all steps made that the optimizer was told to make; before parameters are read. This worker's own.

        It is only needed where `Plan(scheduling=...)` hides the end of a step behind the next one, and parameters are
        read by anything but the model's forward pass, `state_dict()`, or what this class does: such as a moving
        average of them.
        """
        self._check_open("make all steps")
        for one in self._session.models.synchronizers:
            one.synchronize()

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
        self._session.plans.swap(plan, **parts)

    def state_dict(self) -> dict[str, Any]:
        """Plan, step, place in the data, and the codec's state, for a checkpoint beside model and optimizer.

        It may be taken anywhere in the loop: after `load_state_dict` the loader goes on behind the batches given out.
        """
        return run_state.state_dict(self._session)

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
        run_state.load_state_dict(self._session, state)

    def rng_state(self) -> dict[str, Any]:
        """Save this worker's random generators (Python's, NumPy's, torch's), which are not in `state_dict`.

        As each worker has its own, each saves it in a file of its own, as `offbeat.Checkpoints` does. It may be taken
        anywhere in the loop.
        """
        return self._session.data.rng_state()

    def load_rng_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the random numbers of `rng_state`; the last that is loaded.

        A prepared loader in whose middle it was taken draws its order and the batches that were given out once more,
        with the random numbers of then, before it goes on.

        Raises:
            ValueError: if it is damaged, or of other loaders; then nothing has changed.
        """
        self._session.data.load_rng_state(state)

    def score_by(self, loss: Callable[[], torch.Tensor]) -> None:
        """Say what the loss is by which a validator judges contributions (`Plan(validator=Zeno(...))`).

            run.score_by(lambda: F.cross_entropy(model(x), y))
            optimizer.step()

        Called before each step, so that contributions are judged on fresh samples; the last one counts. Within
        `optimizer.step()` it is computed without any contribution and with each of them, without gradients, in the mode
        that the model is in; parameters, buffers and random generators are as before afterwards. Workers, and
        validators under other rules, ignore it, so that a script may be the same everywhere.

        Args:
            loss: returns one number, of the prepared model as it is when it is called.

        Raises:
            ModelError: if it is no function.
        """
        if not callable(loss):
            raise ModelError(
                f"Cannot score by a {type(loss).__name__}: what contributions do to the loss is found out by computing "
                "it several times. Give a function, such as run.score_by(lambda: loss_function(model(x), y))."
            )
        if self.is_validator:
            self._session.context.trusted_loss.function = loss

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until every worker is done, then release everything; a second call does nothing."""
        self._session.close(None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # To leave with exit code 0 is to be done.
        done = isinstance(error, SystemExit) and error.code in (None, 0)
        self._session.close(None if done else error)


def _seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = MOST_SEEDS
    if not -(MOST_SEEDS >> 1) <= number < MOST_SEEDS:  # as torch takes it
        raise PlanError(f"Cannot use {seed!r} as a seed: it must be a whole number of at most 64 bits.")
    return number


def _number(value: float | torch.Tensor, name: str) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"Cannot take {shown} for {name}: a single number is needed.") from error
