"""A task's way to the store of its machine, which is another process."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.errors import DisagreementError, NetworkError, ObjectError, OffbeatError, PeerError
from offbeat.objects.memory import MakerMap, map_segment
from offbeat.objects.object_future import ObjectFuture, finish
from offbeat.objects.progress import told
from offbeat.objects.store_access import FoundObject, StoreAccess
from offbeat.objects.stored_object import AlreadyHereError
from offbeat.protocol.object_calls import (
    AbandonNote,
    CallFailed,
    CreateCall,
    DeleteNote,
    DoneAnswer,
    FilledNote,
    FinishCall,
    GetCall,
    ProgressNote,
    PutSmallCall,
    ReduceCall,
    ReleaseNote,
    StatusCall,
    StopCall,
    VersionsCall,
    pack_call,
    to_client_of,
)
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.session import Limits
from offbeat.wire.tcp import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.pending import Completion
    from offbeat.protocol.object_calls import FromClient, MemoryAnswer, ObjectAnswer, StatusAnswer, VersionsAnswer
    from offbeat.protocol.objects import ObjectMeta, ObjectName, ReduceObjects
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink
    from offbeat.wire.messages import Role

T = TypeVar("T")
CLIENT_LIMITS = Limits(timeout=timedelta(seconds=5))
"""The limits of the link between a client and its store: a client may hold the GIL for seconds."""
_FAILURES: dict[str, type[OffbeatError]] = {
    "differs": DisagreementError,
    "here": AlreadyHereError,
    "object": ObjectError,
}


class RemoteStore(StoreAccess):
    """A store in another process of this machine; also a `Receiver`.

    Args:
        address: "host:port" of the store.
        job: to which it belongs.
        credentials: what both sides prove.
        patience: for how long to dial.
        may_start: whether the store may still be starting; if not, a refused connection is an error at once.
        role: "onlooker" for one that only asks for the status.

    Raises:
        NetworkError: if nobody could be reached.
        PeerError: if it refused.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        credentials: Credentials | None,
        patience: timedelta,
        may_start: bool = True,
        role: Role = "worker",
    ) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[ObjectFuture[Any], Callable[[Any], object]]] = {}
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
                    may_start=may_start,
                )
            )
        except BaseException:
            self._loop.close()
            raise

    def put_small(self, name: ObjectName, meta: ObjectMeta, data: bytes) -> ObjectFuture[bool]:
        return self._ask(f"put {name}", lambda call: PutSmallCall(call=call, name=name, meta=meta, data=data))

    def create(self, name: ObjectName, meta: ObjectMeta) -> ObjectFuture[tuple[Any, MakerMap]]:
        def mapped(where: MemoryAnswer) -> tuple[Any, MakerMap]:
            maker = MakerMap(where.process, where.descriptor, meta.size_bytes)
            return maker.take(), maker

        return self._ask(f"put {name}", lambda call: CreateCall(call=call, name=name, meta=meta), mapped)

    def filled(self, name: ObjectName, have_bytes: int) -> None:
        self._say(FilledNote(name=name, have_bytes=have_bytes))

    def finish(self, name: ObjectName) -> ObjectFuture[bool]:
        return self._ask(f"put {name}", lambda call: FinishCall(call=call, name=name))

    def abandon(self, name: ObjectName) -> None:
        self._say(AbandonNote(name=name))

    def get(
        self, name: ObjectName, make: Callable[[FoundObject], T], provided: Completion | None = None
    ) -> ObjectFuture[T]:
        return self._ask(
            f"get {name}",
            lambda call: GetCall(call=call, name=name),
            lambda answer: make(self._found(name, answer)),
            provided,
        )

    def versions(self, id_: str, after: int = -1, *, waits: bool = False) -> ObjectFuture[VersionsAnswer]:
        return self._ask(
            f"look for versions of {id_!r}", lambda call: VersionsCall(call=call, id=id_, after=after, waits=waits)
        )

    def reduce(self, request: ReduceObjects) -> ObjectFuture[bool]:
        return self._ask(f"reduce into {request.name}", lambda call: ReduceCall(call=call, request=request))

    def delete(self, name: ObjectName, *, when_read: bool = False) -> None:
        self._say(DeleteNote(name=name, when_read=when_read))

    def status(self) -> StatusAnswer:
        future: ObjectFuture[StatusAnswer] = self._ask("see what is there", lambda call: StatusCall(call=call))
        return future.get(CLIENT_LIMITS.timeout.total_seconds())

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
        if message.call not in self._calls:
            return
        future, make = self._calls[message.call]
        if isinstance(message, ProgressNote):
            future.progress = told(message)
            return
        del self._calls[message.call]
        match message:
            case CallFailed():
                future.end(_FAILURES[message.kind](message.reason))
            case DoneAnswer():
                future.finish(message.is_new)
            case _:
                finish(future, lambda: make(message))

    def lost(self, error: OffbeatError | None) -> None:
        """The store is gone; objects that are mapped stay."""
        self._error = error or ObjectError("it has said good-bye")
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            future.end(ObjectError(f"Cannot go on: the store at {self._address} is lost. {self._error}"))

    def _found(self, name: ObjectName, message: ObjectAnswer) -> FoundObject:
        if not message.process:
            return FoundObject(message.meta, bytearray(message.data), message.used)
        try:
            memory = map_segment(message.process, message.descriptor, message.meta.size_bytes)
        except ObjectError:
            self._release(name)
            raise
        # The store keeps what is mapped. A tensor holds the map, which ends with the last tensor over it.
        weakref.finalize(memory, self._release, name)
        return FoundObject(message.meta, memory, message.used)

    def _release(self, name: ObjectName) -> None:
        self._say(ReleaseNote(name=name))

    def _ask(
        self,
        what: str,
        request: Callable[[int], FromClient],
        make: Callable[[Any], object] = lambda answer: answer,
        provided: Completion | None = None,
    ) -> ObjectFuture[Any]:
        call = next(self._numbers)

        def send() -> None:
            if self._error is not None:
                future.end(ObjectError(f"Cannot go on: the store at {self._address} is lost. {self._error}"))
            elif not future.done():
                self._calls[call] = future, make
                self._link.send(pack_call(request(call)))

        def withdraw() -> None:
            if self._calls.pop(call, None) is not None and self._error is None:
                self._link.send(pack_call(StopCall(call=call)))

        future: ObjectFuture[Any] = ObjectFuture(what, lambda: self._loop.call(withdraw), provided)
        self._loop.call(send)
        return future

    def _say(self, message: FromClient) -> None:
        def send() -> None:
            if self._error is None:
                self._link.send(pack_call(message))

        with contextlib.suppress(NetworkError):  # it was closed meanwhile
            self._loop.call(send)
