"""A worker's end of a parameter server.

Call order, (each worker): `open` once per model; then, in each step, `exchange`, and wait for what it returns; `close`.
All links are served by one event loop on a thread of their own.

When a shard is lost, or says that the job went on without this worker, the client lets go of all shards, dials all of
them again, and opens its models again, saying where it was; what becomes of it then is decided there (see
`offbeat.coordinator.reconnect`). What the training thread waits for goes on waiting meanwhile.
"""

from __future__ import annotations

import collections
import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat import contribution_hooks
from offbeat.errors import DisagreementError, ModelError, NetworkError, OffbeatError, PeerError, WorkerLostError
from offbeat.protocol.checkpoints import MayPut, TransferDone
from offbeat.protocol.data_leases import LeaseGrants
from offbeat.protocol.loss_scores import ContributionsScored, ScoreContributions
from offbeat.protocol.plan_swap import AdoptPlan, PlanAgreement, PlanProposed, SwapResult
from offbeat.protocol.status import TellStatus
from offbeat.protocol.training import (
    MOST_REFUSAL,
    AllWorkersAnswer,
    Evicted,
    Granted,
    LeaveAfter,
    ModelOpened,
    Notice,
    PullBlock,
    Refused,
    ReleaseWorker,
    SnapshotAck,
    TrainingOver,
)
from offbeat.server.client.connections import ShardConnections
from offbeat.server.client.coordinator_requests import CoordinatorRequests
from offbeat.server.client.lease_requests import LeaseRequests
from offbeat.server.client.model_exchanges import ModelExchanges
from offbeat.server.client.model_state import ModelState, Part
from offbeat.server.client.plan_judge import PlanVerdict
from offbeat.server.client.question_client import QuestionClient
from offbeat.server.client.receiver import ShardReceiver
from offbeat.server.client.requests import EndOfTraining, ServerRequest
from offbeat.server.client.state_transfer import (
    ContributionFetch,
    DataStateFetch,
    DataStateUpload,
    StateFetch,
    StateTransfers,
    StateUpload,
)
from offbeat.server.pushed_block import body_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from offbeat.protocol.data_leases import RegisterLoader
    from offbeat.protocol.messages import ToWorker
    from offbeat.protocol.optimizer_spec import OptimizerSpec
    from offbeat.protocol.status import ModelStatus
    from offbeat.protocol.training import ContributionInfo
    from offbeat.protocol.worker_status import TrainingStatus
    from offbeat.server.blocks import Block
    from offbeat.server.client.connections import Dial
    from offbeat.server.client.lease_queue import LeaseQueue
    from offbeat.server.client.plan_judge import PlanJudge
    from offbeat.server.client.requests import PulledParameters
    from offbeat.server.client.state_transfer import StateTransfer
    from offbeat.server.optimizer_checkpoint import Portion
    from offbeat.sync import Push
    from offbeat.wire.link import PeerLink
    from offbeat.wire.loop_thread import LoopThread

T = TypeVar("T")


class Client:
    """One worker's links to all shards.

    Args:
        loop: where the links live.
        rank, world: worker `rank` of the `world` that the job begins with.
        dials: how to reach each shard; if empty, a shard that is lost is lost for good.
        hosts: on which each shard runs; if empty, all on one.
        patience: for how long to dial a server that is gone; 0 gives up at once.
        tell: called, on the event loop's thread, with what people should know, and whether it says what all wait for
            (True), or that they do not any more (False).
        plans: who knows which plans this worker can go by; None if it can go by no other.
        seed: of this worker, which the server compares with the others'; None if it has none.
    """

    def __init__(
        self,
        loop: LoopThread,
        *,
        rank: int,
        world: int,
        dials: Sequence[Dial] = (),
        hosts: Sequence[str] = (),
        patience: timedelta = timedelta(seconds=60),
        tell: Callable[[str, bool | None], None] = lambda text, waits: None,
        plans: PlanJudge | None = None,
        seed: int | None = None,
    ) -> None:
        self._loop, self.rank, self._tell, self._plans = loop, rank, tell, plans
        self._connections = connections = ShardConnections(self, rank=rank, dials=dials, patience=patience)
        self._links = connections.links
        self._questions = QuestionClient(connections)
        self._requests = CoordinatorRequests(connections)
        self._leases = LeaseRequests(connections)
        self.transfers = StateTransfers(connections.links)
        self._models = ModelExchanges(
            connections,
            questions=self._questions,
            leases=self._leases,
            transfers=self.transfers,
            world=world,
            hosts=hosts,
            seed=seed,
        )
        self._error: OffbeatError | EndOfTraining | None = None
        self._reason = ""  # why all wait at the server
        self._reports: collections.deque[tuple[int, str]] = collections.deque(maxlen=64)  # of how lives began

    def accept(self, link: PeerLink) -> ShardReceiver:
        """Take a link into use, in order of shards; returns what it hands frames to."""
        self._links.append(link)
        return ShardReceiver(self, len(self._links) - 1, self._connections.entry)

    async def connect(self, patience: timedelta) -> None:
        """Dial all shards for the first time.

        Raises:
            NetworkError: if one cannot be reached in time.
            PeerError: if one refused.
        """
        await self._connections.connect(patience)

    # -- called by the training thread ---------------------------------------------------------------------------

    def begin_with(self, ranks: tuple[int, ...]) -> None:
        """Begin the job at the server with these workers, not with all below `world`."""
        self._models.ranks = ranks

    def open(
        self,
        model: int,
        *,
        plan: str,
        layout: str,
        blocks: Sequence[Block],
        shards: Sequence[int],
        values: Sequence[torch.Tensor],
        optimizer: OptimizerSpec,
    ) -> ServerRequest[PulledParameters]:
        """Take part in training a model; done when this worker has the parameters.

        Args:
            plan: as TOML.
            layout: digest of the model's parameters.
            shards: which shard holds each block.
            values: [D] of each block; the first worker's are taken, and all are overwritten.
        """
        state = ModelState(model, blocks, shards, values, plan=plan, layout=layout, optimizer=optimizer)
        self._loop.call(self._open, state)
        return state.request

    def exchange(
        self,
        model: int,
        parts: Sequence[Part],
        *,
        about: ContributionInfo,
        unused: tuple[str, ...] = (),
        order: Sequence[int] = (),
        changed: Collection[int] = (),
    ) -> ServerRequest[PulledParameters]:
        """Bring a contribution and wait for the parameters of the next step.

        Args:
            parts: of each block the gradient [D], contiguous, on the CPU, or what a codec has encoded of it; it may not
                change until the exchange is done.
            about: what it is; its `unused` and `again` are filled in.
            unused: names of parameters without a gradient.
            order: in which the blocks are pushed, those of the next contribution with `push_early`; that of `parts`,
                and all at once, if empty.
            changed: blocks that were pushed early, and are not what they were then.
        """
        bodies = [body_of(part) for part in parts]
        sent_bytes = sum(body.numel() * body.element_size() for body in bodies)
        request: ServerRequest[PulledParameters] = ServerRequest(sent_bytes)
        in_order = contribution_hooks.before_push({i: parts[i] for i in order or range(len(parts))}, model, about.step)
        announce = functools.partial(self._models.announce, pushes_early=bool(order))
        return self._begin(request, announce, model, in_order, about, unused, changed)

    def push_early(self, model: int, block: int, part: Part) -> None:
        """Push a block of the contribution that is being computed, before `exchange`, which pushes what is left.

        Nothing comes of it before `exchange`, and nothing at all if this worker is lost first. Where the policy grants
        pushes it waits until that has happened; where the server is away, for `exchange`.

        Args:
            part: as of `exchange`. Of each shard, one block at least is left for that.
        """
        self._loop.call(self._push_early, model, block, part)

    def pull_in_order(self, model: int, order: Sequence[int]) -> None:
        """Have the parameters of the next steps come in this order, as far as they are there at the same time.

        Args:
            order: the indices of all blocks.
        """
        self._loop.call(self._pull_in_order, model, tuple(order))

    def register_loader(self, about: RegisterLoader) -> LeaseQueue:
        """Take part in a loader's data; where the leases come."""
        queue = self._leases.queues.hold(about)
        self._loop.call(self._leases.enrol, queue)
        return queue

    def draw(self, queue: LeaseQueue) -> ServerRequest[None]:
        """Done when there is something in `queue.deals`, from which only the caller takes."""
        request: ServerRequest[None] = ServerRequest()
        return self._begin(request, self._leases.draw, queue)

    def give_back(self, queue: LeaseQueue, numbers: Sequence[int]) -> None:
        """Return these leases unused."""
        self._loop.call(self._leases.queues.give_back, queue.about.loader, numbers)

    def out_of_memory(self, queue: LeaseQueue, count: int, numbers: Sequence[int]) -> None:
        """Return these leases, and what was not drawn: there was no memory for a batch of `count` samples."""
        undrawn = queue.take_undrawn()
        self._loop.call(self._leases.queues.out_of_memory, queue.about.loader, count, [*numbers, *undrawn])

    def reseed(self, queue: LeaseQueue, seed: int) -> None:
        """The order of the data is that of another run, from whose checkpoint this one goes on."""
        self._loop.call(self._leases.queues.reseed, queue.about.loader, seed)

    def data_state(self) -> ServerRequest[bytes]:
        """Ask for the state of the data, for a checkpoint."""
        transfer = DataStateFetch()
        return self._begin(transfer.request, self._transfer, transfer)

    def set_data_state(self, data_state: bytes) -> ServerRequest[None]:
        """Go on where `data_state` was called, on all workers; done when all are told so."""
        transfer = DataStateUpload(data_state)
        return self._begin(transfer.request, self._transfer, transfer)

    def fetch(self, model: int) -> ServerRequest[list[Portion]]:
        """The optimizer's state at all shards, as it is now."""
        transfer = StateFetch(self.state(model))
        return self._begin(transfer.request, self._transfer, transfer)

    def fetch_contribution(
        self, model: int, version: int, push: Push | None, landing: Sequence[torch.Tensor]
    ) -> ServerRequest[bool]:
        """Have a contribution to an update that waits to be judged; only a validator is given it.

        The answer is whether it has come, whole; it does not once the update is judged.

        Args:
            push: the contribution; None for the parameters before the update.
            landing: [D] of each block, where it is to be.
        """
        transfer = ContributionFetch(self.state(model), version, push, landing)
        return self._begin(transfer.request, self._transfer, transfer)

    def tell_losses(self, asked: ScoreContributions, losses: Sequence[float]) -> None:
        """Answer a question about losses; void if the coordinator is away, which asks anew."""
        self._loop.call(self._tell_losses, asked, tuple(losses))

    def put(self, model: int, portions: Sequence[Portion]) -> ServerRequest[str]:
        """Have the shards take over the optimizer's state, and the values of all blocks as they are here now.

        The answer is "" when they have, and why when the others do not wait for that.
        """
        state = self.state(model)
        # Copied, since what it is given if it has to come back meanwhile lands there.
        transfer = StateUpload(state, tuple(value.clone() for value in state.values), tuple(portions))
        return self._begin(transfer.request, self._transfer, transfer)

    def look(self) -> ServerRequest[tuple[ModelStatus, ...]]:
        """Ask the coordinator for the status of all models."""
        request: ServerRequest[tuple[ModelStatus, ...]] = ServerRequest()
        return self._begin(request, self._requests.look)

    def tell_status(self, status: TrainingStatus) -> None:
        """Say how this worker's training goes, for whoever looks; lost if the coordinator is away."""
        self._loop.call(self._tell_status, status)

    def ask(
        self, question: str, numbers: Sequence[float] = (), *, refresh: bool = False, refusal: str = ""
    ) -> ServerRequest[AllWorkersAnswer]:
        """Ask all workers together; the sums of their numbers are in the answer.

        Args:
            refresh: take the newest parameters of all models; else only if there were updates in the meantime.
            refusal: why what all are to do cannot be; the first one is in the answer of all.
        """
        request: ServerRequest[AllWorkersAnswer] = ServerRequest()
        return self._begin(request, self._ask, question, tuple(numbers), refresh, refusal[:MOST_REFUSAL])

    def swap(self, part: str, *, whole: bool = False) -> ServerRequest[str]:
        """Have another plan hold for all; the answer is why it does not, or "".

        Args:
            part: of the plan, as TOML.
            whole: it is all of it.
        """
        request: ServerRequest[str] = ServerRequest()
        return self._begin(request, self._swap, part, whole)

    def trouble(self) -> str:
        """Say what is wrong with the server, or what all wait for there, in sentences; "" if nothing is known to be."""
        return self._connections.trouble() or self._reason

    def abort(self) -> None:
        """Leave without a word: the others are to miss this worker at once."""
        self._loop.call(self._connections.abort)

    def close(self, told_at: int | None = None) -> None:
        """Say good-bye to all shards.

        Args:
            told_at: behind which of its steps this worker leaves because it was told to; None if it is done.
        """
        if told_at is not None:
            self._loop.call(self._leave, told_at)
        self._loop.call(self._connections.close)
        for link in tuple(self._links):
            self._loop.run(link.close())
        self._links.clear()

    def _begin(self, request: ServerRequest[T], begin: Callable[..., None], *arguments: Any) -> ServerRequest[T]:
        """Begin with a request on the event loop, and return it.

        Args:
            begin: called there with the request and `arguments`, unless there will be no link again.
        """
        self._loop.call(self._begin_unless_failed, request, begin, arguments)
        return request

    # -- on the event loop ---------------------------------------------------------------------------------------

    def _begin_unless_failed(
        self, request: ServerRequest[Any], begin: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if self._error is not None:
            request.fail(self._error)
        else:
            begin(request, *arguments)

    def _open(self, state: ModelState) -> None:
        self._models.add(state)
        if self._error is not None:
            state.request.fail(self._error)
        else:
            self._models.open(state)

    def _push_early(self, model: int, block: int, part: Part) -> None:
        if self._error is None:
            self._models.push_early(model, block, part)

    def _pull_in_order(self, model: int, order: Sequence[int]) -> None:
        if self._error is None:
            self._models.pull_in_order(model, order)

    def _transfer(self, request: ServerRequest[Any], transfer: StateTransfer) -> None:
        """Begin a transfer; if it cannot begin now, it does when all models are open again."""
        self.transfers.add(transfer)
        if self._models.can_transfer:
            self.transfers.begin_due()

    def _ask(
        self,
        request: ServerRequest[AllWorkersAnswer],
        question: str,
        numbers: tuple[float, ...],
        refresh: bool,
        refusal: str,
    ) -> None:
        if not self._models.states:
            request.fail(ModelError(f"Cannot ask all workers for {question}: call run.prepare first."))
            return
        ask = self._questions.add(request, question, numbers, refresh=refresh, refusal=refusal)
        self._models.forget_pushes()
        self._models.come_again()
        if self._connections.is_up and self._models.can_ask:
            self._connections.say(ask)

    def _swap(self, request: ServerRequest[str], part: str, whole: bool) -> None:
        if not self._models.states:
            request.finish("Cannot swap anything yet: training has not begun. Call run.prepare first.")
            return
        self._requests.swap(request, part, whole)

    def _leave(self, step: int) -> None:
        if self._links:
            self._connections.say(LeaveAfter(step))

    def _tell_losses(self, asked: ScoreContributions, losses: tuple[float, ...]) -> None:
        if self.state(asked.model).scoring is asked:
            self._connections.say(ContributionsScored(asked.model, asked.version, asked.number, losses))

    def _tell_status(self, status: TrainingStatus) -> None:
        if self._connections.is_up and self._links:
            self._connections.say(TellStatus(status))

    def lose(self, error: OffbeatError, entry: int) -> None:
        """A shard is gone, or has gone on without this worker: come back."""
        if self._error is None:
            self._connections.lose(error, entry)

    def stranded(self, error: OffbeatError) -> None:
        """Handle the loss of all links."""
        self._reason = ""
        self.transfers.stranded()
        self._requests.stranded()
        if self._plans is not None:
            self._plans.let_go()
        self._models.stranded()

    def arrived(self) -> None:
        """Open all models: there are links to all shards again."""
        self._models.arrived()
        self._requests.arrived()

    def fail(self, error: OffbeatError | EndOfTraining) -> None:
        """Fail all that is waited for: nothing more is possible."""
        self._error = self._error or error
        if self._plans is not None:
            self._plans.let_go()
        self.transfers.fail(self._error)
        self._models.fail(self._error)
        self._questions.fail(self._error)
        self._requests.fail(self._error)
        self._leases.fail(self._error)

    def state(self, model: int) -> ModelState:
        """The state of a model.

        Raises:
            PeerError: if this worker did not open it.
        """
        return self._models.state(model)

    def hear(self, shard: int, message: ToWorker) -> None:
        """Handle a shard's message."""
        match message:
            case ModelOpened():
                self._models.opened(shard, message)
            case Granted(model=model, clock=clock):
                self._models.granted(model, clock)
            case ReleaseWorker():
                self._models.released(message)
            case PullBlock():
                self._models.pulled(message)
            case ScoreContributions():
                self._models.ask_for_losses(message)
            case SnapshotAck():
                self._models.forget_done(message)
            case LeaseGrants():
                self._leases.queues.deal(message)
            case AllWorkersAnswer():
                self._questions.answer(message)
            case SwapResult():
                self._requests.swapped(message)
            case MayPut(number=number, refused=refused):
                self.transfers.may_put(number, refused)
            case TransferDone(number=number):
                self.transfers.done(number)
            case PlanProposed(number=number, plan=plan):
                digest, refusal, passed, pushed = self._judge(plan)
                self._connections.say(PlanAgreement(number, digest, refusal[:MOST_REFUSAL], passed, pushed))
            case AdoptPlan(plan=plan, text=text, border=sync_point):
                self._models.adopt(message)
                if self._plans is not None:
                    self._plans.adopt(plan, text, sync_point)
            case Notice(text=text, life=life) if life is not None and (life, text) in self._reports:
                pass  # it had come over an earlier link
            case Notice(text=text, waits=waits, life=life):
                if life is not None:
                    self._reports.append((life, text))
                self._reason = text if waits else "" if waits is False else self._reason
                self._tell(text, waits)
            case TrainingOver(why=why):
                self._end_training(why)
            case Evicted(reason=reason):
                self.lose(NetworkError(f"The server continued without this worker: {reason}."), self._connections.entry)
            case Refused(reason=reason, disagrees=disagrees):
                self.fail(DisagreementError(reason) if disagrees else PeerError(reason))

    def _end_training(self, why: str) -> None:
        """The workers are done, or gone, so that what this validator waits for, now or later, never comes."""
        if self._error is not None:  # another shard has said so
            return
        self._connections.close()
        if why:
            self.fail(WorkerLostError(why))
            return
        self._tell("The job is over: its last worker has said good-bye. This validator ends with it.", None)
        self.fail(EndOfTraining(0))

    def see(self, number: int, model_statuses: tuple[ModelStatus, ...]) -> None:
        """Handle the answer to a look."""
        self._requests.seen(number, model_statuses)

    def _judge(self, plan: str) -> PlanVerdict:
        return PlanVerdict("", "it can go by no other") if self._plans is None else self._plans.judge(plan)
