"""The receiver of one shard's messages, and of the values that come with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.protocol.checkpoints import StatePart
from offbeat.protocol.data_leases import DataState
from offbeat.protocol.loss_scores import FetchedBlock
from offbeat.protocol.messages import statuses_of, to_worker
from offbeat.protocol.status import StatusReply
from offbeat.protocol.training import PullBlock
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from offbeat.protocol.messages import ToWorker
    from offbeat.protocol.status import ModelStatus
    from offbeat.server.client.model_state import ModelState
    from offbeat.server.client.state_transfer import StateTransfers


class ShardListener(Protocol):
    """The handler of messages from a worker's shards."""

    transfers: StateTransfers

    def state(self, model: int) -> ModelState: ...

    def hear(self, shard: int, message: ToWorker) -> None: ...

    def see(self, number: int, model_statuses: tuple[ModelStatus, ...]) -> None: ...

    def lose(self, error: OffbeatError, entry: int) -> None: ...


class ShardReceiver:
    """The receiver of a link to a shard.

    Args:
        client: the worker's.
        shard: which one it is.
        entry: of the worker, to which the link belongs.
    """

    def __init__(self, client: ShardListener, shard: int, entry: int) -> None:
        self._client, self._shard, self._entry = client, shard, entry

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """The memory for a block's values: the parameters themselves, unless they may be being read.

        Raises:
            PeerError: if they are not expected, or of another size.
        """
        message = to_worker(metadata)
        if isinstance(message, StatusReply | DataState):
            return memoryview(bytearray(size_bytes))  # at most what `Limits` allow
        if isinstance(message, StatePart):
            return self._client.transfers.lands(message, size_bytes, self._client.state(message.model))
        if isinstance(message, FetchedBlock):
            return self._client.transfers.lands_block(message, size_bytes, self._client.state(message.model))
        if not isinstance(message, PullBlock):
            raise PeerError(f"{type(message).__name__} has no body.")
        state = self._client.state(message.model)
        if not state.expects(message.block, message.number):
            raise PeerError(f"The server sends block {message.block} of model {message.model}, which was not expected.")
        view = bytes_of(state.landing_place(message.block))
        if view.nbytes != size_bytes:
            raise PeerError(f"The server sends {size_bytes} bytes for a block of {view.nbytes}.")
        return view

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A message is here, whole."""
        message = to_worker(metadata)
        if isinstance(message, StatusReply):
            self._client.see(message.number, statuses_of(body))
        elif isinstance(message, DataState):
            self._client.transfers.stock(message, bytes(body))
        elif isinstance(message, StatePart | FetchedBlock):
            pass  # it is in its place
        else:
            self._client.hear(self._shard, message)

    def lost(self, error: OffbeatError | None) -> None:
        """The shard is gone for good."""
        self._client.lose(error or NetworkError("The parameter server has ended."), self._entry)
