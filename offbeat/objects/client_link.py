"""A store's side of the link with one client on its machine."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Literal

from offbeat.errors import DisagreementError, ObjectError, OffbeatError, PeerError
from offbeat.objects.progress import TOLD_S, progress_of
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
    MemoryAnswer,
    ObjectAnswer,
    PutSmallCall,
    ReduceCall,
    ReleaseNote,
    StatusCall,
    StopCall,
    VersionsAnswer,
    VersionsCall,
    from_client_of,
    pack_call,
)
from offbeat.protocol.objects import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.objects.node_store import KnownVersions, NodeStore
    from offbeat.objects.stored_object import Outcome, StoredObject
    from offbeat.protocol.object_calls import FromClient, ToClient
    from offbeat.protocol.objects import ObjectName
    from offbeat.wire.link import PeerLink

_MAX_CALLS = 1024


class ClientLink:
    """The link with one client; a `Receiver`. When it ends, the objects that the client has not finished end, too."""

    def __init__(self, store: NodeStore, link: PeerLink) -> None:
        self._store, self._link = store, link
        self._making: dict[ObjectName, StoredObject] = {}
        self._gets: dict[int, tuple[ObjectName, Callable[[Outcome], None]]] = {}
        self._looks: dict[int, tuple[str, Callable[[KnownVersions], None]]] = {}
        self._pins: list[StoredObject] = []

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Objects are in memory that both map."""
        raise PeerError("Cannot take in a body from a client.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Do what the client says."""
        message = from_client_of(metadata)
        if self._link.role == "onlooker" and not isinstance(message, StatusCall):
            raise PeerError("an onlooker may ask for the status alone")
        try:
            self._do(message)
        except OffbeatError as error:
            if isinstance(error, PeerError) and not isinstance(error, DisagreementError):
                raise
            self._fail(getattr(message, "call", 0), error)

    def lost(self, error: OffbeatError | None) -> None:
        """The link has ended."""
        for call in [*self._gets, *self._looks]:
            self._stop(call)
        for stored in self._making.values():
            self._store.abandon(stored)
        for stored in self._pins:
            stored.pins -= 1
        self._pins.clear()

    def _do(self, message: FromClient) -> None:
        store = self._store
        match message:
            case CreateCall():
                if message.meta.size_bytes <= INLINE_BYTES:
                    raise PeerError(
                        f"Cannot make {message.name} of {message.meta.size_bytes} bytes in memory of its own."
                    )
                self._when_room(message, lambda: self._create(message))
            case FilledNote():
                made = self._made(message.name)
                store.filled(made, min(message.have_bytes, made.meta.size_bytes))
            case FinishCall():
                store.finish(self._made(message.name), self._done(message.call))
                del self._making[message.name]
            case AbandonNote():
                if message.name in self._making:
                    store.abandon(self._making.pop(message.name))
            case PutSmallCall():
                if len(message.data) != message.meta.size_bytes:
                    raise PeerError(f"Cannot put {len(message.data)} bytes as {message.meta}.")
                self._when_room(message, lambda: self._put_small(message))
            case GetCall():
                self._get(message)
            case VersionsCall():
                self._look(message)
            case StopCall():
                self._stop(message.call)
            case ReleaseNote():
                pinned = next((stored for stored in self._pins if stored.name == message.name), None)
                if pinned is not None:
                    self._pins.remove(pinned)
                    pinned.pins -= 1
            case ReduceCall():
                store.reduce(message.request, self._done(message.call))
            case DeleteNote():
                store.delete(message.name, when_read=message.when_read)
            case StatusCall():
                self._say(store.status(message.call))

    def _when_room(self, message: CreateCall | PutSmallCall, put: Callable[[], None]) -> None:
        def told(error: ObjectError | None) -> None:
            if not self._link.is_open:
                return
            try:
                if error is not None:
                    raise error
                put()
            except OffbeatError as refused:
                self._fail(message.call, refused)

        self._store.when_room(message.name, message.meta.size_bytes, told)

    def _create(self, message: CreateCall) -> None:
        stored = self._making[message.name] = self._store.create(message.name, message.meta)
        assert stored.segment is not None
        self._say(MemoryAnswer(call=message.call, process=os.getpid(), descriptor=stored.segment.descriptor))

    def _put_small(self, message: PutSmallCall) -> None:
        try:
            self._store.put_small(message.name, message.meta, message.data, self._done(message.call))
        except AlreadyHereError:
            self._say(DoneAnswer(call=message.call, is_new=False))

    def _made(self, name: ObjectName) -> StoredObject:
        if (made := self._making.get(name)) is None:
            raise PeerError(f"Cannot go on with {name}: this client does not make it.")
        return made

    def _get(self, message: GetCall) -> None:
        call = message.call
        self._check_number(call)

        def told(what: Outcome) -> None:
            self._gets.pop(call, None)
            if isinstance(what, OffbeatError):
                self._fail(call, what)
                return
            used = self._store.used.get(what.name, ())
            if what.segment is None:
                self._say(ObjectAnswer(call=call, meta=what.meta, data=bytes(what.memory), used=used))
                return
            what.pins += 1
            self._pins.append(what)
            self._say(
                ObjectAnswer(
                    call=call,
                    meta=what.meta,
                    process=os.getpid(),
                    descriptor=what.segment.descriptor,
                    used=used,
                )
            )

        self._gets[call] = message.name, told
        self._store.want(message.name, told)
        if call in self._gets:
            asyncio.get_running_loop().call_later(TOLD_S, self._tell_progress, call)

    def _look(self, message: VersionsCall) -> None:
        call = message.call
        self._check_number(call)

        def told(what: KnownVersions) -> None:
            self._looks.pop(call, None)
            if isinstance(what, OffbeatError):
                self._fail(call, what)
            else:
                self._say(VersionsAnswer(call=call, versions=what.versions, highest=what.highest))

        self._looks[call] = message.id, told
        self._store.want_versions(message.id, message.after, waits=message.waits, told=told)

    def _check_number(self, call: int) -> None:
        waiting = self._gets.keys() | self._looks.keys()
        if len(waiting) >= _MAX_CALLS or call in waiting:
            raise PeerError(f"Cannot wait for more than {_MAX_CALLS} objects of one client, or twice by one number.")

    def _tell_progress(self, call: int) -> None:
        if call not in self._gets or not self._link.is_open:
            return
        self._say(progress_of(self._store, self._gets[call][0], call))
        asyncio.get_running_loop().call_later(TOLD_S, self._tell_progress, call)

    def _stop(self, call: int) -> None:
        if (found := self._gets.pop(call, None)) is not None:
            self._store.stop_wanting(*found)
        if (look := self._looks.pop(call, None)) is not None:
            self._store.stop_wanting_versions(*look)

    def _done(self, call: int) -> Callable[[Outcome | None], None]:
        def told(what: Outcome | None) -> None:
            if isinstance(what, OffbeatError):
                self._fail(call, what)
            else:
                self._say(DoneAnswer(call=call))

        return told

    def _fail(self, call: int, error: OffbeatError) -> None:
        kind: Literal["object", "differs", "here"] = "object"
        if isinstance(error, DisagreementError):
            kind = "differs"
        elif isinstance(error, AlreadyHereError):
            kind = "here"
        self._say(CallFailed(call=call, reason=str(error), kind=kind))

    def _say(self, message: ToClient) -> None:
        if self._link.is_open:
            self._link.send(pack_call(message))
