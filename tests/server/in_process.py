"""Shards and their workers in one process: links that hand frames over at once, on one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.errors import NetworkError, OffbeatError, PeerError, PlanError
from offbeat.server.client.client import Client
from offbeat.server.shard.shard import Shard
from offbeat.server.shard.shard_parts import ShardParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.batching import BatchTuning, Keeps
    from offbeat.history import Record
    from offbeat.robust import Rule, TooFew
    from offbeat.sync import Policy


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class End:
    """One end of a link; what it sends is copied and handed over when the loop comes to it."""

    def __init__(self, loop: Loop, rank: int) -> None:
        self._loop, self.rank, self.peer = loop, rank, f"rank {rank}"
        self.role, self.connected, self.is_trusted = "worker", True, False
        self.receiver: Any = None
        self.other: End
        self.open = True
        self.frames = 0
        self.took: Counter[str] = Counter()  # messages, by kind

    @property
    def is_open(self) -> bool:
        return True  # also when it is just being lost: what is sent then is lost with it

    def send(self, metadata: bytes, body: Any = b"", sent: Callable[[], None] = lambda: None) -> None:
        self._loop.loop.call_soon(self.other.take, metadata, bytes(body), sent)

    def take(self, metadata: bytes, body: bytes, sent: Callable[[], None]) -> None:
        if not self.open:
            return
        self.frames += 1
        sent()
        self.took[kind_of(metadata)] += 1
        try:
            landing = memoryview(b"")
            if body:
                landing = self.receiver.destination(metadata, len(body))
                landing[:] = body
            self.receiver.received(metadata, landing)
        except PeerError as error:
            self.cut(error)

    async def close(self) -> None:
        self.cut(None)

    def abort(self) -> None:
        self.open = False
        if self.other.open:
            self.other.cut(NetworkError("It hung up."))

    def cut(self, error: OffbeatError | None) -> None:
        for end in (self, self.other):
            if end.open:
                end.open = False
                self._loop.loop.call_soon(end.receiver.lost, error)


def kind_of(metadata: bytes) -> str:
    kind: str = msgspec.msgpack.decode(metadata)["type"]
    return kind


@dataclass(frozen=True)
class Parts:
    """What a coordinator wants to know of a plan."""

    sync: Policy
    tuning: BatchTuning | None = None
    keeps: Keeps = "local_batch"
    is_served = True
    is_tabled = False
    has_elastic_group = False

    @property
    def digest(self) -> str:
        return repr(self)

    def to_toml(self) -> str:
        return ""

    controller = None
    judging_rule = None
    too_few: TooFew = "skip"

    def controlled(self, sync: Policy) -> Parts:
        raise AssertionError("There is no controller.")

    def swapped(self, part: str, *, whole: bool = False) -> Parts:
        raise PlanError(f"Cannot swap {self.sync!r} for {part!r} here.")

    def check_world(self, world: int) -> None:
        """Any number will do."""


class Together:
    """A shard and a client for each of `world` workers.

    Args:
        read_plan: what the shard makes of the workers' plans; `DecidingParts` of the other arguments if None.
        record: writes the shard's history.
        shards: how many there are; `shard` is the one that coordinates.
        rule: makes updates of what workers bring; None for their mean.
        validators: so many of the last clients have shown that they are one.
    """

    def __init__(
        self,
        policy: Policy,
        world: int,
        tuning: BatchTuning | None = None,
        read_plan: Callable[[str], Any] | None = None,
        record: Callable[[Record], None] = lambda record: None,
        shards: int = 1,
        rule: Rule | None = None,
        validators: int = 0,
    ) -> None:
        self.world, self._validators = world, set(range(world, world + validators))
        self.loop = Loop()
        self.ended = threading.Event()
        self.shard = Shard(
            read_plan or (lambda plan: Parts(policy, tuning)),
            self.ended.set,
            record=record,
            parts_of=lambda plan: ShardParts(rule),
        )
        self.others = [Shard(None, parts_of=lambda plan: ShardParts(rule)) for _ in range(shards - 1)]
        for other in self.others:
            self.loop.run(self._follow(other))
        ranks = range(world + validators)
        self.clients = [Client(self.loop, rank=rank, world=world) for rank in ranks]  # type: ignore[arg-type]
        self.ends = [self._link(client) for client in self.clients]
        self.other_ends = [self._link(client, other) for client in self.clients for other in self.others]

    def newcomer(self, rank: int) -> Client:
        """One more client, which comes later, and has shown that it is a validator."""
        self._validators.add(rank)
        client = Client(self.loop, rank=rank, world=self.world)  # type: ignore[arg-type]
        self.clients.append(client)
        self.ends.append(self._link(client))
        self.other_ends += [self._link(client, other) for other in self.others]
        return client

    def _link(self, client: Client, shard: Shard | None = None) -> End:
        theirs, ours = End(self.loop, client.rank), End(self.loop, client.rank)
        theirs.other, ours.other = ours, theirs
        if client.rank in self._validators:
            theirs.role, theirs.is_trusted = "validator", True
        ours.receiver = client.accept(ours)  # type: ignore[arg-type]
        self.loop.run(self._accept(theirs, shard or self.shard))
        return theirs

    async def _accept(self, end: End, shard: Shard) -> None:
        end.receiver = shard.accept(end)  # type: ignore[arg-type]

    async def _follow(self, other: Shard) -> None:
        theirs, ours = End(self.loop, 0), End(self.loop, 0)
        theirs.other, ours.other = ours, theirs
        theirs.role = "shard"
        theirs.receiver, ours.receiver = self.shard.accept(theirs), other.follow(ours)  # type: ignore[arg-type]

    def kill(self, rank: int) -> None:
        """The worker is gone without a word."""
        for end in (*self.ends, *self.other_ends):
            if end.rank == rank:
                self.loop.call(end.cut, NetworkError("It was killed."))

    def close(self) -> None:
        for end in (*self.ends, *self.other_ends):
            self.loop.loop.call_soon_threadsafe(end.cut, None)
        self.ended.wait(5)
        self.loop.close()
