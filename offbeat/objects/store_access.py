"""A task's way to its store: in this process (`embedded_store`), or in another one of this machine (`remote_store`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.objects.object_future import ObjectFuture
from offbeat.objects.packed_tensors import digest_of_parts
from offbeat.objects.stored_object import AlreadyHereError, other_bytes
from offbeat.protocol.objects import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from offbeat.objects.memory import MakerMap
    from offbeat.pending import Completion
    from offbeat.protocol.object_calls import StatusAnswer, VersionsAnswer
    from offbeat.protocol.objects import ObjectMeta, ObjectName, ReduceObjects, UsedSource

T = TypeVar("T")
_COPY_BYTES = 4 << 20
_LONG = timedelta(days=1)


@dataclass(frozen=True)
class FoundObject:
    """An object that was asked for.

    Args:
        memory: its bytes, which may be written to: nobody else sees that.
        used: the sources that it was made of, if it is a sum.
    """

    meta: ObjectMeta
    memory: Any
    used: tuple[UsedSource, ...]

    @property
    def view(self) -> memoryview:
        """Return its bytes, without what the memory has more."""
        return memoryview(self.memory)[: self.meta.size_bytes]


class StoreAccess(ABC):
    """A way to a store; on any thread."""

    def put(self, name: ObjectName, meta: ObjectMeta, parts: Iterable[memoryview]) -> ObjectFuture[bool]:
        """Copy an object, whose bytes are in parts, to the store, which gives it to others from the first bytes on.

        The outcome is whether it is new: the same bytes may be put again.
        """
        if meta.size_bytes <= INLINE_BYTES:
            return self.put_small(name, meta, b"".join(parts))
        while True:
            made: ObjectFuture[Any] = self.create(name, meta)
            made.wait(_LONG)
            if not isinstance(made.error, AlreadyHereError):
                break
            if (again := self._put_again(name, meta, parts)) is not None:
                return again
        if made.error is not None:
            return made
        _, maker = made.value
        try:
            for end in _copied(parts, maker):
                self.filled(name, end)
        except BaseException:
            self.abandon(name)
            raise
        finally:
            maker.close()
        return self.finish(name)

    @abstractmethod
    def put_small(self, name: ObjectName, meta: ObjectMeta, data: bytes) -> ObjectFuture[bool]:
        """Put an object that travels in a message."""

    @abstractmethod
    def create(self, name: ObjectName, meta: ObjectMeta) -> ObjectFuture[tuple[Any, MakerMap]]:
        """Ask for memory for an object, to be filled and finished; the outcome is the memory, and the map of it."""

    @abstractmethod
    def filled(self, name: ObjectName, have_bytes: int) -> None:
        """Say how much of it is there, from the beginning."""

    @abstractmethod
    def finish(self, name: ObjectName) -> ObjectFuture[bool]:
        """Say that all of it is there."""

    @abstractmethod
    def abandon(self, name: ObjectName) -> None:
        """Say that it will not be finished."""

    @abstractmethod
    def get(
        self, name: ObjectName, make: Callable[[FoundObject], T], provided: Completion | None = None
    ) -> ObjectFuture[T]:
        """Wait for an object.

        Args:
            make: the outcome of what was found.
            provided: as of `ObjectFuture`.
        """

    @abstractmethod
    def versions(self, id_: str, after: int = -1, *, waits: bool = False) -> ObjectFuture[VersionsAnswer]:
        """Ask which versions of an id are there: at once, or as soon as one after `after` is."""

    @abstractmethod
    def reduce(self, request: ReduceObjects) -> ObjectFuture[bool]:
        """Have a sum made; it is over once it is."""

    @abstractmethod
    def delete(self, name: ObjectName, *, when_read: bool = False) -> None:
        """Have all stores let go of an object: at once, or when no store reads it any more."""

    @abstractmethod
    def status(self) -> StatusAnswer:
        """Return the objects of the store.

        Raises:
            ObjectError: if it is lost.
        """

    @abstractmethod
    def close(self) -> None:
        """Say good-bye."""

    def _put_again(self, name: ObjectName, meta: ObjectMeta, parts: Iterable[memoryview]) -> ObjectFuture[bool] | None:
        """Compare an object with what the store has; None if that was deleted meanwhile."""
        asked = self.get(name, lambda found: found)
        self.status()  # is answered after what is here
        if not asked.done():
            asked.stop()
            return None
        here = asked.outcome()
        is_same = (here.meta.dtype, here.meta.shape) == (meta.dtype, meta.shape)
        again: ObjectFuture[bool] = ObjectFuture(f"put {name}")
        if is_same and digest_of_parts(parts) == digest_of_parts([here.view]):
            again.finish(False)
        else:
            again.end(other_bytes(name))
        return again


def _copied(parts: Iterable[memoryview], maker: MakerMap) -> Iterator[int]:
    """Copy parts into an object, one after the other; yields how many bytes are there, now and then and at the end."""
    end = noted = 0
    for part in parts:
        for at in range(0, len(part), _COPY_BYTES):
            piece = part[at : at + _COPY_BYTES]
            maker.write(end, piece)
            end += len(piece)
            if end - noted >= _COPY_BYTES:
                noted = end
                yield end
    if end > noted:
        yield end
