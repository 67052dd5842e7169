"""A worker's session with its parameter server, and the questions to all workers that go through it."""

from __future__ import annotations

import collections
import functools
import json
import logging
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.diagnosis.wait import WaitContext
from offbeat.engine.rank_bits import bit_of, ranks_in
from offbeat.engine.server_launch import addresses_of, beside_workers, start_beside
from offbeat.engine.sync_point import SyncPoint
from offbeat.errors import ModelError, OffbeatError, PlanError
from offbeat.plan import Plan
from offbeat.protocol.checkpoints import LOADING
from offbeat.protocol.plan_swap import LEAVING
from offbeat.safe_write import write_whole
from offbeat.server.client.client import Client
from offbeat.server.client.plan_judge import PlanVerdict
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from offbeat.diagnosis.wait import BlockingWait
    from offbeat.engine.server_launch import ServerLaunch
    from offbeat.engine.worker_context import LauncherInfo, WorkerContext
    from offbeat.fabric import Served
    from offbeat.protocol.worker_status import TrainingStatus
    from offbeat.server.launch import ShardSettings
    from offbeat.wire.link import PeerLink
    from offbeat.wire.loop_thread import LoopThread
    from offbeat.wire.session import Receiver

_FIRST_PATIENCE = timedelta(seconds=20)
_BITS = 32  # of each number that says which ranks
_log = logging.getLogger("offbeat")


class ServerPlans:
    """The plan that holds, as the server says; asked about on the event loop's thread, read by the training thread.

    Args:
        plan: the present one.
        stays: why this worker could not leave the server to go by another plan, or "".

    Attributes:
        taken: the one that the training thread goes by.
        sync_point: where it leaves the server.
    """

    def __init__(self, plan: Plan, stays: Callable[[Plan], str] = lambda plan: "") -> None:
        self.present = self.taken = plan
        self.notices: collections.deque[str] = collections.deque()  # what has changed, for people
        self.sync_point = SyncPoint()
        self._stays = stays

    def judge(self, plan: str) -> PlanVerdict:
        """Judge a plan that is proposed: whether this worker can go by it.

        If it is to leave the server, it passes no place of its script from now on until it hears what becomes of it.
        """
        try:
            new = self.present.swapped(plan, whole=True)
        except PlanError as error:
            return PlanVerdict("", str(error))
        if new.is_served:
            return PlanVerdict(new.digest)
        if refusal := self._stays(new):
            return PlanVerdict("", refusal)
        return PlanVerdict(new.digest, "", *self.sync_point.freeze())

    def adopt(self, plan: str, text: str, sync_point: int | None = None) -> None:
        """Adopt this plan; all leave the server once they have passed `sync_point` places, unless that is None."""
        before, self.present = self.present, Plan.from_toml(plan)
        if text or self.present != before:
            self.notices.append(text or f"The plan of this job has become {short_name(self.present)}.")
        self.sync_point.resume(sync_point)

    def let_go(self) -> None:
        """The server is away."""
        self.sync_point.resume()


class ServerSession:
    """A worker's connection to all shards.

    Args:
        client: its end.
        spec: the plan's.
        loop: where the links live; ended by `close`.
        shards: how many there are.
        plans: which one holds.
        job: its name.
        state_rank: rank of the worker that brings the state that is the same for all.
        has_validator: parameters, and what belongs to them, are brought by a validator instead.
        is_validator: this is one; its questions are nobody's but its own.
    """

    def __init__(
        self,
        client: Client,
        spec: Served,
        loop: LoopThread,
        shards: int,
        plans: ServerPlans,
        job: str = "",
        state_rank: int = 0,
        *,
        has_validator: bool = False,
        is_validator: bool = False,
    ) -> None:
        self.client, self.plans, self.job, self.state_rank = client, plans, job, state_rank
        self.is_validator, self._has_validator = is_validator, has_validator
        self.block_bytes = spec.block_bytes
        self.shards = shards
        # Leases of data, by loader and number: drawn for the step at hand, and used by steps that were not brought yet.
        self.drawn: list[tuple[int, int]] = []
        self.used: list[tuple[int, int]] = []
        self.is_brought = True  # what this worker has to bring for all to load a checkpoint
        # Called before each question to all, and at the end: nothing else of this worker's is to be under way then.
        self.before_question: list[Callable[[], None]] = []
        self._loop = loop

    @property
    def brings_state(self) -> bool:
        """Whether this worker brings the state that is the same for all, such as a checkpoint."""
        return self.client.rank == self.state_rank

    @property
    def brings_parameters(self) -> bool:
        """Whether this worker brings parameters that all are to have, and the optimizer's state."""
        return self.is_validator if self._has_validator else self.brings_state

    def begin_with(self, ranks: tuple[int, ...]) -> None:
        """Begin the job at this server with these workers; the first of them brings the state."""
        self.client.begin_with(ranks)
        self.state_rank = ranks[0]

    def keep_drawn(self) -> None:
        """Count what was drawn as used in this worker's next contribution."""
        self.used += self.drawn
        self.drawn = []

    def sum(self, question: str, numbers: Sequence[float], waiter: BlockingWait) -> tuple[float, ...]:
        """The sums of numbers over all workers that are there. Collective.

        Raises:
            DisagreementError: if the workers ask different questions.
            NetworkError: if the server is gone.
        """
        self._come_to_rest()
        if self.is_validator:
            return tuple(numbers)
        asked = self.client.ask(question, numbers)
        waiter.wait(asked, WaitContext(question, through_server=True))
        return asked.value.numbers

    def ranks_that(
        self, question: str, flag: bool, waiter: BlockingWait, *, awaited: str = "", refresh: bool = False
    ) -> tuple[int, ...]:
        """The ranks of the workers that are there whose `flag` is set, in order. Collective.

        Args:
            awaited: what is waited for, in words, if that is not the question.
            refresh: take the newest parameters of all models, too.

        Raises:
            DisagreementError: if the workers ask different questions.
            NetworkError: if the server is gone.
        """
        self._come_to_rest()
        asked = self.client.ask(question, bit_of(self.client.rank, _BITS) if flag else (), refresh=refresh)
        waiter.wait(asked, WaitContext(awaited or question, through_server=True))
        return ranks_in(asked.value.numbers, _BITS)

    def settle(self, waiter: BlockingWait) -> None:
        """Wait until all workers are here, and take the newest parameters of all models. Collective.

        Raises:
            NetworkError: if the server is gone.
        """
        self._come_to_rest()
        if self.is_validator:
            return
        asked = self.client.ask("the newest parameters", refresh=True)
        waiter.wait(asked, WaitContext("all workers to call run.settle()", through_server=True))

    def take_over(self, waiter: BlockingWait, refusal: str = "") -> None:
        """Wait until all workers have taken over a checkpoint, and take the newest parameters. Collective.

        Args:
            refusal: why this worker cannot; "" if it has, and if it is the first has brought it to the server.

        Raises:
            ModelError: on all workers, if one cannot, or the first is gone.
            NetworkError: if the server is gone.
        """
        self._come_to_rest()
        brought = float(self.brings_parameters and self.is_brought and not refusal)
        self.is_brought = True
        asked = self.client.ask(LOADING, (brought, float(bool(refusal))), refresh=True, refusal=refusal)
        waiter.wait(asked, WaitContext("all workers to load the checkpoint", through_server=True))
        if asked.value.numbers != (1.0, 0.0):
            who = "The validator" if self._has_validator else f"Rank {self.state_rank}"
            why = asked.value.refused or f"{who}, which brings it to the server, is gone."
            raise ModelError(f"Cannot load this state, because one of the workers cannot. {why}")

    def sum_up(self, waiter: BlockingWait) -> tuple[str, str]:
        """Ask the coordinator who paces the rounds and why, and what became of all contributions.

        Both are "" if it cannot be asked any more; the second is, too, if every contribution was applied.
        """
        try:
            look = self.client.look()
            waiter.wait(look, WaitContext("a last look at the server", through_server=True))
        except OffbeatError:
            return "", ""
        statuses = look.value
        notices = [
            f"rank {one.worker}{f' with model {status.model}' if len(statuses) > 1 else ''}: {one.applied:,} applied"
            + (f", {one.dropped:,} dropped" if one.dropped else "")
            + (f", {one.lost:,} lost" if one.lost else "")
            for status in statuses
            for one in status.workers
            if one.dropped or one.lost
        ]
        fate = f"Not all contributions were applied. {'; '.join(notices).capitalize()}." if notices else ""
        return " ".join(status.pace for status in statuses if status.pace), fate

    def swap(self, plan: str, waiter: BlockingWait) -> None:
        """Have another plan hold for all workers. On any thread: the server decides between two updates.

        Args:
            plan: as TOML.

        Raises:
            PlanError: if it cannot be; the present one goes on.
            NetworkError: if the server is gone.
        """
        asked = self.client.swap(plan, whole=True)
        waiter.wait(asked, WaitContext("a swap of the plan, on which all agree", through_server=True))
        if refusal := asked.value:
            raise PlanError(refusal)

    def leave(self, waiter: BlockingWait) -> tuple[int, ...]:
        """Come together with all workers that are there, and take the newest parameters; their ranks. Collective.

        Raises:
            NetworkError: if the server is gone.
        """
        return self.ranks_that(LEAVING, True, waiter, awaited="all workers to leave the server", refresh=True)

    def abort(self) -> None:
        """Leave without a good-bye, because of an error: nobody is to wait for this worker."""
        self.client.abort()
        self._loop.close()

    def version(self, model: int) -> int:
        """The version of the parameters that this worker has: how many updates they are the outcome of."""
        return max(self.client.state(model).versions.values(), default=0)

    def tell_status(self, status: TrainingStatus) -> None:
        """Say how this worker's training goes, for whoever looks at the server."""
        self.client.tell_status(status)

    def close(self, told_at: int | None = None) -> None:
        """Say good-bye; `told_at` as in `Client.close`."""
        self._come_to_rest()
        self.client.close(told_at)
        self._loop.close()

    def _come_to_rest(self) -> None:
        for come_to_rest in self.before_question:
            come_to_rest()


def connect(
    plan: Plan,
    spec: Served,
    context: WorkerContext,
    stays: Callable[[Plan], str] = lambda plan: "",
    *,
    patience: timedelta = _FIRST_PATIENCE,
    again: bool = False,
    starting: ServerLaunch | None = None,
) -> ServerSession:
    """Connect with the plan's server; the first, or every worker, starts a shard if there is none. Collective.

    Args:
        plan: of the job; `spec` is its fabric.
        context: its waiting primitive asks the server from then on what is wrong with it.
        stays: why this worker could not leave the server to go by another plan, or "".
        patience: for how long to dial it for the first time.
        again: as of `addresses_of`.
        starting: its first shard, if that is being started already.

    Raises:
        PlanError: if there is a server, and the plan wants shards beside the workers.
        NetworkError: on all ranks if it cannot be started; on one that cannot reach it.
        PeerError: if it refuses this worker.
    """
    from offbeat.wire.loop_thread import LoopThread
    from offbeat.wire.session import Limits
    from offbeat.wire.tcp import connect as dial_shard

    control, waiter, launcher = context.control, context.waiter, context.launcher
    addresses, settings = addresses_of(spec, context, again=again), launcher.settings
    if addresses and spec.collocated:
        raise PlanError(
            f"Cannot start shards beside the workers: this job has a server, at {', '.join(addresses)}. Leave out "
            "--servers and OFFBEAT_SERVERS, or collocated - at `plan.fabric.collocated`."
        )
    if not addresses:
        addresses, settings = beside_workers(context, starting or start_beside(context), everywhere=spec.collocated)
    launcher.note_survival(True)
    comes_alone = context.joins and context.world == 1  # where the others are is at the server
    if context.run_dir is not None and control.is_leader and not comes_alone:
        _leave_address(context.run_dir / "server.json", addresses, settings)
    rank, world = (context.rank, context.began_with) if comes_alone else (control.rank, control.world)
    credentials, limits = settings.credentials(), Limits(timeout=context.timeout)
    loop = LoopThread()
    reached = False

    def dial(address: str, accept: Callable[[PeerLink], Receiver], patience: timedelta) -> Awaitable[PeerLink]:
        return dial_shard(
            address,
            accept=accept,
            job=settings.job,
            rank=rank,
            role="validator" if context.is_validator else "worker",
            credentials=credentials,
            limits=limits,
            patience=patience,
            # Once it was reached, whoever joined may train on when the others are done.
            hopeless=lambda: "" if reached else _has_ended(launcher),
        )

    plans = ServerPlans(plan, stays)
    client = Client(
        loop,
        rank=rank,
        world=world,
        dials=[functools.partial(dial, address) for address in addresses],
        hosts=[address.rpartition(":")[0] for address in addresses],
        patience=timedelta(seconds=spec.patience_s),
        tell=context.log.server,
        plans=plans,
        # A validator's data is its own, but a codec draws the same blocks on all.
        seed=None if context.is_validator and not plan.encodes_blocks else context.seed,
    )
    dialling = WaitContext(f"dialling the parameter server at {', '.join(addresses)}", alone=True)
    try:
        waiter.call(lambda: loop.run(client.connect(patience)), dialling)
    except BaseException:
        loop.close()
        raise
    reached = True
    waiter.ask_server = client.trouble
    return ServerSession(
        client,
        spec,
        loop,
        len(addresses),
        plans,
        settings.job,
        0 if comes_alone else control.leader,
        has_validator=plan.validator is not None,
        is_validator=context.is_validator,
    )


def _has_ended(launcher: LauncherInfo) -> str:
    """Say why the job that this worker is to join can never be reached, if `offbeat run` knows; else ""."""
    if launcher.ended is not None and launcher.ended.exists():
        return "Cannot join: the job has ended. Start it again."
    return ""


def _leave_address(path: Path, addresses: Sequence[str], settings: ShardSettings) -> None:
    """Write down where the job can be looked at, and joined, for this user only: the token is in it."""
    about: dict[str, Any] = {"address": addresses[0], "job": settings.job, "token": settings.token}
    about["servers"] = list(addresses)
    # Whoever looks does so from any folder.
    for kind in ("certificate", "key", "authority"):
        file = getattr(settings, kind)
        about[kind] = str(Path(file).absolute()) if file else ""
    leave_file(path, about)


def leave_file(path: Path, about: Mapping[str, Any]) -> None:
    """Write down how a job can be looked at, as JSON, for this user only: a secret is in it."""
    try:
        # Whole: who looks may come at any moment.
        write_whole(path, json.dumps(about, indent=1).encode(), mode=0o600)
    except OSError as error:  # a full disk is no reason to end the run
        _log.warning("Cannot write %s: %s. `offbeat top` will need the address and the token.", path, error.strerror)
