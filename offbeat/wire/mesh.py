"""A mesh: this process's links with others, one with each, for lanes between them.

The lower rank dials. A mesh is of one generation of a group: who belongs to another has another job's name, and is
refused when it dials. A second link of a rank is refused as long as the first one lives.

Data goes where there is memory for it. An exchange is begun on both sides by what their programs do, and each says so
to those that it has lanes with (`ExchangeBegun`), with its terms: a line that says what it is, which has to be the
same. Blocks of an exchange go to those that have begun it; a few bytes may go before (`EAGER_BYTES`), and wait there in
memory of a bounded size.

    mesh = PeerMesh(rank, job="mnist/0", credentials=Token(secret), limits=Limits(timeout=timedelta(seconds=1)))
    address = await mesh.open("10.0.0.3")               # tell the others
    await mesh.meet({0: "10.0.0.1:4000", ...})          # all of them
    channel = mesh.channel(0)                           # the same number on all
    channel.begin(0, "sum of 10 float32", sinks, lanes, failed)

Whoever has an exchange under way with a lost peer is told. How soon a mesh notices a loss depends on the links'
limits: a peer that hung up, or where nobody listens any more, is lost after a fifth of the timeout. A peer that is
silent is lost after all of it, unless its machine still answers (`keepalive`): then its process is there, though it is
stopped, holds the GIL or has no processor, and whoever waits for it decides for how long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PeerError
from offbeat.protocol.decoding import read_message
from offbeat.wire import tcp
from offbeat.wire.lane import BusyTime, ChannelNumber, LaneBlock, LaneScheduler
from offbeat.wire.lane_inbox import LaneInbox
from offbeat.wire.messages import Number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.lane import LaneKey, OutgoingLane, Sink
    from offbeat.wire.link import PeerLink
    from offbeat.wire.listener import Listener
    from offbeat.wire.session import Limits

EAGER_BYTES = 64 << 10
_MOST_EAGER_BYTES = 256 << 10  # under way to one peer
_MOST_EARLY_BYTES = 2 * _MOST_EAGER_BYTES  # from one peer, whose blocks may turn out smaller than it reckoned with
_BLOCK_COST_BYTES = 512  # of a block that is kept, beside its own
_AHEAD = 4096  # exchanges that a peer may begin before this process does
_MAX_TERMS = 512
_LOOK_S = 0.005


class ExchangeBegun(msgspec.Struct, array_like=True, frozen=True, tag="begun", forbid_unknown_fields=True):
    """The word that an exchange was begun: there is memory for what belongs to it."""

    channel: ChannelNumber
    exchange: Number
    terms: Annotated[str, msgspec.Meta(max_length=_MAX_TERMS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ExchangeBegun | LaneBlock)


class PeerMesh:
    """One process's links with the others; on its event loop only.

    Args:
        rank: of this process.
        job: the name of the group's generation.
        credentials, limits: as of `tcp.listen`.
        on_lost: called with the rank and the error when a link is lost for good.

    Attributes:
        busy: what all links do.
        lost: by rank, why there is no link any more.
        left: those of them that have said good-bye.
    """

    def __init__(
        self,
        rank: int,
        *,
        job: str,
        credentials: Credentials | None,
        limits: Limits,
        on_lost: Callable[[int, OffbeatError], None] = lambda rank, error: None,
    ) -> None:
        self.rank, self._job, self._credentials, self._limits = rank, job, credentials, limits
        self._on_lost = on_lost
        self._peers: dict[int, MeshPeer] = {}
        self._channels: dict[int, MeshChannel] = {}
        self._expected: frozenset[int] | None = None  # ranks; None before it is known who takes part
        self._changed = asyncio.Event()
        self._listener: Listener | None = None
        self._is_closed = False
        self.busy, self.left = BusyTime(), set[int]()
        self.lost: dict[int, OffbeatError] = {}

    async def open(self, bind: str, port: int = 0) -> str:
        """Listen for others; returns the address that they are to be told.

        Raises:
            NetworkError: as `tcp.listen`.
        """
        accept, credentials = self._accept, self._credentials
        self._listener = await tcp.listen(
            bind, port, accept=accept, job=self._job, credentials=credentials, limits=self._limits
        )
        return self._listener.address

    async def meet(self, addresses: Mapping[int, str], patience: timedelta) -> None:
        """Have a link with each of the others.

        Args:
            addresses: by rank, this one's as well.
            patience: for how long the others are waited for.

        Raises:
            NetworkError: if one cannot be reached, or does not come.
            PeerError: if one refuses.
        """
        self._expected = frozenset(addresses) - {self.rank}
        dials = [self._dial(rank, address, patience) for rank, address in addresses.items() if rank > self.rank]
        await asyncio.gather(*dials)
        try:
            async with asyncio.timeout(patience.total_seconds()):
                while lacking := self._expected - self._peers.keys() - self.lost.keys():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            who = ", ".join(map(str, sorted(lacking)))
            raise NetworkError(
                f"Cannot begin: within {patience.total_seconds():g} s no link came from rank {who}. Can it reach "
                f"{self._listener.address if self._listener else 'this machine'}?"
            ) from None
        for rank, peer in self._peers.items():
            peer.link.probe_at(addresses[rank])

    def channel(self, number: int) -> MeshChannel:
        """The exchanges of one user; the same number names it on all."""
        return self._channels.setdefault(number, MeshChannel(self, number))

    def peer(self, rank: int) -> MeshPeer:
        """The link with a rank.

        Raises:
            NetworkError: if it is lost, or there never was one.
        """
        if (found := self._peers.get(rank)) is None:
            raise self.lost.get(rank) or NetworkError(f"Cannot send to rank {rank}: there is no link with it.")
        return found

    @property
    def is_broken(self) -> bool:
        """Whether there is no connection with one of the others just now, on any thread."""
        return bool(self.lost) or any(not peer.link.connected for peer in list(self._peers.values()))

    def silent_s(self, rank: int) -> float:
        """Seconds since a rank was last heard, on any thread; 0 if it is lost."""
        found = self._peers.get(rank)
        return 0.0 if found is None else found.link.silent_s

    def stalled(self) -> dict[int, float]:
        """The ranks that are silent while their machines answer, and for how many seconds they are; on any thread."""
        return {rank: peer.link.silent_s for rank, peer in list(self._peers.items()) if peer.link.is_stalled}

    async def close(self) -> None:
        """Say good-bye to all, once they take part in what this process has, and have received what was sent.

        Waits for both no longer than the timeout.
        """
        deadline_s = asyncio.get_running_loop().time() + self._limits.timeout.total_seconds()
        while any(channel.is_awaited for channel in self._channels.values()):
            if asyncio.get_running_loop().time() > deadline_s:
                break
            await asyncio.sleep(_LOOK_S)
        self._is_closed = True
        await asyncio.gather(*(peer.link.close() for peer in list(self._peers.values())))
        self.abort()

    def abort(self) -> None:
        """End all links at once."""
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()
        for peer in list(self._peers.values()):  # what was said already is still told
            peer.link.flush()
            peer.link.abort()
        for channel in self._channels.values():
            channel.fail_all(NetworkError("Cannot continue an exchange: its links were closed."))

    # -- links ---------------------------------------------------------------------------------------------------

    async def _dial(self, rank: int, address: str, patience: timedelta) -> None:
        await tcp.connect(
            address,
            accept=lambda link: self._take(rank, link),
            job=self._job,
            rank=self.rank,
            credentials=self._credentials,
            limits=self._limits,
            patience=patience,
            role="peer",
        )

    def _accept(self, link: PeerLink) -> MeshPeer:
        rank = link.rank
        if link.role != "peer":
            raise PeerError(f"rank {rank} comes as a {link.role}: here are links between workers alone")
        if rank >= self.rank or (self._expected is not None and rank not in self._expected):
            raise PeerError(f"rank {rank} has no link to open with rank {self.rank}")
        if rank in self._peers:
            raise PeerError(f"rank {rank} is here already")
        return self._take(rank, link)

    def _take(self, rank: int, link: PeerLink) -> MeshPeer:
        self._peers[rank] = peer = MeshPeer(self, rank, link)
        self._changed.set()
        return peer

    def _lose(self, rank: int, error: OffbeatError | None) -> None:
        self._peers.pop(rank, None)
        if self._is_closed:
            return
        kind, reason = (NetworkError, "It has said good-bye.") if error is None else (type(error), str(error))
        why = kind(f"Cannot continue without rank {rank}. {reason}")
        self.lost[rank] = why
        if error is None:
            self.left.add(rank)
        self._changed.set()
        for channel in list(self._channels.values()):
            channel.lose(rank, why, in_order=error is None)
        self._on_lost(rank, why)


class MeshPeer:
    """One other process: the link with it, and what takes in what comes over it. A `Receiver`."""

    def __init__(self, mesh: PeerMesh, rank: int, link: PeerLink) -> None:
        self._mesh, self.rank, self.link = mesh, rank, link
        self.scheduler = LaneScheduler(link, busy=mesh.busy)
        self.eager_bytes = 0  # sent to it before it has begun what they belong to
        self.early_bytes = 0  # that came from it before this process has begun what they belong to
        self._inbox = LaneInbox(self._find)

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """The memory of a block."""
        message = _decode(metadata)
        if isinstance(message, ExchangeBegun):
            raise PeerError("Cannot take in a body with the word that an exchange was begun.")
        return self._inbox.destination(message, size_bytes)

    def received(self, metadata: bytes, body: memoryview) -> None:
        """A block, or word that an exchange was begun."""
        if body:
            self._inbox.received(body)
            return
        message = _decode(metadata)
        if not isinstance(message, ExchangeBegun):
            raise PeerError("Cannot take in a block without a body.")
        self._mesh.channel(message.channel).begun_by(self.rank, message)

    def _find(self, key: LaneKey) -> Sink | None:
        channel = self._mesh.channel(key.channel)
        exchange = channel.find(key.exchange)
        if channel.has_failed(key.exchange):
            return None
        return EarlySink(self, channel, key) if exchange is None else exchange.sink(self.rank, key)

    def lost(self, error: OffbeatError | None) -> None:
        """The link has ended."""
        self._mesh._lose(self.rank, error)


class EarlySink:
    """Blocks of an exchange that was not begun here yet: they wait in memory of a bounded size."""

    is_whole = False

    def __init__(self, peer: MeshPeer, channel: MeshChannel, key: LaneKey) -> None:
        self._peer, self._channel, self._key, self.generation = peer, channel, key, key.generation

    def destination(self, offset: int, size: int) -> memoryview:
        peer = self._peer
        peer.early_bytes += size + _BLOCK_COST_BYTES
        if peer.early_bytes > _MOST_EARLY_BYTES:
            raise PeerError(
                f"Cannot keep more than {_MOST_EARLY_BYTES} bytes of exchanges that were not begun here, of which "
                f"each block counts {_BLOCK_COST_BYTES} beside its own."
            )
        return memoryview(bytearray(size))

    def received(self, offset: int, body: memoryview) -> None:
        self._channel.keep_early(self._peer, self._key, offset, body)


@dataclass(eq=False)
class MeshExchange:
    """One exchange under way on this process.

    Args:
        terms: what it is; all have to say the same.
        sinks: by rank and lane, what takes in what comes.
        lanes: what goes out, by rank.
        failed: called once, with why it will not end.
        later: ranks that more lanes go to later (`MeshChannel.send`).
    """

    terms: str
    sinks: Mapping[tuple[int, int], Sink]
    lanes: Sequence[tuple[int, OutgoingLane]]
    failed: Callable[[OffbeatError], None]
    later: frozenset[int] = frozenset()
    waiting: dict[int, list[OutgoingLane]] = field(default_factory=dict)

    @property
    def ranks(self) -> set[int]:
        """The others that take part."""
        return {rank for rank, _ in self.sinks} | {rank for rank, _ in self.lanes} | self.later

    def sink(self, rank: int, key: LaneKey) -> Sink:
        """Find what takes in a lane.

        Raises:
            PeerError: if there is no such lane.
        """
        found = self.sinks.get((rank, key.op))
        if found is None:
            raise PeerError(f"Cannot take in lane {key.op} of exchange {key.exchange} ({self.terms}): there is none.")
        return found


class MeshChannel:
    """The exchanges of one user of a mesh, by number."""

    def __init__(self, mesh: PeerMesh, number: int) -> None:
        self._mesh, self.number = mesh, number
        self._exchanges: dict[int, MeshExchange] = {}
        self._begun: dict[int, dict[int, str]] = {}  # by exchange and rank, the terms
        self._early: dict[int, list[tuple[MeshPeer, LaneKey, int, memoryview]]] = {}
        self._eager: dict[tuple[int, int], int] = {}  # by exchange and rank, bytes sent before it has begun that
        self._lagging: dict[int, set[int]] = {}  # by exchange, ranks that take part and have not begun it
        self._failed: set[int] = set()
        self._next = 0  # exchanges below this were begun here

    def find(self, exchange: int) -> MeshExchange | None:
        """An exchange that was begun here; None if it was not yet, or has failed.

        Raises:
            PeerError: if it is over.
        """
        found = self._exchanges.get(exchange)
        if found is None and exchange < self._next and exchange not in self._failed:
            raise PeerError(f"Cannot take in a block of exchange {exchange}: it is over.")
        return found

    def has_failed(self, exchange: int) -> bool:
        """Whether it failed here, which others that are well may not know yet."""
        return exchange in self._failed

    def begin(self, number: int, exchange: MeshExchange) -> None:
        """Take part in an exchange, whose number is one more than the last.

        Lanes whose other end has begun it go at once, and small ones; the others when they hear of it.
        """
        mesh = self._mesh
        if (gone := next((rank for rank in sorted(exchange.ranks) if rank in mesh.lost), None)) is not None:
            self._next = number + 1
            self._fail(number, exchange, mesh.lost[gone])
            return
        self._exchanges[number], self._next = exchange, number + 1
        word = _encoder.encode(ExchangeBegun(self.number, number, exchange.terms))
        begun = self._begun.setdefault(number, {})
        if lagging := exchange.ranks - begun.keys():
            self._lagging[number] = lagging
        try:
            for rank in sorted(exchange.ranks):
                mesh.peer(rank).link.send(word)
            if (wrong := next((rank for rank in sorted(begun) if begun[rank] != exchange.terms), None)) is not None:
                raise _unlike(number, exchange.terms, wrong, begun[wrong])
            for rank, lane in exchange.lanes:
                exchange.waiting.setdefault(rank, []).append(lane)
            for rank, lanes in list(exchange.waiting.items()):
                if rank in begun or self._may_be_eager(number, rank, lanes):
                    self._release(rank, exchange)
            for peer, key, offset, body in self._early.pop(number, ()):
                peer.early_bytes -= len(body) + _BLOCK_COST_BYTES
                sink = exchange.sink(peer.rank, key)
                sink.destination(offset, len(body))[:] = body
                sink.received(offset, body)
        except OffbeatError as error:
            self._fail(number, exchange, error)

    def send(self, number: int, rank: int, lane: OutgoingLane) -> None:
        """Send one more lane of an exchange that was begun."""
        exchange = self._exchanges.get(number)
        if exchange is None:  # it has failed
            return
        if rank in self._begun.get(number, ()):
            self._mesh.peer(rank).scheduler.add(lane)
        else:
            exchange.waiting.setdefault(rank, []).append(lane)

    def end(self, number: int) -> None:
        """An exchange is over for this process."""
        self._exchanges.pop(number, None)
        self._begun.pop(number, None)

    def begun_by(self, rank: int, message: ExchangeBegun) -> None:
        """Another has begun an exchange."""
        number = message.exchange
        if number >= self._next + _AHEAD:
            raise PeerError(f"Cannot follow: exchange {number} was begun, and {self._next} is next here.")
        exchange = self._exchanges.get(number)
        self._has_begun(number, rank)
        self._mesh.peer(rank).eager_bytes -= self._eager.pop((number, rank), 0)
        if exchange is None and number < self._next:
            return
        self._begun.setdefault(number, {})[rank] = message.terms
        if exchange is not None:
            if message.terms != exchange.terms:
                self._fail(number, exchange, _unlike(number, exchange.terms, rank, message.terms))
                return
            self._release(rank, exchange)

    def keep_early(self, peer: MeshPeer, key: LaneKey, offset: int, body: memoryview) -> None:
        """Keep a block until its exchange is begun here."""
        if key.exchange < self._next:  # it was, while the block was being received
            exchange = self._exchanges.get(key.exchange)
            peer.early_bytes -= len(body) + _BLOCK_COST_BYTES
            if exchange is not None:
                sink = exchange.sink(peer.rank, key)
                sink.destination(offset, len(body))[:] = body
                sink.received(offset, body)
            return
        self._early.setdefault(key.exchange, []).append((peer, key, offset, body))

    def lose(self, rank: int, error: OffbeatError, *, in_order: bool = False) -> None:
        """A peer is lost: fail what it takes part in.

        Args:
            in_order: it has said good-bye, and so has all that it needs: what has come from it is enough.
        """
        for number in list(self._lagging):
            self._has_begun(number, rank)
        for number, exchange in list(self._exchanges.items()):
            needs = [sink for (other, _), sink in exchange.sinks.items() if other == rank and not sink.is_whole]
            if needs if in_order else rank in exchange.ranks:
                self._fail(number, exchange, error)

    @property
    def is_awaited(self) -> bool:
        """Whether others have yet to begin what was begun here, and need this process for it."""
        return bool(self._lagging)

    def _has_begun(self, number: int, rank: int) -> None:
        lagging = self._lagging.get(number, set())
        lagging.discard(rank)
        if not lagging:
            self._lagging.pop(number, None)

    def fail_all(self, error: OffbeatError) -> None:
        """Fail what is under way."""
        for number, exchange in list(self._exchanges.items()):
            self._fail(number, exchange, error)

    def _fail(self, number: int, exchange: MeshExchange, error: OffbeatError) -> None:
        self._exchanges.pop(number, None)
        self._lagging.pop(number, None)
        self._failed.add(number)
        exchange.failed(error)

    def _may_be_eager(self, number: int, rank: int, lanes: Sequence[OutgoingLane]) -> bool:
        size, peer = sum(len(lane.source.memory) for lane in lanes), self._mesh.peer(rank)
        cost = size + _BLOCK_COST_BYTES * sum(lane.most_blocks for lane in lanes)
        if size > EAGER_BYTES or peer.eager_bytes + cost > _MOST_EAGER_BYTES:
            return False
        peer.eager_bytes += cost
        self._eager[number, rank] = cost
        return True

    def _release(self, rank: int, exchange: MeshExchange) -> None:
        scheduler = self._mesh.peer(rank).scheduler
        for lane in exchange.waiting.pop(rank, ()):
            scheduler.add(lane)


def _unlike(number: int, mine: str, rank: int, theirs: str) -> DisagreementError:
    return DisagreementError(
        f"Cannot carry out exchange {number}: this worker calls {mine}, and rank {rank} calls {theirs}. All workers "
        "have to call the same, in the same order."
    )


def _decode(metadata: bytes) -> ExchangeBegun | LaneBlock:
    message: ExchangeBegun | LaneBlock = read_message(_decoder.decode, metadata, "this peer")
    return message
