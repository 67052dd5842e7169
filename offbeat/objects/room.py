"""Room for objects in a store: what is dropped for those that do not fit, and which of them wait for that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import ObjectError
from offbeat.protocol import objects as say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.objects.stored_object import StoredObject
    from offbeat.protocol.objects import FromStore, ObjectName

    _Lacking = tuple[ObjectName, int, Callable[[ObjectError | None], None]]

_PATIENCE_S = 1.0  # for which an object waits for others to be dropped


class RoomOwner(Protocol):
    """The Protocol of the store around an `ObjectRoom`."""

    most_bytes: int
    used_bytes: int

    @property
    def objects(self) -> Mapping[ObjectName, StoredObject]:
        """Return the objects that are here, those that were used least lately first."""

    def tell_directory(self, message: FromStore) -> None:
        """Tell the directory."""

    def remove(self, stored: StoredObject) -> None:
        """Let go of an object."""


class ObjectRoom:
    """The room of one store. Only copies that another store has, too, are dropped, once the directory grants it.

    Args:
        store: whose it is.
    """

    def __init__(self, store: RoomOwner) -> None:
        self._store = store
        self._lacking: list[_Lacking] = []
        self._dropping: dict[ObjectName, StoredObject] = {}  # that the directory was asked for
        self._only_here: set[ObjectName] = set()  # what it refused to have dropped while some wait for room

    def take(self, name: ObjectName, size_bytes: int) -> None:
        """See that an object fits; if not, ask to drop what was used least lately.

        Raises:
            ObjectError: if it does not fit.
        """
        store = self._store
        if store.used_bytes + size_bytes <= store.most_bytes:
            return
        if size_bytes <= store.most_bytes:
            self._ask_to_drop(size_bytes)
        raise ObjectError(
            f"Cannot keep {name} of {size_bytes:,} bytes: this store holds {store.used_bytes:,} of its "
            f"{store.most_bytes:,} bytes. Delete some, or give it more memory (offbeat objects serve --memory-mib)."
        )

    def when_there(self, name: ObjectName, size_bytes: int, told: Callable[[ObjectError | None], None]) -> None:
        """Call `told` once there is room for an object, or with why there is none."""
        try:
            self.take(name, size_bytes)
        except ObjectError as error:
            waiting, why = (name, size_bytes, told), error
            self._lacking.append(waiting)
            asyncio.get_running_loop().call_later(_PATIENCE_S, lambda: self._end(waiting, why))
        else:
            told(None)

    def dropped(self, message: say.ObjectDropped) -> None:
        """The directory has answered whether a copy may go."""
        asked = self._dropping.pop(message.name, None)
        if asked is None or self._store.objects.get(message.name) is not asked:
            return
        if message.granted:
            self._store.remove(asked)
        elif self._lacking:
            self._only_here.add(message.name)
            self._ask_to_drop(0)

    def forget_question(self, name: ObjectName) -> None:
        """The directory that was asked whether a copy may go is lost."""
        self._dropping.pop(name, None)

    def give(self) -> None:
        """Tell the first ones that wait for room, as far as it goes."""
        store = self._store
        while self._lacking and store.used_bytes + self._lacking[0][1] <= store.most_bytes:
            _, _, told = self._lacking.pop(0)
            self._only_here.clear()
            told(None)

    def _ask_to_drop(self, size_bytes: int) -> None:
        """Ask to drop as much as is needed for this and for those that wait for room."""
        store = self._store
        lacking = store.used_bytes + size_bytes + sum(size for _, size, _ in self._lacking) - store.most_bytes
        lacking -= sum(stored.meta.size_bytes for stored in self._dropping.values())
        for stored in list(store.objects.values()):
            if lacking <= 0:
                return
            is_idle = stored.is_whole and not stored.pins and not stored.readings
            if is_idle and stored.name not in self._dropping and stored.name not in self._only_here:
                lacking -= stored.meta.size_bytes
                self._dropping[stored.name] = stored
                store.tell_directory(say.DropObject(name=stored.name))

    def _end(self, waiting: _Lacking, error: ObjectError) -> None:
        if waiting in self._lacking:
            self._lacking.remove(waiting)
            self._only_here.clear()
            waiting[2](error)
