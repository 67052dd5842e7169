"""Transfers between a worker and the shards: of state, for checkpoints, and of contributions to a validator; lives on
the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offbeat.errors import ModelError, OffbeatError, PeerError
from offbeat.protocol.checkpoints import FetchState, PutState, PutStateDone, RequestReplacement, StatePart
from offbeat.protocol.data_leases import DataState, GetDataState, SetDataState
from offbeat.protocol.loss_scores import FetchContribution
from offbeat.protocol.messages import pack
from offbeat.server.client.requests import ServerRequest
from offbeat.server.optimizer_checkpoint import Portion
from offbeat.server.snapshot import STATE_DTYPES
from offbeat.tensors import bytes_of, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.protocol.loss_scores import FetchedBlock
    from offbeat.server.client.model_state import ModelState
    from offbeat.server.client.requests import EndOfTraining
    from offbeat.sync import Push
    from offbeat.wire.link import PeerLink


@dataclass(eq=False)
class StateFetch:
    """The optimizer's state, out of all shards.

    Args:
        state: the model's.
        left: shards that have not sent all they have.
        portions: that have come.
    """

    state: ModelState
    request: ServerRequest[list[Portion]] = field(default_factory=ServerRequest)
    left: int = 0
    portions: list[Portion] = field(default_factory=list)


@dataclass(eq=False)
class StateUpload:
    """The state that is put in place of the shards' own.

    Args:
        state: the model's.
        values: [D] of each block.
        portions: the optimizer's state.
        request: why it was not put; "" if it was.
        left: shards that have not said yet that it may be put; then, that have not taken it.
    """

    state: ModelState
    values: Sequence[torch.Tensor]
    portions: Sequence[Portion]
    request: ServerRequest[str] = field(default_factory=ServerRequest)
    left: int = 0


@dataclass(eq=False)
class DataStateFetch:
    """The state of the data, out of the coordinator."""

    request: ServerRequest[bytes] = field(default_factory=ServerRequest)


@dataclass(eq=False)
class DataStateUpload:
    """The state of the data, in place of what the coordinator has.

    Args:
        data_state: as a `DataStateFetch` has it.
    """

    data_state: bytes
    request: ServerRequest[None] = field(default_factory=ServerRequest)


@dataclass(eq=False)
class ContributionFetch:
    """A contribution to an update that waits to be judged, out of all shards that hold blocks.

    Args:
        state: the model's.
        version: of the update.
        push: the contribution; None for the parameters before the update.
        landing: [D] of each block, where it is to be.
        request: whether all of it has come; it does not once the update is judged.
        left: shards that have not sent all they have.
        came: blocks that have come, or are coming.
    """

    state: ModelState
    version: int
    push: Push | None
    landing: Sequence[torch.Tensor]
    request: ServerRequest[bool] = field(default_factory=ServerRequest)
    left: int = 0
    came: set[int] = field(default_factory=set)


StateTransfer = ContributionFetch | StateFetch | StateUpload | DataStateFetch | DataStateUpload


class StateTransfers:
    """The transfers of one worker: those that are under way, and those that are to begin.

    Args:
        links: to all shards, the coordinator's first.
    """

    def __init__(self, links: Sequence[PeerLink]) -> None:
        self._links = links
        self._due: list[StateTransfer] = []
        self._under_way: dict[int, StateTransfer] = {}
        self._count = 0

    def add(self, transfer: StateTransfer) -> None:
        """Have one more to begin."""
        self._due.append(transfer)

    def begin_due(self) -> None:
        """Begin what is due: all shards are there, and know this worker."""
        due, self._due = self._due, []
        for transfer in due:
            self._begin(transfer)

    def _begin(self, transfer: StateTransfer) -> None:
        number, self._count = self._count, self._count + 1
        self._under_way[number] = transfer
        match transfer:
            case DataStateFetch():
                self._links[0].send(pack(GetDataState(number)))
            case DataStateUpload(data_state=data_state):
                self._links[0].send(pack(SetDataState(number)), data_state)
            case StateFetch(state=state):
                transfer.portions, transfer.left = [], len(self._links)
                for link in self._links:
                    link.send(pack(FetchState(state.model, number)))
            case ContributionFetch(state=state, version=version, push=push):
                holders = sorted(set(state.shards))
                transfer.came, transfer.left = set(), len(holders)
                for shard in holders:
                    self._links[shard].send(pack(FetchContribution(state.model, number, version, push)))
            case StateUpload(state=state):  # once all others wait for it
                transfer.left = len(self._links)
                self._links[0].send(pack(RequestReplacement(state.model, number)))

    def may_put(self, number: int, refused: str) -> None:
        """A shard takes what is put from now on; or none does, and why."""
        transfer = self._under_way.get(number)
        if not isinstance(transfer, StateUpload):
            return
        if refused:
            del self._under_way[number]
            transfer.request.finish(refused)
            return
        transfer.left -= 1
        if not transfer.left:
            self._put_all(number, transfer)

    def _put_all(self, number: int, upload: StateUpload) -> None:
        state, values = upload.state, upload.values
        upload.left = len(self._links)
        for block in state.blocks:
            link = self._links[state.shards[block.index]]
            link.send(pack(PutState(state.model, block.index)), bytes_of(values[block.index]))
        for it in upload.portions:
            tensor = it.tensor.contiguous()
            dtype = dtype_name(tensor.dtype)
            put = PutState(state.model, it.block, state.names[it.name], it.key, dtype, tensor.ndim == 0)
            self._links[state.shards[it.block]].send(pack(put), bytes_of(tensor.reshape(-1)))
        for link in self._links:
            link.send(pack(PutStateDone(state.model, number)))

    def lands(self, message: StatePart, size_bytes: int, state: ModelState) -> memoryview:
        """The memory for a part of the optimizer's state.

        Raises:
            PeerError: if it was not asked for, or cannot be.
        """
        transfer = self._under_way.get(message.number)
        dtype, names = STATE_DTYPES.get(message.dtype), tuple(state.names)
        is_known = message.name < len(names) and message.block < len(state.blocks)
        if not isinstance(transfer, StateFetch) or dtype is None or not is_known:
            raise PeerError("The server sends a state that was not asked for.")
        pieces = {piece.name: piece.numel for piece in state.blocks[message.block].pieces}
        numel = 1 if message.single else pieces.get(names[message.name], 0)
        if size_bytes != numel * dtype.itemsize:
            raise PeerError(f"The server sends {size_bytes} bytes for a state of {numel} elements.")
        flat = torch.empty(numel, dtype=dtype)
        name = names[message.name]
        transfer.portions.append(Portion(message.block, name, message.key, flat[0] if message.single else flat))
        return bytes_of(flat)

    def lands_block(self, message: FetchedBlock, size_bytes: int, state: ModelState) -> memoryview:
        """The memory for a block of a contribution.

        Raises:
            PeerError: if it was not asked for, or cannot be.
        """
        transfer, block = self._under_way.get(message.number), message.block
        is_known = block < len(state.blocks) and isinstance(transfer, ContributionFetch) and block not in transfer.came
        if not isinstance(transfer, ContributionFetch) or transfer.state is not state or not is_known:
            raise PeerError("The server sends a contribution that was not asked for.")
        view = bytes_of(transfer.landing[block])
        if view.nbytes != size_bytes:
            raise PeerError(f"The server sends {size_bytes} bytes of a contribution to a block of {view.nbytes}.")
        transfer.came.add(block)
        return view

    def stock(self, message: DataState, data_state: bytes) -> None:
        """Handle the state of the data, or why it cannot be there."""
        transfer = self._under_way.get(message.number)
        if not isinstance(transfer, DataStateFetch | DataStateUpload):
            return
        del self._under_way[message.number]
        if message.refused:
            transfer.request.fail(ModelError(message.refused))
        elif isinstance(transfer, DataStateFetch):
            transfer.request.finish(data_state)
        else:
            transfer.request.finish(None)

    def done(self, number: int) -> None:
        """A shard is done with it."""
        transfer = self._under_way.get(number)
        if not isinstance(transfer, StateFetch | StateUpload | ContributionFetch):
            return
        transfer.left -= 1
        if transfer.left:
            return
        del self._under_way[number]
        if isinstance(transfer, StateFetch):
            transfer.request.finish(transfer.portions)
        elif isinstance(transfer, ContributionFetch):
            transfer.request.finish(len(transfer.came) == len(transfer.state.blocks))
        else:
            transfer.request.finish("")

    def stranded(self) -> None:
        """Handle the loss of all links: what was under way is to begin again."""
        under_way, self._under_way = self._under_way, {}
        self._due += under_way.values()

    def fail(self, error: OffbeatError | EndOfTraining) -> None:
        """Fail all transfers: none comes to its end."""
        self.stranded()
        for transfer in self._due:
            transfer.request.fail(error)
