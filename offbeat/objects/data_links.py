"""The links between stores on which objects travel: the one that reads dials the one that feeds it.

So a store that loses its feeder knows it first, and it is the one that has to look for another. A store has one link to
each feeder, for whatever it reads there, and each store that reads from it has one to this store.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import msgspec

from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.protocol.decoding import read_message
from offbeat.protocol.object_lanes import (
    AllowBytes,
    CannotRead,
    FromReader,
    ReaderHello,
    ReadObject,
    ReadStage,
    StopReading,
    from_feeder_of,
    from_reader_of,
    pack_lane_message,
)
from offbeat.wire import tcp
from offbeat.wire.lane import LaneBlock, LaneKey, LaneScheduler, OutgoingLane
from offbeat.wire.lane_inbox import LaneInbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.lane import GrowingBuffer, Sink
    from offbeat.wire.link import PeerLink
    from offbeat.wire.session import Limits

_MAX_PARKED = 1024  # on one link
_block = msgspec.msgpack.Decoder(LaneBlock).decode


class FeederLink:
    """The link to one feeder; a `Receiver`. Reads that are asked for before it is there begin with it.

    Args:
        address: of the feeder.
        own_address: of the store that reads.
        on_lost: called once when it is lost.

    Attributes:
        received_bytes: of objects, also those that were not wanted any more.
        waits_for_stopped: whether a silent feeder is waited for while its machine says that its process is there.
    """

    waits_for_stopped = False

    def __init__(self, address: str, own_address: str, on_lost: Callable[[], None]) -> None:
        self.address, self._on_lost = address, on_lost
        self.link: PeerLink | None = None
        self._unsent: list[FromReader] = [ReaderHello(own_address)]
        self._lanes = itertools.count()
        self._reads: dict[int, tuple[Sink, Callable[[str], None]]] = {}
        self._stopped: set[int] = set()
        self._inbox, self._receiving = LaneInbox(self._find), -1
        self.received_bytes = 0
        self._is_over = False

    async def dial(self, *, job: str, credentials: Credentials | None, limits: Limits, patience: timedelta) -> None:
        """Reach the feeder; if nobody can, everything that was asked for fails."""
        try:
            link = await tcp.connect(
                self.address,
                accept=lambda _: self,
                job=job,
                rank=0,
                credentials=credentials,
                limits=limits,
                patience=patience,
                role="peer",
            )
        except OffbeatError as error:
            self.lost(error)
            return
        self.link = link
        if self.waits_for_stopped:
            link.probe_at(self.address)
        for message in self._unsent:
            self._say(message)
        self._unsent.clear()

    def read(self, ask: Callable[[int], ReadObject | ReadStage], sink: Sink, failed: Callable[[str], None]) -> int:
        """Read something into a sink; returns the number of the lane.

        Args:
            ask: makes the request of that number.
            failed: called at most once, if it cannot be had here.
        """
        lane = next(self._lanes)
        self._reads[lane] = sink, failed
        self._say(ask(lane))
        return lane

    def allow(self, lane: int, until: int) -> None:
        """Allow so many bytes of a lane to be sent."""
        if lane in self._reads:
            self._say(AllowBytes(lane=lane, until=until))

    def stop(self, lane: int) -> None:
        """No more is wanted on a lane; what is on its way is thrown away, also a block that is here in part."""
        if (found := self._reads.pop(lane, None)) is not None:
            if self._inbox.drop(found[0]) and self.link is not None:
                self.link.release_body()
            self._stopped.add(lane)
            self._say(StopReading(lane=lane))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is read."""
        return not self._reads

    async def close(self) -> None:
        """Say good-bye."""
        self._is_over = True
        if self.link is not None:
            await self.link.close()

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """The memory of a block."""
        return self._inbox.destination(read_message(_block, metadata, "this feeder of objects"), size_bytes)

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A block, or word that something is not there."""
        if body:
            self.received_bytes += len(body)
            self._inbox.received(body)
            found = self._reads.get(self._receiving)
            if found is not None and found[0].is_whole:
                del self._reads[self._receiving]
            return
        message = from_feeder_of(metadata)
        if (found := self._reads.pop(message.lane, None)) is not None:
            found[1](message.reason)

    def lost(self, error: OffbeatError | None) -> None:
        """The link has ended."""
        if self._is_over:
            return
        self._is_over, self.link = True, None
        reads, self._reads = self._reads, {}
        self._on_lost()
        for _, failed in reads.values():
            failed(str(error or NetworkError(f"The store at {self.address} has said good-bye.")))

    def _find(self, key: LaneKey) -> Sink | None:
        self._receiving = key.exchange
        if (found := self._reads.get(key.exchange)) is not None:
            return found[0]
        if key.exchange in self._stopped:
            return None
        raise PeerError(f"Cannot take in a block of lane {key.exchange}: nothing is read on it.")

    def _say(self, message: FromReader) -> None:
        if self.link is None:
            self._unsent.append(message)
        else:
            self.link.send(pack_lane_message(message))


class SourceOwner(Protocol):
    """The Protocol of the store behind a `ReaderLink`."""

    def source_of(self, message: ReadObject | ReadStage) -> GrowingBuffer | str | None:
        """The bytes that are asked for; why there are none; or None if they may still come to be here."""

    def reader_left(self, link: ReaderLink) -> None:
        """A reader is gone."""


class ReaderLink:
    """The link with one store that reads here; a `Receiver`."""

    def __init__(self, owner: SourceOwner, link: PeerLink) -> None:
        self._owner, self.link = owner, link
        self._scheduler = LaneScheduler(link)
        self._lanes: dict[int, OutgoingLane] = {}
        self._asked: dict[int, ReadObject | ReadStage] = {}  # by lane
        self._seen_bytes, self._was_full = 0, False
        self.address = ""
        self._parked: dict[int, ReadObject | ReadStage] = {}

    @property
    def sent_bytes(self) -> int:
        """The bytes of objects that were sent on it."""
        return self._scheduler.sent_bytes

    def full_bytes(self) -> int:
        """The bytes since the last call, if there was always more to send; else 0."""
        before, self._seen_bytes = self._seen_bytes, self._scheduler.arrived_bytes
        was_full, self._was_full = self._was_full, self._scheduler.is_full
        return self._seen_bytes - before if was_full and self._was_full else 0

    @property
    def sending(self) -> list[ReadObject | ReadStage]:
        """Return the requests that are being answered."""
        return [self._asked[number] for number in self._lanes]

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse bodies: a reader sends none."""
        raise PeerError("Cannot take in a body from a store that reads.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Do what the reader says."""
        message = from_reader_of(metadata)
        if isinstance(message, ReaderHello):
            self.address = message.address
        elif isinstance(message, (ReadObject, ReadStage)):
            self._begin(message)
        elif isinstance(message, AllowBytes):
            if message.lane in self._parked:
                parked = self._parked[message.lane]
                self._parked[message.lane] = msgspec.structs.replace(parked, until=max(parked.until, message.until))
            elif (lane := self._lanes.get(message.lane)) is not None:
                self._scheduler.allow(lane, min(message.until, len(lane.source.memory)))
        else:
            self.stop(message.lane)

    def retry(self) -> None:
        """Look again for the objects that were asked for and were not here."""
        for message in list(self._parked.values()):
            del self._parked[message.lane]
            self._begin(message)

    def end_lanes_of(self, source: GrowingBuffer, reason: str) -> bool:
        """End the lanes that send from a buffer, for this reason.

        Returns:
            Whether there was one, so that its memory may still be on its way.
        """
        ended = [number for number, lane in self._lanes.items() if lane.source is source]
        for number in ended:
            self.stop(number)
            self.link.send(pack_lane_message(CannotRead(lane=number, reason=reason)))
        return bool(ended)

    def stop(self, number: int) -> None:
        """Send no more on a lane."""
        self._parked.pop(number, None)
        self._asked.pop(number, None)
        if (lane := self._lanes.pop(number, None)) is not None:
            self._scheduler.cancel(lane)

    def lost(self, error: OffbeatError | None) -> None:
        """The link has ended."""
        for number in list(self._lanes):
            self.stop(number)
        self._owner.reader_left(self)

    def _sent(self, number: int) -> None:
        self._lanes.pop(number, None)
        self._asked.pop(number, None)

    def _begin(self, message: ReadObject | ReadStage) -> None:
        number = message.lane
        if number in self._lanes or number in self._parked:
            raise PeerError(f"Cannot begin lane {number}: it has begun already.")
        source = self._owner.source_of(message)
        if source is None:
            if len(self._parked) >= _MAX_PARKED:
                raise PeerError(f"Cannot wait for more than {_MAX_PARKED} objects of one reader.")
            self._parked[number] = message
        elif isinstance(source, str):
            self.link.send(pack_lane_message(CannotRead(lane=number, reason=source)))
        elif not 0 <= message.start <= len(source.memory):
            raise PeerError(f"Cannot send from byte {message.start} of {len(source.memory)}.")
        else:
            key = LaneKey(0, number, 0, source.generation)
            lane = OutgoingLane(
                key,
                source,
                (0,),
                start=message.start,
                until=min(message.until, len(source.memory)),
                sent=lambda: self._sent(number),
            )
            self._lanes[number], self._asked[number] = lane, message
            self._scheduler.add(lane)
