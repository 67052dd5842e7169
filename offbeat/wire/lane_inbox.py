"""The receiving side of a link's lanes: which sink takes in the block that comes.

Of a lane that is made anew, blocks of the attempt before may still be on their way: they are thrown away. A block of an
attempt that this side does not know yet ends the link, since whoever sends it did not wait for word of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PeerError
from offbeat.wire.lane import LaneKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.wire.lane import LaneBlock, Sink


class LaneInbox:
    """The sinks of a link's lanes. Call order for each block: `destination`, `received`.

    Args:
        find: finds the sink of a lane; None if its blocks are thrown away. It raises a `PeerError` if there is no such
            lane.
    """

    def __init__(self, find: Callable[[LaneKey], Sink | None]) -> None:
        self._find = find
        self._taken: tuple[Sink, int] | None = None  # the sink, and the offset, of the body that is being received

    def destination(self, block: LaneBlock, size_bytes: int) -> memoryview:
        """The memory of a block.

        Raises:
            PeerError: if there is no such lane, it is of a later generation, or the block is not its next one.
        """
        key = LaneKey(block.channel, block.exchange, block.op, block.generation)
        sink = self._find(key)
        if sink is not None and key.generation > sink.generation:
            raise PeerError(f"Cannot take in a block of {key}: generation {sink.generation} is what comes here.")
        if sink is None or key.generation < sink.generation:
            self._taken = None
            return memoryview(bytearray(size_bytes))
        self._taken = sink, block.offset
        return sink.destination(block.offset, size_bytes)

    def drop(self, sink: Sink) -> bool:
        """Throw the block away that is being received, if it is for this sink; returns whether it is."""
        is_its = self._taken is not None and self._taken[0] is sink
        if is_its:
            self._taken = None
        return is_its

    def received(self, body: memoryview) -> None:
        """The block is there."""
        taken, self._taken = self._taken, None
        if taken is not None:
            sink, offset = taken
            sink.received(offset, body)
