"""What a worker fetches from the shards and puts there, for checkpoints; lives on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.errors import ModelError, NetworkError, OffbeatError, PeerError
from offbeat.fabric.server.checkpoint import Portion
from offbeat.fabric.server.deals import Books, Restock, Stock
from offbeat.fabric.server.memory import bytes_of
from offbeat.fabric.server.messages import Fetch, Piece, Put, PutAll, pack
from offbeat.fabric.server.snapshot import STATE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.fabric.server.exchange import Exchange
    from offbeat.fabric.server.place import Place
    from offbeat.wire.link import Link


class Transfers:
    """Those that are under way.

    Args:
        links: to all shards, the coordinator's first; empty while there are none.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._under_way: dict[int, Exchange] = {}
        self._count = 0

    def books(self, exchange: Exchange, place: bytes | None) -> None:
        """Ask where the data is; or, with a `place`, have everybody go on there."""
        number = self._begin(exchange, shards=1)
        for link in self._links[:1]:
            if place is None:
                link.send(pack(Books(number)))
            else:
                link.send(pack(Restock(number)), place)

    def fetch(self, place: Place, exchange: Exchange) -> None:
        """Ask all shards for the optimizer's state."""
        number = self._begin(exchange, shards=len(self._links))
        for link in self._links:
            link.send(pack(Fetch(place.model, number)))

    def put(self, place: Place, portions: Sequence[Portion], exchange: Exchange) -> None:
        """Have the shards take over the optimizer's state and the values of all blocks."""
        number = self._begin(exchange, shards=len(self._links))
        for block in place.blocks if self._links else ():
            link = self._links[place.shards[block.index]]
            link.send(pack(Put(place.model, block.index)), bytes_of(place.values[block.index]))
        for it in portions if self._links else ():
            tensor = it.tensor.contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            put = Put(place.model, it.block, place.names[it.name], it.key, dtype, tensor.ndim == 0)
            self._links[place.shards[it.block]].send(pack(put), bytes_of(tensor.reshape(-1)))
        for link in self._links:
            link.send(pack(PutAll(place.model, number)))

    def lands(self, message: Piece, size_bytes: int, place: Place) -> memoryview:
        """Where a part of the optimizer's state goes.

        Raises:
            PeerError: if it was not asked for, or cannot be.
        """
        transfer = self._under_way.get(message.number)
        dtype, names = STATE_DTYPES.get(message.dtype), tuple(place.names)
        if transfer is None or dtype is None or message.name >= len(names) or message.block >= len(place.blocks):
            raise PeerError("The server sends a state that was not asked for.")
        pieces = {piece.name: piece.numel for piece in place.blocks[message.block].pieces}
        numel = 1 if message.single else pieces.get(names[message.name], 0)
        if size_bytes != numel * dtype.itemsize:
            raise PeerError(f"The server sends {size_bytes} bytes for a state of {numel} elements.")
        flat = torch.empty(numel, dtype=dtype)
        name = names[message.name]
        transfer.portions.append(Portion(message.block, name, message.key, flat[0] if message.single else flat))
        return bytes_of(flat)

    def stock(self, message: Stock, place: bytes) -> None:
        """Where the data is, or why it cannot be there."""
        transfer = self._under_way.pop(message.number, None)
        if transfer is not None:
            transfer.place = place
            transfer.finish(ModelError(message.refused) if message.refused else None)

    def done(self, number: int) -> None:
        """A shard is done with it."""
        transfer = self._under_way.get(number)
        if transfer is not None:
            transfer.left -= 1
            if not transfer.left:
                del self._under_way[number]
                transfer.finish()

    def fail(self, error: OffbeatError) -> None:
        """The shards are lost: none comes to its end."""
        under_way, self._under_way = self._under_way, {}
        for transfer in under_way.values():
            transfer.finish(error)

    def _begin(self, exchange: Exchange, *, shards: int) -> int:
        number, self._count = self._count, self._count + 1
        self._under_way[number] = exchange
        exchange.left = shards
        if not self._links:
            exchange.finish(
                NetworkError("Cannot reach the parameter server now: it is being started again. Try again.")
            )
        return number
