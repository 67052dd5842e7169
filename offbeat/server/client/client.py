"""A worker's end of a parameter server.

Call order, (each worker): `open` once per model; then, in each step, `exchange`, and wait for what it returns; `close`.
All links are served by one event loop on a thread of their own.

When a shard is lost, or says that the job went on without this worker, the client lets go of all shards, dials all of
them again, and opens its models again, saying where it was; what becomes of it then is decided there (see
`offbeat.coordinator.reconnect`). What the training thread waits for goes on waiting meanwhile.
"""

from __future__ import annotations

import collections
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.errors import DisagreementError, ModelError, NetworkError, OffbeatError, PeerError
from offbeat.protocol.checkpoints import MayPut, TransferDone
from offbeat.protocol.data_leases import LeaseGrants
from offbeat.protocol.messages import pack
from offbeat.protocol.plan_swap import AdoptPlan, PlanAgreement, PlanProposed, SwapPlan, SwapResult
from offbeat.protocol.status import GetStatus, TellStatus
from offbeat.protocol.training import (
    MOST_REFUSAL,
    AllWorkersAnswer,
    Announce,
    Answered,
    AskAllWorkers,
    ContributionInfo,
    Evicted,
    Granted,
    InitBlock,
    LeaveAfter,
    ModelInfo,
    ModelOpened,
    Notice,
    OpenModel,
    PullBlock,
    PullDone,
    PushBlock,
    Reconnect,
    Refused,
    ReleaseWorker,
    SnapshotAck,
)
from offbeat.server.client.connections import ShardConnections
from offbeat.server.client.lease_queue import LeaseQueues
from offbeat.server.client.model_state import ModelState
from offbeat.server.client.plan_judge import PlanVerdict
from offbeat.server.client.receiver import ShardReceiver
from offbeat.server.client.requests import PulledParameters, ServerRequest
from offbeat.server.client.state_transfer import (
    DataStateFetch,
    DataStateUpload,
    StateFetch,
    StateTransfers,
    StateUpload,
)
from offbeat.server.pushed_block import payload_of
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from offbeat.protocol.data_leases import FromData, RegisterLoader
    from offbeat.protocol.messages import ToWorker
    from offbeat.protocol.optimizer_spec import OptimizerSpec
    from offbeat.protocol.status import ModelStatus
    from offbeat.protocol.worker_status import TrainingStatus
    from offbeat.server.blocks import Block
    from offbeat.server.client.connections import Dial
    from offbeat.server.client.lease_queue import LeaseQueue
    from offbeat.server.client.plan_judge import PlanJudge
    from offbeat.server.client.state_transfer import StateTransfer
    from offbeat.server.optimizer_checkpoint import Portion
    from offbeat.wire.link import PeerLink
    from offbeat.wire.loop_thread import LoopThread

_MOST_ANSWERED = 16


class Client:
    """One worker's links to all shards.

    Args:
        loop: where the links live.
        rank, world: worker `rank` of the `world` that the job begins with.
        dials: how to reach each shard; if empty, a shard that is lost is lost for good.
        hosts: on which each shard runs; if empty, all on one.
        patience: for how long to dial a server that is gone; 0 gives up at once.
        tell: called, on the event loop's thread, with what people should know.
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
        tell: Callable[[str], None] = lambda text: None,
        plans: PlanJudge | None = None,
        seed: int | None = None,
    ) -> None:
        self._loop = loop
        self._plans = plans
        self._swaps: dict[int, ServerRequest[str]] = {}
        self.rank, self.world, self._seed = rank, world, seed
        self.ranks: tuple[int, ...] = ()  # of the workers that the job begins with at the server, if not all below
        self._shard_hosts = tuple(hosts)
        self._tell = tell
        self._connections = ShardConnections(self, rank=rank, dials=dials, patience=patience)
        self._answered: collections.deque[Answered] = collections.deque(maxlen=_MOST_ANSWERED)
        self._links = self._connections.links
        self._models: dict[int, ModelState] = {}
        self._questions: dict[int, tuple[AskAllWorkers, ServerRequest[AllWorkersAnswer]]] = {}
        self._looks: dict[int, ServerRequest[tuple[ModelStatus, ...]]] = {}
        self._lease_queues = LeaseQueues(self._say_if_up)
        self._enrolled = 0  # the entry in which it has enrolled
        self._draws: dict[int, ServerRequest[None]] = {}  # by loader
        self.transfers = StateTransfers(self._links)
        self._transfers_due: list[StateTransfer] = []
        self._asked_swaps = 0
        self._secrets: dict[int, bytes] = {}  # by shard, by which it knows this worker again
        self._asked = self._looked = 0  # questions are numbered alike on all workers
        self._error: OffbeatError | None = None

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
        parts: Sequence[torch.Tensor],
        *,
        about: ContributionInfo,
        unused: tuple[str, ...] = (),
    ) -> ServerRequest[PulledParameters]:
        """Bring a contribution and wait for the parameters of the next step.

        Args:
            parts: [D] gradient of each block, contiguous, on the CPU; it may not change until the exchange is done.
            about: what it is; its `unused` is filled in.
            unused: names of parameters without a gradient.
        """
        sent_bytes = sum(part.numel() * part.element_size() for part in parts)
        request: ServerRequest[PulledParameters] = ServerRequest(sent_bytes)
        self._loop.call(self._announce, model, request, dict(enumerate(parts)), about, unused)
        return request

    def register_loader(self, about: RegisterLoader) -> LeaseQueue:
        """Take part in a loader's data; where the leases come."""
        queue = self._lease_queues.hold(about)
        self._loop.call(self._enrol, queue)
        return queue

    def draw(self, queue: LeaseQueue) -> ServerRequest[None]:
        """Done when there is something in `queue.deals`, from which only the caller takes."""
        request: ServerRequest[None] = ServerRequest()
        self._loop.call(self._draw, queue, request)
        return request

    def give_back(self, queue: LeaseQueue, numbers: Sequence[int]) -> None:
        """Return these leases unused."""
        self._loop.call(self._lease_queues.give_back, queue.about.loader, numbers)

    def out_of_memory(self, queue: LeaseQueue, count: int, numbers: Sequence[int]) -> None:
        """Return these leases, and what was not drawn: there was no memory for a batch of `count` samples."""
        self._loop.call(self._lease_queues.out_of_memory, queue.about.loader, count, [*numbers, *queue.take_undrawn()])

    def data_state(self) -> ServerRequest[bytes]:
        """Ask for the state of the data, for a checkpoint."""
        transfer = DataStateFetch()
        self._loop.call(self._transfer, transfer)
        return transfer.request

    def set_data_state(self, data_state: bytes) -> ServerRequest[None]:
        """Go on where `data_state` was called, on all workers; done when all are told so."""
        transfer = DataStateUpload(data_state)
        self._loop.call(self._transfer, transfer)
        return transfer.request

    def reseed(self, queue: LeaseQueue, seed: int) -> None:
        """The order of the data is that of another run, from whose checkpoint this one goes on."""
        self._loop.call(self._lease_queues.reseed, queue.about.loader, seed)

    def look(self) -> ServerRequest[tuple[ModelStatus, ...]]:
        """Ask the coordinator for the status of all models."""
        request: ServerRequest[tuple[ModelStatus, ...]] = ServerRequest()
        self._loop.call(self._look, request)
        return request

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
        self._loop.call(self._ask, question, tuple(numbers), refresh, refusal[:MOST_REFUSAL], request)
        return request

    def swap(self, part: str, *, whole: bool = False) -> ServerRequest[str]:
        """Have another plan hold for all; the answer is why it does not, or "".

        Args:
            part: of the plan, as TOML.
            whole: it is all of it.
        """
        request: ServerRequest[str] = ServerRequest()
        self._loop.call(self._swap, part, whole, request)
        return request

    def fetch(self, model: int) -> ServerRequest[list[Portion]]:
        """The optimizer's state at all shards, as it is now."""
        transfer = StateFetch(self.state(model))
        self._loop.call(self._transfer, transfer)
        return transfer.request

    def put(self, model: int, portions: Sequence[Portion]) -> ServerRequest[str]:
        """Have the shards take over the optimizer's state, and the values of all blocks as they are here now.

        The answer is "" when they have, and why when the others do not wait for that.
        """
        state = self.state(model)
        # Copied, since what it is given if it has to come back meanwhile lands there.
        transfer = StateUpload(state, tuple(value.clone() for value in state.values), tuple(portions))
        self._loop.call(self._transfer, transfer)
        return transfer.request

    def trouble(self) -> str:
        """Say what is wrong with the server, in sentences; "" if nothing is known to be."""
        return self._connections.trouble()

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

    # -- on the event loop ---------------------------------------------------------------------------------------

    def _open(self, state: ModelState) -> None:
        state.swaps = max((other.swaps for other in self._models.values()), default=0)
        self._models[state.model] = state
        if self._failed(state.request):
            return
        state.name_all()
        if self._connections.is_up:
            self._enter(state)

    def _enter(self, state: ModelState) -> None:
        """Open the model; at the coordinator when all others have done so, because it then lets them send values."""
        state.is_in = state.is_entering = state.is_outdated = False
        state.going = None
        state.await_all()
        state.unopened = set(range(1, len(self._links)))
        for shard in state.unopened or {0}:
            self._open_at(state, shard)

    def _open_at(self, state: ModelState, shard: int) -> None:
        assert state.optimizer is not None
        details = ModelInfo(
            world=self.world,
            shards=len(self._links),
            holders=len(set(state.shards)),
            plan=state.plan,
            layout=state.layout,
            names=tuple(state.names),
            blocks=state.held_by(shard),
            optimizer=state.optimizer,
            back=self._back(state, shard),
            hosts=self._hosts_of(state),
            ranks=self.ranks,
            seed=self._seed,
        )
        self._links[shard].send(pack(OpenModel(state.model, self._connections.entry)), pack(details))

    def _hosts_of(self, state: ModelState) -> int:
        """Count the hosts that hold its blocks."""
        return len({self._shard_hosts[shard] for shard in state.shards} if self._shard_hosts else {0})

    def _back(self, state: ModelState, shard: int) -> Reconnect | None:
        if not state.life:
            return None
        return Reconnect(
            life=state.life,
            clock=state.clock,
            version=state.version,
            holds=state.parts is not None,
            waits=state.waits or bool(self._questions),
            weight=None if state.about is None else state.about.weight,
            done=tuple(state.done),
            answered=tuple(self._answered),
            swaps=state.swaps,
            secret=self._secrets.get(shard, b""),
        )

    def _announce(
        self,
        model: int,
        request: ServerRequest[PulledParameters],
        parts: Mapping[int, torch.Tensor],
        about: ContributionInfo,
        unused: tuple[str, ...],
    ) -> None:
        state = self._models[model]
        state.request, state.parts, state.announced = request, parts, ()
        # A parameter without elements is in no block.
        known = tuple(state.names[name] for name in unused if name in state.names)
        state.about = msgspec.structs.replace(about, unused=known)
        if self._failed(request):
            return
        if state.is_in:
            self._say(Announce(model, state.clock, state.about))
            state.announced += (state.clock,)
            if not state.is_gated:
                self._push(state, state.clock)
        elif state.is_outdated:
            self._come_again(state)

    def _come_again(self, state: ModelState) -> None:
        state.is_outdated = False
        self._open_at(state, 0)

    def _swap(self, part: str, whole: bool, request: ServerRequest[str]) -> None:
        if self._failed(request):
            return
        if not self._models:
            request.finish("Cannot swap anything yet: training has not begun. Call run.prepare first.")
            return
        if not self._connections.is_up:
            request.finish("Cannot swap anything now: the connection to the server is lost. Try again later.")
            return
        number, self._asked_swaps = self._asked_swaps, self._asked_swaps + 1
        self._swaps[number] = request
        self._say(SwapPlan(number, part, whole))

    def _look(self, request: ServerRequest[tuple[ModelStatus, ...]]) -> None:
        number, self._looked = self._looked, self._looked + 1
        self._looks[number] = request
        if not self._failed(request) and self._connections.is_up:
            self._say(GetStatus(number))

    def _transfer(self, transfer: StateTransfer) -> None:
        if not self._failed(transfer.request):
            self._transfers_due.append(transfer)
            self._begin_transfers()

    @property
    def _can_transfer(self) -> bool:
        """Whether all shards know this worker as one that trains all its models, also if it has to come again first."""
        return self._connections.is_up and all(state.is_in or state.is_outdated for state in self._models.values())

    def _begin_transfers(self) -> None:
        """Begin transfers that are due; if they cannot begin now, they do when all models are open again."""
        if self._can_transfer:
            due, self._transfers_due = self._transfers_due, []
            for transfer in due:
                self.transfers.begin(transfer)

    def _enrol(self, queue: LeaseQueue | None = None) -> None:
        """Take part in this loader's data; in all loaders' after coming to the job again."""
        if queue is None or self._enrolled != self._connections.entry:
            self._enrolled = self._connections.entry
            self._lease_queues.enrol()
        else:
            self._lease_queues.enrol(queue)

    def _draw(self, queue: LeaseQueue, request: ServerRequest[None]) -> None:
        if not self._failed(request):
            self._draws[queue.about.loader] = request
            self._lease_queues.want(queue, lambda: request.finish(None))

    def _say_if_up(self, message: FromData) -> None:
        """Send to the coordinator unless it is away: then all is said again when it is back."""
        if self._connections.is_up and self._enrolled == self._connections.entry and self._links:
            self._say(message)

    def _ask(
        self,
        question: str,
        numbers: tuple[float, ...],
        refresh: bool,
        refusal: str,
        request: ServerRequest[AllWorkersAnswer],
    ) -> None:
        if not self._models:
            request.fail(ModelError(f"Cannot ask all workers for {question}: call run.prepare first."))
            return
        number, self._asked = self._asked, self._asked + 1
        ask = AskAllWorkers(number, question, refresh, numbers, refusal)
        self._questions[number] = (ask, request)
        if self._failed(request):
            return
        for state in self._models.values():
            if state.is_outdated:
                self._come_again(state)
        if self._connections.is_up and self._can_ask:
            self._say(ask)

    @property
    def _can_ask(self) -> bool:
        """Whether this worker takes part in all its models; a question steps out of them, in place of a pull."""
        return all(state.is_in and not state.is_entering for state in self._models.values())

    def _leave(self, step: int) -> None:
        if self._links:
            self._say(LeaveAfter(step))

    def _tell_status(self, status: TrainingStatus) -> None:
        if self._connections.is_up and self._links:
            self._say(TellStatus(status))

    def _say(
        self,
        message: Announce
        | AskAllWorkers
        | GetStatus
        | PullDone
        | SwapPlan
        | PlanAgreement
        | LeaveAfter
        | TellStatus
        | FromData,
    ) -> None:
        """Send to the coordinator; if the link is just being lost, it is said again when it is back."""
        if self._links[0].is_open:
            self._links[0].send(pack(message))

    def lose(self, error: OffbeatError, entry: int) -> None:
        """A shard is gone, or has gone on without this worker: come back."""
        if self._error is None:
            self._connections.lose(error, entry)

    def stranded(self, error: OffbeatError) -> None:
        """Handle the loss of all links."""
        self._transfers_due += self.transfers.interrupt()
        for swap in self._swaps.values():
            swap.finish("It is not known whether the plan was swapped: the connection to the server was lost.")
        self._swaps.clear()
        if self._plans is not None:
            self._plans.let_go()
        for state in self._models.values():
            state.is_in = state.is_outdated = False

    def arrived(self) -> None:
        """Open all models: there are links to all shards again."""
        for state in self._models.values():
            self._enter(state)
        for number in self._looks:
            self._say(GetStatus(number))

    def _failed(self, request: ServerRequest[Any]) -> bool:
        if self._error is not None:
            request.fail(self._error)
        return self._error is not None

    def fail(self, error: OffbeatError) -> None:
        """Fail all exchanges: no more are possible."""
        self._error = self._error or error
        if self._plans is not None:
            self._plans.let_go()
        self.transfers.fail(self._error)
        requests = [state.request for state in self._models.values()]
        questions = [asked for _, asked in self._questions.values()]
        due = [transfer.request for transfer in self._transfers_due]
        everything: list[ServerRequest[Any]] = [
            *requests,
            *questions,
            *self._looks.values(),
            *self._draws.values(),
            *self._swaps.values(),
            *due,
        ]
        for request in everything:
            request.fail(self._error)

    def state(self, model: int) -> ModelState:
        """The state of a model.

        Raises:
            PeerError: if this worker did not open it.
        """
        if model not in self._models:
            raise PeerError(f"The server speaks of model {model}, which was not opened.")
        return self._models[model]

    def hear(self, shard: int, message: ToWorker) -> None:
        """Handle a shard's message."""
        match message:
            case ModelOpened(model=model):
                self._opened(self.state(model), shard, message)
            case Granted(model=model, clock=clock):
                self._push(self.state(model), clock)
            case ReleaseWorker(model=model):
                self._go(self.state(model), message)
            case SnapshotAck(model=model, clock=clock):
                done = self.state(model).done
                while done and done[0][0] < clock:
                    done.popleft()
            case Notice(text=text):
                self._tell(text)
            case LeaseGrants():
                self._lease_queues.deal(message)
            case PullBlock(model=model, block=block, version=version, number=number):
                state = self.state(model)
                state.versions[block] = version
                state.take(block, number)
                self._finish(state)
            case AllWorkersAnswer():
                self._take_answer(message)
            case MayPut(number=number, refused=refused):
                self.transfers.may_put(number, refused)
            case TransferDone(number=number):
                self.transfers.done(number)
            case Evicted(reason=reason):
                self.lose(NetworkError(f"The server continued without this worker: {reason}."), self._connections.entry)
            case PlanProposed(number=number, plan=plan):
                digest, refusal, passed, pushed = self._judge(plan)
                self._say(PlanAgreement(number, digest, refusal[:MOST_REFUSAL], passed, pushed))
            case AdoptPlan():
                self._adopt(message)
            case SwapResult(number=number, refusal=refusal):
                if (swap := self._swaps.pop(number, None)) is not None:
                    swap.finish(refusal)
            case Refused(reason=reason, disagrees=disagrees):
                self.fail(DisagreementError(reason) if disagrees else PeerError(reason))

    def _judge(self, plan: str) -> PlanVerdict:
        return PlanVerdict("", "it can go by no other") if self._plans is None else self._plans.judge(plan)

    def _adopt(self, adopt: AdoptPlan) -> None:
        for state in self._models.values():
            state.plan, state.swaps = adopt.plan, adopt.number  # should it come to the job again
        if self._plans is not None:
            self._plans.adopt(adopt.plan, adopt.text, adopt.border)

    def _opened(self, state: ModelState, shard: int, message: ModelOpened) -> None:
        self._connections.survives = message.survives
        if message.secret:
            self._secrets[shard] = message.secret
        if message.wants_values:
            self._fill(state, shard)
        if message.later:
            state.is_outdated = True
            if self._enrolled != self._connections.entry:
                self._enrol()  # it may wait for data, and without has nothing to come with
            if state.parts is not None or self._questions:  # it has its contribution by now
                self._come_again(state)
            self._begin_transfers()
            return
        if shard in state.unopened:
            state.unopened.discard(shard)
            if not state.unopened:
                self._open_at(state, 0)
        state.new_life = message.life

    def _go(self, state: ModelState, go: ReleaseWorker) -> None:
        was_in, state.is_in, state.is_gated = state.is_in, True, go.waits
        if not was_in:
            if not state.life:
                self._asked = max(self._asked, go.asked)
            if state.life != state.new_life:
                state.done.clear()  # what was lost is counted
            state.life = state.new_life
            if self._enrolled != self._connections.entry:
                self._enrol()
        if not was_in and state.parts is not None and not go.values:
            assert state.about is not None
            state.clock = go.step
            self._say(Announce(state.model, state.clock, state.about))
            state.announced += (state.clock,)
            return
        state.going, state.is_entering = go, state.is_entering or not was_in
        self._finish(state)

    def _take_answer(self, answer: AllWorkersAnswer) -> None:
        _, asked = self._questions.pop(answer.number, (None, None))
        if asked is None:
            return
        if answer.disagreement:
            asked.fail(_apart(answer.disagreement))
            return
        self._answered.append(Answered(answer.number, answer.numbers, answer.workers))
        asked.finish(answer)

    def _ask_again(self) -> None:
        """Ask again what was asked and not answered, once all models are open again."""
        if self._can_ask:
            for ask, _ in self._questions.values():
                self._say(ask)
            self._begin_transfers()

    def see(self, number: int, model_statuses: tuple[ModelStatus, ...]) -> None:
        """The answer to a look."""
        look = self._looks.pop(number, None)
        if look is not None:
            look.finish(model_statuses)

    def _fill(self, state: ModelState, shard: int) -> None:
        for block, holder in enumerate(state.shards):
            if holder == shard:
                self._links[shard].send(pack(InitBlock(state.model, block)), bytes_of(state.values[block]))

    def _push(self, state: ModelState, clock: int) -> None:
        parts = state.parts
        if parts is None or clock != state.clock:
            raise PeerError(f"The server granted contribution {clock}, this worker has {state.clock}.")
        state.await_all()
        for block, part in parts.items():
            payload = payload_of(part, state.blocks[block].dtype)
            self._links[state.shards[block]].send(pack(PushBlock(state.model, clock, block, payload)), bytes_of(part))

    def _finish(self, state: ModelState) -> None:
        go = state.going
        if go is None or (go.values and state.missing):
            return
        if go.counted and state.about is not None:
            state.done.append((state.clock, state.about.weight))
        state.going, state.clock = None, go.step
        if go.values:
            if state.about is not None:
                self._lease_queues.brought(state.about.used)
            state.parts, state.version = None, go.version
            state.await_all()
            self._connections.progressed()
            self._say(PullDone(state.model, state.clock))
            state.request.finish(
                PulledParameters(
                    life=state.life,
                    versions=tuple(state.versions[block.index] for block in state.blocks),
                    announced=state.announced,
                    is_counted=go.counted,
                    staleness=go.staleness,
                    fate=go.fate,
                )
            )
        if state.is_entering:
            state.is_entering = False
            self._ask_again()


def _apart(questions: str) -> DisagreementError:
    return DisagreementError(
        f"The workers disagree about where they are: they ask for {questions} at the same time. Let every worker call "
        "run.mean equally often and in the same order."
    )
