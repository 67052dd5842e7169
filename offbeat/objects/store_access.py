"""A task's way to its store: in this process, or in another one of this machine. Both do the same."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from offbeat.errors import (
    DisagreementError,
    NetworkError,
    ObjectError,
    ObjectTimeoutError,
    OffbeatError,
    PeerError,
)
from offbeat.objects.memory import map_segment
from offbeat.pending import Completion
from offbeat.protocol.object_calls import (
    CallFailed,
    CreateCall,
    DeleteNote,
    DoneAnswer,
    FilledNote,
    FinishCall,
    GetCall,
    MemoryAnswer,
    ObjectAnswer,
    ProgressNote,
    PutSmallCall,
    ReduceCall,
    ReleaseNote,
    StatusAnswer,
    StatusCall,
    StopCall,
    VersionsAnswer,
    VersionsCall,
    pack_call,
    to_client_of,
)
from offbeat.protocol.objects import INLINE_BYTES
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.session import Limits
from offbeat.wire.tcp import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from offbeat.objects.node_store import KnownVersions, NodeStore
    from offbeat.objects.stored_object import Outcome, StoredObject
    from offbeat.protocol.object_calls import FromClient
    from offbeat.protocol.objects import ObjectMeta, ObjectName, ReduceObjects
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink
    from offbeat.wire.messages import Role

T = TypeVar("T")
_COPY_BYTES = 4 << 20
_LONG = timedelta(days=1)
_LOOK_S = 0.5
NOBODY = "nobody has put it"
"""The progress of a `get` for which the store has found no holder."""
CLIENT_LIMITS = Limits(timeout=timedelta(seconds=5))
"""The limits of the link between a client and its store: a client may hold the GIL for seconds."""


class CallDeadline:
    """The moment until which a call may take.

    Args:
        timeout: in seconds from now; None for as long as it takes.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._until_s = None if timeout is None else time.monotonic() + timeout

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; infinity without an end."""
        return math.inf if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether none is left."""
        return self.left_s == 0.0


class ObjectFuture(Completion, Generic[T]):
    """The outcome of a call to a store, once it is there; can be waited for, or awaited.

    Attributes:
        progress: the last that is known of it, for people; "" if nothing is.
    """

    value: T

    def __init__(self) -> None:
        super().__init__()
        self.progress = ""

    def finish(self, value: T) -> None:
        """End it with this outcome."""
        self.value = value
        self.end()

    def outcome(self) -> T:
        """The outcome; once it is over.

        Raises:
            OffbeatError: what ended it.
        """
        if self.error is not None:
            raise self.error
        return self.value

    def get(self, what: str, timeout: CallDeadline | float | None) -> T:
        """Wait for the outcome; signals are handled meanwhile.

        Args:
            what: it is, for people, such as "get 'w'".
            timeout: in seconds; None for as long as it takes.

        Raises:
            ObjectTimeoutError: if it has taken too long; says how far it is.
            OffbeatError: what ended it.
        """
        deadline = timeout if isinstance(timeout, CallDeadline) else CallDeadline(timeout)
        while not self.wait(timedelta(seconds=min(_LOOK_S, deadline.left_s))):
            if deadline.is_over:
                progress = self.progress or "nothing is known"
                raise ObjectTimeoutError(f"Cannot {what} within {deadline.timeout:g} s: {progress}.")
        return self.outcome()

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(over.set)

        self.add_done_callback(tell)
        yield from over.wait().__await__()
        return self.outcome()


@dataclass(frozen=True)
class FoundObject:
    """An object that was asked for.

    Args:
        memory: its bytes, which may be written to: nobody else sees that.
        used: the sources that it was made of, if it is a sum.
    """

    meta: ObjectMeta
    memory: Any
    used: tuple[ObjectName, ...]


class StoreAccess(Protocol):
    """The Protocol of a way to a store; on any thread."""

    def put(self, name: ObjectName, meta: ObjectMeta, parts: Iterable[memoryview]) -> ObjectFuture[None]:
        """Copy an object, whose bytes are in parts, to the store, which gives it to others from the first bytes on."""

    def get(self, name: ObjectName) -> ObjectFuture[FoundObject]:
        """Wait for an object."""

    def versions(self, id_: str, after: int = -1, *, waits: bool = False) -> ObjectFuture[VersionsAnswer]:
        """Ask which versions of an id are there: at once, or as soon as one after `after` is."""

    def stop(self, future: ObjectFuture[Any]) -> None:
        """Withdraw a `get`, or a `versions`."""

    def reduce(self, request: ReduceObjects) -> ObjectFuture[None]:
        """Have a sum made; it is over once it is."""

    def delete(self, name: ObjectName, *, when_read: bool = False) -> None:
        """Have all stores let go of an object: at once, or when no store reads it any more."""

    def status(self) -> StatusAnswer:
        """Return the objects of the store.

        Raises:
            ObjectError: if it is lost.
        """

    def close(self) -> None:
        """Say good-bye."""


class EmbeddedStore:
    """A store in this process.

    Args:
        store: it.
        bind, directories, patience: as `NodeStore.open`.
    """

    def __init__(self, store: NodeStore, bind: str, directories: list[str], patience: timedelta) -> None:
        self._store, self._loop = store, LoopThread("offbeat-objects")
        self._gets: dict[ObjectFuture[Any], tuple[ObjectName, Callable[[Outcome], None]]] = {}
        self._looks: dict[ObjectFuture[Any], tuple[str, Callable[[KnownVersions], None]]] = {}
        try:
            self._loop.run(store.open(bind, 0, directories, patience))
        except BaseException:
            self._loop.close()
            raise

    def put(self, name: ObjectName, meta: ObjectMeta, parts: Iterable[memoryview]) -> ObjectFuture[None]:
        future: ObjectFuture[None] = ObjectFuture()

        def told(what: Outcome) -> None:
            future.end(what if isinstance(what, OffbeatError) else None)

        future.value = None
        if meta.size_bytes <= INLINE_BYTES:
            small = b"".join(parts)
            self._when_room(future, name, meta, lambda: self._store.put_small(name, meta, small, told))
            return future
        made: ObjectFuture[StoredObject] = ObjectFuture()
        self._when_room(made, name, meta, lambda: made.finish(self._store.create(name, meta)))
        made.wait(_LONG)
        if made.error is not None:
            future.end(made.error)
            return future
        stored = made.value
        for end in copied(parts, stored.memory):
            self._loop.call(self._store.filled, stored, end)
        self._call(future, self._store.finish, stored, told)
        return future

    def get(self, name: ObjectName) -> ObjectFuture[FoundObject]:
        future: ObjectFuture[FoundObject] = ObjectFuture()

        def told(what: Outcome) -> None:
            self._gets.pop(future, None)
            if isinstance(what, OffbeatError):
                future.end(what)
            else:
                future.finish(FoundObject(what.meta, private(what), self._store.used.get(name, ())))

        self._gets[future] = name, told
        self._call(future, self._store.want, name, told)
        return future

    def versions(self, id_: str, after: int = -1, *, waits: bool = False) -> ObjectFuture[VersionsAnswer]:
        future: ObjectFuture[VersionsAnswer] = ObjectFuture()

        def told(what: KnownVersions) -> None:
            self._looks.pop(future, None)
            if isinstance(what, OffbeatError):
                future.end(what)
            else:
                future.finish(VersionsAnswer(call=0, versions=what.versions, highest=what.highest))

        self._looks[future] = id_, told
        self._call(future, lambda: self._store.want_versions(id_, after, waits=waits, told=told))
        return future

    def stop(self, future: ObjectFuture[Any]) -> None:
        if (found := self._gets.pop(future, None)) is not None:
            self._loop.call(self._store.stop_wanting, *found)
        if (look := self._looks.pop(future, None)) is not None:
            self._loop.call(self._store.stop_wanting_versions, *look)

    def reduce(self, request: ReduceObjects) -> ObjectFuture[None]:
        future: ObjectFuture[None] = ObjectFuture()
        future.value = None
        self._call(future, self._store.reduce, request, future.end)
        return future

    def delete(self, name: ObjectName, *, when_read: bool = False) -> None:
        self._loop.call(lambda: self._store.delete(name, when_read=when_read))

    def status(self) -> StatusAnswer:
        future: ObjectFuture[StatusAnswer] = ObjectFuture()
        self._call(future, lambda: future.finish(self._store.status(0)))
        return future.get("see what is in the store", None)

    def close(self) -> None:
        self._loop.run(self._store.close())
        self._loop.close()

    def _when_room(
        self, future: ObjectFuture[Any], name: ObjectName, meta: ObjectMeta, put: Callable[[], None]
    ) -> None:
        def told(error: ObjectError | None) -> None:
            try:
                if error is not None:
                    raise error
                put()
            except OffbeatError as refused:
                future.end(refused)

        self._call(future, self._store.when_room, name, meta.size_bytes, told)

    def _call(self, future: ObjectFuture[Any], function: Callable[..., object], *arguments: object) -> None:
        def run() -> None:
            try:
                function(*arguments)
            except OffbeatError as error:
                future.end(error)

        self._loop.call(run)


class RemoteStore:
    """A store in another process of this machine; also a `Receiver`.

    Args:
        address: "host:port" of the store.
        job: to which it belongs.
        credentials: what both sides prove.
        patience: for how long to dial.
        role: "onlooker" for one that only asks for the status.

    Raises:
        NetworkError: if nobody could be reached.
        PeerError: if it refused.
    """

    def __init__(
        self, address: str, *, job: str, credentials: Credentials | None, patience: timedelta, role: Role = "worker"
    ) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._calls: dict[int, ObjectFuture[Any]] = {}
        self._gets: dict[int, ObjectName] = {}  # by call
        self._error: OffbeatError | None = None
        self._loop = LoopThread("offbeat-objects")
        try:
            self._link: PeerLink = self._loop.run(
                connect(
                    address,
                    accept=lambda _: self,
                    job=job,
                    rank=0,
                    credentials=credentials,
                    limits=CLIENT_LIMITS,
                    patience=patience,
                    role=role,
                )
            )
        except BaseException:
            self._loop.close()
            raise

    def put(self, name: ObjectName, meta: ObjectMeta, parts: Iterable[memoryview]) -> ObjectFuture[None]:
        if meta.size_bytes <= INLINE_BYTES:
            data = b"".join(parts)
            return self._ask(lambda call: PutSmallCall(call=call, name=name, meta=meta, data=data))
        made: ObjectFuture[MemoryAnswer] = self._ask(lambda call: CreateCall(call=call, name=name, meta=meta))
        made.wait(_LONG)
        if made.error is not None:
            return made  # type: ignore[return-value]
        where = made.value
        with map_segment(where.process, where.descriptor, meta.size_bytes, to_fill=True) as memory:
            for end in copied(parts, memory):
                self._say(FilledNote(name=name, have_bytes=end))
        return self._ask(lambda call: FinishCall(call=call, name=name))

    def get(self, name: ObjectName) -> ObjectFuture[FoundObject]:
        def ask(call: int) -> GetCall:
            self._gets[call] = name
            return GetCall(call=call, name=name)

        return self._ask(ask)

    def versions(self, id_: str, after: int = -1, *, waits: bool = False) -> ObjectFuture[VersionsAnswer]:
        return self._ask(lambda call: VersionsCall(call=call, id=id_, after=after, waits=waits))

    def stop(self, future: ObjectFuture[Any]) -> None:
        for call, waiting in list(self._calls.items()):
            if waiting is future:
                del self._calls[call]
                self._gets.pop(call, None)
                self._say(StopCall(call=call))

    def reduce(self, request: ReduceObjects) -> ObjectFuture[None]:
        return self._ask(lambda call: ReduceCall(call=call, request=request))

    def delete(self, name: ObjectName, *, when_read: bool = False) -> None:
        self._say(DeleteNote(name=name, when_read=when_read))

    def status(self) -> StatusAnswer:
        future: ObjectFuture[StatusAnswer] = self._ask(lambda call: StatusCall(call=call))
        future.wait(CLIENT_LIMITS.timeout)
        return future.outcome()

    def close(self) -> None:
        if self._error is None:
            self._loop.run(self._say_good_bye())
        self._loop.close()

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _say_good_bye(self) -> None:
        self._error = ObjectError("it was closed")  # not before: what was said last is still to be sent
        await self._link.close()

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Objects are in memory that both map."""
        raise PeerError("Cannot take in a body from a store.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Take in an answer."""
        message = to_client_of(metadata)
        future = self._calls.get(message.call)
        if future is None:
            return
        if isinstance(message, ProgressNote):
            future.progress = told(message)
            return
        del self._calls[message.call]
        name = self._gets.pop(message.call, None)
        match message:
            case CallFailed():
                future.end((DisagreementError if message.kind == "differs" else ObjectError)(message.reason))
            case DoneAnswer():
                future.finish(None)
            case ObjectAnswer():
                try:
                    assert name is not None
                    future.finish(self._found(name, message))
                except ObjectError as error:
                    future.end(error)
            case _:
                future.finish(message)

    def lost(self, error: OffbeatError | None) -> None:
        """The store is gone; objects that are mapped stay."""
        self._error = error or ObjectError("it has said good-bye")
        calls, self._calls = self._calls, {}
        for future in calls.values():
            future.end(ObjectError(f"Cannot go on: the store at {self._address} is lost. {self._error}"))

    def _found(self, name: ObjectName, message: ObjectAnswer) -> FoundObject:
        if not message.process:
            return FoundObject(message.meta, bytearray(message.data), message.used)
        memory = map_segment(message.process, message.descriptor, message.meta.size_bytes)
        # The store keeps what is mapped. A tensor holds the map, which ends with the last tensor over it.
        weakref.finalize(memory, self._release, name)
        return FoundObject(message.meta, memory, message.used)

    def _release(self, name: ObjectName) -> None:
        with contextlib.suppress(NetworkError):  # it was closed meanwhile
            self._say(ReleaseNote(name=name))

    def _ask(self, request: Callable[[int], FromClient]) -> ObjectFuture[Any]:
        future: ObjectFuture[Any] = ObjectFuture()
        call = next(self._numbers)

        def send() -> None:
            if self._error is not None:
                future.end(ObjectError(f"Cannot go on: the store at {self._address} is lost. {self._error}"))
                return
            self._calls[call] = future
            self._link.send(pack_call(request(call)))

        self._loop.call(send)
        return future

    def _say(self, message: FromClient) -> None:
        def send() -> None:
            if self._error is None:
                self._link.send(pack_call(message))

        self._loop.call(send)


def private(stored: StoredObject) -> Any:
    """The bytes of an object of this process's store, so that nobody else sees what is written into them."""
    if stored.segment is None:
        return bytearray(stored.memory)
    return map_segment(os.getpid(), stored.segment.descriptor, stored.meta.size_bytes)


def copied(parts: Iterable[memoryview], memory: Any) -> Iterator[int]:
    """Copy parts into memory, one after the other; yields how many bytes are there, now and then and at the end."""
    end = noted = 0
    for part in parts:
        for at in range(0, len(part), _COPY_BYTES):
            piece = part[at : at + _COPY_BYTES]
            memory[end : end + len(piece)] = piece
            end += len(piece)
            if end - noted >= _COPY_BYTES:
                noted = end
                yield end
    if end > noted:
        yield end


def told(note: ProgressNote) -> str:
    """Say how far an object is, for people.

    >>> told(ProgressNote(call=1, have_bytes=3, size_bytes=10, feeder="10.0.0.3:4711", silent_s=0.4))
    '3 of 10 bytes are here, from the store at 10.0.0.3:4711, the last of them 0.4 s ago'
    """
    if note.away_s and note.have_bytes == note.size_bytes:
        return f"its directory has been lost for {note.away_s:.0f} s, and is dialled"
    if not note.size_bytes:
        return NOBODY
    where = f", from the store at {note.feeder}" if note.feeder else ", and no store feeds it just now"
    when = f", the last of them {note.silent_s:.1f} s ago" if note.have_bytes and note.silent_s else ""
    return f"{note.have_bytes:,} of {note.size_bytes:,} bytes are here{where}{when}"
