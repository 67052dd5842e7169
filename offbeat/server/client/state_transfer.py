"""Transfers of state between a worker and the shards, for checkpoints; lives on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from offbeat.errors import ModelError, OffbeatError, PeerError
from offbeat.protocol.checkpoints import FetchState, PutState, PutStateDone, RequestReplacement, StatePart
from offbeat.protocol.data_leases import DataState, GetDataState, SetDataState
from offbeat.protocol.messages import pack
from offbeat.server.optimizer_checkpoint import Portion
from offbeat.server.snapshot import STATE_DTYPES
from offbeat.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.server.client.model_state import ModelState
    from offbeat.server.client.requests import ServerRequest
    from offbeat.wire.link import PeerLink


class QueuedTransfer(NamedTuple):
    """A transfer that is to begin, or has begun.

    Args:
        request: who waits for it.
        begin: a method of `StateTransfers`; called with a number, `request` and `arguments`.
    """

    request: ServerRequest
    begin: Callable[..., None]
    arguments: tuple[Any, ...] = ()


class StateUpload(NamedTuple):
    """The state that is put in place of the shards' own.

    Args:
        state: the model's.
        values: [D] of each block.
        portions: the optimizer's state.
    """

    state: ModelState
    values: Sequence[torch.Tensor]
    portions: Sequence[Portion]


class StateTransfers:
    """The transfers that are under way.

    Args:
        links: to all shards, the coordinator's first.
    """

    def __init__(self, links: Sequence[PeerLink]) -> None:
        self._links = links
        self._under_way: dict[int, QueuedTransfer] = {}
        self._count = 0

    def begin(self, due: QueuedTransfer) -> None:
        """Begin a transfer; all shards are there."""
        number, self._count = self._count, self._count + 1
        self._under_way[number] = due
        due.begin(number, due.request, *due.arguments)

    def get_data_state(self, number: int, request: ServerRequest) -> None:
        """Ask where the data is."""
        self._links[0].send(pack(GetDataState(number)))

    def set_data_state(self, number: int, request: ServerRequest, place: bytes) -> None:
        """Have everybody go on in the data at `place`."""
        self._links[0].send(pack(SetDataState(number)), place)

    def fetch(self, number: int, request: ServerRequest, state: ModelState) -> None:
        """Ask all shards for the optimizer's state."""
        request.portions, request.left = [], len(self._links)
        for link in self._links:
            link.send(pack(FetchState(state.model, number)))

    def put(self, number: int, request: ServerRequest, load: StateUpload) -> None:
        """Have the shards take over the optimizer's state and the values of all blocks, once all others wait for it."""
        request.left = len(self._links)
        self._links[0].send(pack(RequestReplacement(load.state.model, number)))

    def may_put(self, number: int, refused: str) -> None:
        """A shard takes what is put from now on; or none does, and why."""
        due = self._under_way.get(number)
        if due is None or due.begin != self.put:
            return
        if refused:
            del self._under_way[number]
            due.request.refused = refused
            due.request.finish()
            return
        due.request.left -= 1
        if not due.request.left:
            self._put_all(number, due.request, *due.arguments)

    def _put_all(self, number: int, request: ServerRequest, load: StateUpload) -> None:
        state, values, portions = load
        request.left = len(self._links)
        for block in state.blocks:
            link = self._links[state.shards[block.index]]
            link.send(pack(PutState(state.model, block.index)), bytes_of(values[block.index]))
        for it in portions:
            tensor = it.tensor.contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            put = PutState(state.model, it.block, state.names[it.name], it.key, dtype, tensor.ndim == 0)
            self._links[state.shards[it.block]].send(pack(put), bytes_of(tensor.reshape(-1)))
        for link in self._links:
            link.send(pack(PutStateDone(state.model, number)))

    def lands(self, message: StatePart, size_bytes: int, state: ModelState) -> memoryview:
        """The memory for a part of the optimizer's state.

        Raises:
            PeerError: if it was not asked for, or cannot be.
        """
        due = self._under_way.get(message.number)
        dtype, names = STATE_DTYPES.get(message.dtype), tuple(state.names)
        if due is None or dtype is None or message.name >= len(names) or message.block >= len(state.blocks):
            raise PeerError("The server sends a state that was not asked for.")
        pieces = {piece.name: piece.numel for piece in state.blocks[message.block].pieces}
        numel = 1 if message.single else pieces.get(names[message.name], 0)
        if size_bytes != numel * dtype.itemsize:
            raise PeerError(f"The server sends {size_bytes} bytes for a state of {numel} elements.")
        flat = torch.empty(numel, dtype=dtype)
        name = names[message.name]
        due.request.portions.append(Portion(message.block, name, message.key, flat[0] if message.single else flat))
        return bytes_of(flat)

    def stock(self, message: DataState, place: bytes) -> None:
        """Handle the state of the data, or why it cannot be there."""
        due = self._under_way.pop(message.number, None)
        if due is not None:
            due.request.place = place
            due.request.finish(ModelError(message.refused) if message.refused else None)

    def done(self, number: int) -> None:
        """A shard is done with it."""
        due = self._under_way.get(number)
        if due is not None:
            due.request.left -= 1
            if not due.request.left:
                del self._under_way[number]
                due.request.finish()

    def interrupt(self) -> list[QueuedTransfer]:
        """The shards are lost, and may come back: what is to begin again then."""
        under_way, self._under_way = self._under_way, {}
        return list(under_way.values())

    def fail(self, error: OffbeatError) -> None:
        """The shards are lost: none comes to its end."""
        for due in self.interrupt():
            due.request.finish(error)
