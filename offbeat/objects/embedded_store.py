"""A task's way to a store in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.errors import NetworkError, OffbeatError
from offbeat.objects.memory import MakerMap, map_segment
from offbeat.objects.object_future import ObjectFuture, finish
from offbeat.objects.progress import TOLD_S, progress_of
from offbeat.objects.progress import told as progress_told
from offbeat.objects.store_access import FoundObject, StoreAccess
from offbeat.objects.stored_object import AlreadyHereError
from offbeat.protocol.object_calls import VersionsAnswer
from offbeat.wire.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from offbeat.errors import ObjectError
    from offbeat.objects.node_store import KnownVersions, NodeStore
    from offbeat.objects.stored_object import Outcome, StoredObject
    from offbeat.pending import Completion
    from offbeat.protocol.object_calls import StatusAnswer
    from offbeat.protocol.objects import ObjectMeta, ObjectName, ReduceObjects

T = TypeVar("T")


class EmbeddedStore(StoreAccess):
    """A store in this process.

    Args:
        store: it.
        bind, directories, patience: as `NodeStore.open`.
    """

    def __init__(self, store: NodeStore, bind: str, directories: list[str], patience: timedelta) -> None:
        self._store, self._loop = store, LoopThread("offbeat-objects")
        self._making: dict[ObjectName, StoredObject] = {}
        try:
            self._loop.run(store.open(bind, 0, directories, patience))
        except BaseException:
            self._loop.close()
            raise

    def put_small(self, name: ObjectName, meta: ObjectMeta, data: bytes) -> ObjectFuture[bool]:
        future: ObjectFuture[bool] = ObjectFuture(f"put {name}")

        def put() -> None:
            try:
                self._store.put_small(name, meta, data, put_outcome(future))
            except AlreadyHereError:
                future.finish(False)

        self._when_room(future, name, meta, put)
        return future

    def create(self, name: ObjectName, meta: ObjectMeta) -> ObjectFuture[tuple[Any, MakerMap]]:
        future: ObjectFuture[tuple[Any, MakerMap]] = ObjectFuture(f"put {name}")

        def create() -> None:
            stored = self._making[name] = self._store.create(name, meta)
            assert stored.segment is not None
            maker = MakerMap(os.getpid(), stored.segment.descriptor, meta.size_bytes)
            future.finish((maker.take(), maker))

        self._when_room(future, name, meta, create)
        return future

    def filled(self, name: ObjectName, have_bytes: int) -> None:
        self._loop.call(lambda: self._store.filled(self._making[name], have_bytes))

    def finish(self, name: ObjectName) -> ObjectFuture[bool]:
        future: ObjectFuture[bool] = ObjectFuture(f"put {name}")
        self._call(future, lambda: self._store.finish(self._making.pop(name), put_outcome(future)))
        return future

    def abandon(self, name: ObjectName) -> None:
        def abandon() -> None:
            if (stored := self._making.pop(name, None)) is not None:
                self._store.abandon(stored)

        with contextlib.suppress(NetworkError):  # it was closed meanwhile
            self._loop.call(abandon)

    def get(
        self, name: ObjectName, make: Callable[[FoundObject], T], provided: Completion | None = None
    ) -> ObjectFuture[T]:
        def told(what: Outcome) -> None:
            if isinstance(what, OffbeatError):
                future.end(what)
            else:
                found = FoundObject(what.meta, private(what), self._store.used.get(name, ()))
                finish(future, lambda: make(found))

        def look() -> None:
            if not future.done():
                future.progress = progress_told(progress_of(self._store, name, 0))
                asyncio.get_running_loop().call_later(TOLD_S, look)

        def want() -> None:
            self._store.want(name, told)
            asyncio.get_running_loop().call_later(TOLD_S, look)

        future: ObjectFuture[T] = ObjectFuture(
            f"get {name}", lambda: self._loop.call(self._store.stop_wanting, name, told), provided
        )
        self._call(future, want)
        return future

    def versions(self, id_: str, after: int = -1, *, waits: bool = False) -> ObjectFuture[VersionsAnswer]:
        def told(what: KnownVersions) -> None:
            if isinstance(what, OffbeatError):
                future.end(what)
            else:
                future.finish(VersionsAnswer(call=0, versions=what.versions, highest=what.highest))

        future: ObjectFuture[VersionsAnswer] = ObjectFuture(
            f"look for versions of {id_!r}", lambda: self._loop.call(self._store.stop_wanting_versions, id_, told)
        )
        self._call(future, lambda: self._store.want_versions(id_, after, waits=waits, told=told))
        return future

    def reduce(self, request: ReduceObjects) -> ObjectFuture[bool]:
        future: ObjectFuture[bool] = ObjectFuture(f"reduce into {request.name}")
        future.value = True
        self._call(future, self._store.reduce, request, future.end)
        return future

    def delete(self, name: ObjectName, *, when_read: bool = False) -> None:
        self._loop.call(lambda: self._store.delete(name, when_read=when_read))

    def status(self) -> StatusAnswer:
        future: ObjectFuture[StatusAnswer] = ObjectFuture("see what is in the store")
        self._call(future, lambda: future.finish(self._store.status(0)))
        return future.get()

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


def private(stored: StoredObject) -> Any:
    """The bytes of an object of this process's store, so that nobody else sees what is written into them."""
    if stored.segment is None:
        return bytearray(stored.memory)
    return map_segment(os.getpid(), stored.segment.descriptor, stored.meta.size_bytes)


def put_outcome(future: ObjectFuture[bool]) -> Callable[[Outcome], None]:
    """Return what a store calls at the end of a put."""

    def told(what: Outcome) -> None:
        if isinstance(what, OffbeatError):
            future.end(what)
        else:
            future.finish(True)

    return told
