"""The peers of a shard, to whose links frames go: workers, onlookers, other shards, the coordinator."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PeerError
from offbeat.protocol.checkpoints import FetchState, PutState, PutStateDone, TransferDone
from offbeat.protocol.data_leases import SetDataState
from offbeat.protocol.loss_scores import FetchContribution
from offbeat.protocol.messages import SAYS, details_of, from_coordinator, from_peer, pack
from offbeat.protocol.plan_swap import AdoptPlan
from offbeat.protocol.shards import BeginLife, SnapshotMark
from offbeat.protocol.training import InitBlock, OpenModel, PullOrder, PushBlock, Refused
from offbeat.server.optimizer_checkpoint import Portion
from offbeat.server.pushed_block import PushedBlock, receive
from offbeat.server.snapshot import STATE_DTYPES
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.protocol.checkpoints import StatePart
    from offbeat.protocol.data_leases import DataState
    from offbeat.protocol.loss_scores import FetchedBlock
    from offbeat.protocol.messages import Decision, FromCoordinator, FromShard, FromWorker, ToWorker
    from offbeat.protocol.rank_reservation import ReserveRanks
    from offbeat.protocol.status import StatusReply
    from offbeat.protocol.training import ModelInfo
    from offbeat.server.shard.model_shard import ModelShard
    from offbeat.sync import Push
    from offbeat.wire.link import PeerLink

_MOST_UNSEEN = 8
# Parts of the timeout; a peer that is well says something after 0.2 of it at the latest.
_QUIET, _DUE = 0.4, 0.3
_A = {
    "worker": "a worker",
    "validator": "a validator",
    "shard": "another shard",
    "onlooker": "an onlooker",
    "operator": "an operator",
}


class PeerHandler(Protocol):
    """The handler of what a shard's peers send."""

    is_over: bool

    @property
    def coordinates(self) -> bool: ...

    def model_shard(self, model: int) -> ModelShard: ...

    def open(self, peer: Peer, model: int, details: ModelInfo, entry: int = 0) -> None: ...

    def fill(self, peer: Peer, model: int, block: int) -> None: ...

    def arrive(
        self, peer: Peer, model: int, push: Push, block: int, part: PushedBlock, *, again: bool = False
    ) -> None: ...

    def fetch(self, peer: Peer, message: FetchState) -> None: ...

    def fetch_contribution(self, peer: Peer, message: FetchContribution) -> None: ...

    def hear(self, peer: Peer, message: Any) -> None: ...

    def is_early(self, peer: Peer, model: int) -> bool: ...

    def may_push(self, model: int, push: Push) -> bool: ...

    def lose(self, peer: Peer, error: OffbeatError | None) -> None: ...

    def heard(self) -> None: ...

    def begin(self, begin: BeginLife) -> None: ...

    def mark(self, mark: SnapshotMark) -> None: ...

    def adopt(self, adopt: AdoptPlan) -> None: ...

    def decide(self, decision: Decision) -> Push | None: ...

    def refuse(self, reason: str) -> None: ...

    def end(self, error: OffbeatError | None) -> None: ...


class Peer:
    """One connected worker, or another shard; what its link hands frames to."""

    def __init__(self, shard: PeerHandler, link: PeerLink) -> None:
        self._shard, self.link = shard, link
        self.rank, self.role = link.rank, link.role
        self.trains = self.role in ("worker", "validator")  # whether it pushes and pulls
        self.models: dict[int, int] = {}  # that it has opened, with its entry
        self.filling: set[int] = set()  # models whose first values come from it
        self._pushes = 0  # blocks that it has begun to push
        self._unseen = 0  # answers that it has not received
        self._is_fetching = False
        self.may_put: set[int] = set()  # models that it may put other parameters into, until `PutStateDone`
        # By model and block, with whether it comes again: not known of yet.
        self.early: dict[tuple[int, int], tuple[Push, PushedBlock, bool]] = {}
        self._places: dict[int, dict[int, int]] = {}  # by model and block: in the order in which it wants them
        self._said = 0  # messages, to another shard
        self._unheard: deque[ToWorker | FromCoordinator] = deque()  # of these, those that it may not have received
        self._landing: torch.Tensor | None = None
        self._pushed: PushedBlock | None = None
        self._filled: int | None = None  # the block whose values are being received
        self._details = bytearray()

    def say(self, message: ToWorker | FromCoordinator, body: Any = b"") -> None:
        """Send a message; nothing if the peer is just leaving."""
        is_shard = self.role == "shard"
        if is_shard:
            self._said += 1
            self._unheard.append(message)
        if not self.link.is_open:
            return
        try:
            if is_shard:
                self.link.send(pack(message), body, self._on_heard)
            else:
                self.link.send(pack(message), body)
        except NetworkError as error:  # it fits into no frame; not now, since others are being told something, too
            asyncio.get_running_loop().call_soon(self.link.fail, error)

    def _on_heard(self) -> None:
        self._unheard.popleft()

    def unheard(self, heard: int) -> list[ToWorker | FromCoordinator] | None:
        """List what was said to another shard after the first `heard` messages; None if that is not known any more."""
        first = heard - (self._said - len(self._unheard))
        return list(self._unheard)[first:] if 0 <= first <= len(self._unheard) else None

    def answer(self, message: StatusReply | DataState, body: bytes) -> None:
        """Answer a question that may be asked at any time.

        Raises:
            PeerError: if answers pile up, because it does not take them in.
        """
        if self._unseen >= _MOST_UNSEEN:
            raise PeerError("Cannot answer this peer: it asks for more than it reads.")
        self._unseen += 1
        if self.link.is_open:
            self.link.send(pack(message), body, self._on_seen)

    def _on_seen(self) -> None:
        self._unseen -= 1

    def give_state(self, pieces: Iterable[tuple[StatePart | FetchedBlock, Any]], done: TransferDone) -> None:
        """Send the optimizer's state, or a contribution.

        Raises:
            PeerError: if it has not read what it fetched before.
        """
        if self._is_fetching:
            raise PeerError("Cannot send this peer what it fetches: it has not read what it fetched before.")
        self._is_fetching = True
        for piece, body in pieces:
            self.say(piece, body)
        if self.link.is_open:
            self.link.send(pack(done), b"", self._on_fetched)

    def _on_fetched(self) -> None:
        self._is_fetching = False

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """The memory for the body of a message.

        Raises:
            PeerError: if it is not expected, or of another size or type.
        """
        message = self._hear(metadata)
        match message:
            case OpenModel():
                self._details = bytearray(size_bytes)
                return memoryview(self._details)
            case InitBlock(model=model, block=block):
                model_shard = self._shard.model_shard(model)
                if model not in self.filling or block not in model_shard.unfilled:
                    raise PeerError(f"Rank {self.rank} was not asked for the values of block {block}.")
                self._filled = block
                return _sized(model_shard.values(block), block, size_bytes)
            case PushBlock():
                return self._landing_place(message, size_bytes)
            case PutState():
                return self._putting_place(message, size_bytes)
            case SetDataState():
                self._details = bytearray(size_bytes)
                return memoryview(self._details)
            case _:
                raise PeerError(f"{type(message).__name__} has no body.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A message is here, whole."""
        if not self._shard.is_over:
            self._take(self._hear(metadata))

    def lost(self, error: OffbeatError | None) -> None:
        """The link is gone for good."""
        self._shard.lose(self, error)

    def open(self, model: int, details: ModelInfo, entry: int) -> None:
        """Open the model that it asked for, or refuse."""
        try:
            self._shard.open(self, model, details, entry)
        except PeerError as error:
            raise self._refused(error) from error

    def _refused(self, error: PeerError) -> PeerError:
        """The same error, which the worker has been told, so that it does not come back with what it is about."""
        self.say(Refused(str(error), disagrees=isinstance(error, DisagreementError)))
        return error

    def place_of(self, model: int, block: int) -> int:
        """The place of a block among those that it is given at a time: the lowest goes first.

        Blocks begin with what backward has first: if it has said nothing, the last ones are what the next forward pass
        needs first.
        """
        return self._places.get(model, {}).get(block, -block)

    @property
    def is_well(self) -> bool:
        """Whether it is connected, and was heard lately."""
        link = self.link
        return link.connected and link.silent_s < _QUIET * link.limits.timeout.total_seconds()

    @property
    def is_silent(self) -> bool:
        """Whether it should have said something by now, and has not hung up."""
        link = self.link
        is_due = link.silent_s >= _DUE * link.limits.timeout.total_seconds()
        return (is_due or not link.connected) and not link.has_hung_up

    @property
    def push_mark(self) -> tuple[int, int] | None:
        """A mark that is another with every byte of a push; None if its link is not alive at the moment."""
        link = self.link
        is_alive = link.connected and link.silent_s < link.limits.timeout.total_seconds() / 2
        return (self._pushes, link.missing_bytes) if is_alive else None

    def take_body(self) -> bytearray:
        """Take what came with the message at hand."""
        body, self._details = self._details, bytearray()
        return body

    def _hear(self, metadata: bytes) -> FromWorker | FromShard | ReserveRanks:
        message = from_peer(metadata)
        if type(message) not in SAYS[self.role]:
            raise PeerError(f"{type(message).__name__} is not for {_A[self.role]} to say.")
        return message

    def _take(self, message: FromWorker | FromShard | ReserveRanks) -> None:
        shard = self._shard
        match message:
            case OpenModel(model=model, entry=entry):
                details, self._details = details_of(self._details), bytearray()
                self.open(model, details, entry)
            case InitBlock(model=model, block=block):
                filled, self._filled = self._filled, None
                if filled != block:
                    raise PeerError(f"Rank {self.rank} sends values of block {block} without a body.")
                shard.fill(self, model, block)
            case PushBlock(model=model, clock=clock, block=block, again=again):
                pushed, self._pushed = self._pushed, None
                if pushed is None:
                    raise PeerError(f"Rank {self.rank} sends block {block} without a body.")
                self._check_body(pushed)
                shard.arrive(self, model, (self.rank, clock), block, pushed, again=again)
            case PullOrder(model=model, blocks=blocks):
                self._order_pulls(model, blocks)
            case FetchState(model=model):
                self._check_takes_part(model)
                shard.fetch(self, message)
            case FetchContribution(model=model):
                self._check_takes_part(model)
                shard.fetch_contribution(self, message)
            case PutState(model=model, block=block, name=name, key=key):
                landing, self._landing = self._landing, None
                names = shard.model_shard(model).details.names
                if landing is None or name >= len(names):
                    raise PeerError(f"Rank {self.rank} puts something into block {block} that does not belong there.")
                shard.model_shard(model).put(Portion(block, names[name] if key else "", key, landing))
            case PutStateDone(model=model, number=number):
                self.may_put.discard(model)
                self.say(TransferDone(number))
            case _:
                shard.hear(self, message)

    def _order_pulls(self, model: int, blocks: tuple[int, ...]) -> None:
        self._check_takes_part(model)
        held = self._shard.model_shard(model).blocks
        if len(blocks) != len(held) or set(blocks) != set(held):
            raise PeerError(
                f"Cannot send rank {self.rank} the blocks of model {model} in this order: each of the {len(held)} that "
                "are held here has to be in it, once."
            )
        self._places[model] = {block: place for place, block in enumerate(blocks)}

    def _check_takes_part(self, model: int) -> None:
        if model not in self.models:
            raise PeerError(f"Rank {self.rank} does not take part in model {model}.")

    def _putting_place(self, message: PutState, size_bytes: int) -> memoryview:
        values = self._shard.model_shard(message.model).values(message.block)
        if message.model not in self.may_put:
            raise PeerError(
                f"Cannot take other parameters of model {message.model} from rank {self.rank}: the others do not wait "
                "for them. All load a checkpoint together."
            )
        if message.model not in self.models or (message.key and message.dtype not in STATE_DTYPES):
            raise PeerError(f"Cannot take a state of type {message.dtype!r} from rank {self.rank}.")
        dtype = STATE_DTYPES[message.dtype] if message.key else values.dtype
        if size_bytes % dtype.itemsize or size_bytes > values.numel() * dtype.itemsize:
            raise PeerError(f"Cannot take {size_bytes} bytes of {message.dtype}: the block is smaller.")
        flat = torch.empty(size_bytes // dtype.itemsize, dtype=dtype)
        self._landing = flat[0] if message.single else flat
        return bytes_of(flat)

    def _landing_place(self, message: PushBlock, size_bytes: int) -> memoryview:
        model, block = message.model, message.block
        self._check_takes_part(model)
        model_shard = self._shard.model_shard(model)
        values = model_shard.values(block)
        self._check_turn(message, model_shard)
        try:
            self._pushed = receive(message.payload, values, block, size_bytes, model_shard.reader(block, self.rank))
            if model_shard.expects((self.rank, message.clock), block, again=message.again):
                self._pushes += 1
            return bytes_of(self._pushed.body)
        except PeerError as error:
            raise self._refused(error) from error

    def _check_body(self, pushed: PushedBlock) -> None:
        try:
            pushed.check()
        except PeerError as error:
            raise self._refused(error) from error

    def _check_turn(self, message: PushBlock, model_shard: ModelShard) -> None:
        expected, shard = model_shard.next(self.rank), self._shard
        push, block = (self.rank, message.clock), message.block
        if shard.is_early(self, model_shard.model):
            return
        if model_shard.expects(push, block, again=message.again):
            if not shard.may_push(model_shard.model, push):
                raise PeerError(f"Cannot accept contribution {push[1]} of rank {self.rank}: it has not been granted.")
        elif expected is not None and (shard.coordinates or not model_shard.is_past(push)):
            # To other shards the coordinator's word may be quicker than what the worker had still on its way.
            raise PeerError(
                f"Cannot take block {block} of contribution {push[1]} of rank {self.rank}: what is left of number "
                f"{expected} is next."
            )


class CoordinatorPeer:
    """The receiver of the link to the coordinator.

    Args:
        shard: that follows it.
    """

    def __init__(self, shard: PeerHandler) -> None:
        self._shard = shard

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse: decisions have no body.

        Raises:
            PeerError: always.
        """
        raise PeerError("The coordinator sends a body where none is expected.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A decision is here."""
        if self._shard.is_over:
            return
        self._shard.heard()
        match message := from_coordinator(metadata):
            case BeginLife():
                self._shard.begin(message)
            case SnapshotMark():
                self._shard.mark(message)
            case Refused(reason=reason):
                self._shard.refuse(reason)
            case AdoptPlan():
                self._shard.adopt(message)
            case _:
                self._shard.decide(message)

    def lost(self, error: OffbeatError | None) -> None:
        """The coordinator is gone for good."""
        self._shard.end(error)


def _sized(tensor: torch.Tensor, block: int, size_bytes: int) -> memoryview:
    view = bytes_of(tensor)
    if view.nbytes != size_bytes:
        raise PeerError(f"Cannot take {size_bytes} bytes as block {block}: it has {view.nbytes}.")
    return view
