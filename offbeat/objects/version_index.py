"""The versions of each id that a directory knows, and the stores that wait for a newer one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.protocol.objects import ObjectName


class VersionIndex:
    """The versions of ids, and who waits for more of them."""

    def __init__(self) -> None:
        self._versions: dict[str, set[int]] = {}
        self._waiting: dict[str, dict[str, int]] = {}

    def add(self, name: ObjectName) -> None:
        """The directory knows this version."""
        self._versions.setdefault(name.id, set()).add(name.version)

    def remove(self, name: ObjectName) -> None:
        """The directory does not know this version any more."""
        versions = self._versions.get(name.id, set())
        versions.discard(name.version)
        if not versions:
            self._versions.pop(name.id, None)

    def versions(self, id_: str) -> list[int]:
        """Return the versions of an id, ascending."""
        return sorted(self._versions.get(id_, ()))

    def park(self, id_: str, store: str, after: int) -> bool:
        """Have a store wait for a version after this one; whether it did not wait before."""
        waiting = self._waiting.setdefault(id_, {})
        is_new = store not in waiting
        waiting[store] = after
        return is_new

    def unpark(self, id_: str, store: str) -> bool:
        """A store does not wait any more; whether it did."""
        waiting = self._waiting.get(id_, {})
        did = waiting.pop(store, None) is not None
        if not waiting:
            self._waiting.pop(id_, None)
        return did

    def waiting_for(self, name: ObjectName) -> list[str]:
        """The stores that wait for a version such as this one."""
        return sorted(store for store, after in self._waiting.get(name.id, {}).items() if name.version > after)

    def lost(self, store: str) -> None:
        """A store is gone."""
        for id_ in [id_ for id_, waiting in self._waiting.items() if store in waiting]:
            self.unpark(id_, store)
