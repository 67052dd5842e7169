"""The deletions that a store has asked for and its directory has not answered.

A put of such a name waits: what the store still has of it is what was deleted. A directory that is lost is asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import ObjectError

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.objects import DeleteObject, ObjectName

_MOST = 4096


class Deletions:
    """The deletions of one directory's objects."""

    def __init__(self) -> None:
        self._asked: dict[ObjectName, DeleteObject] = {}  # as it would be repeated
        self._sent: set[ObjectName] = set()
        self._puts: dict[ObjectName, list[Callable[[ObjectError | None], None]]] = {}

    def add(self, message: DeleteObject, generations: tuple[int, ...]) -> Callable[[], None]:
        """Note a deletion that is asked for; returns what to call once it is sent.

        Args:
            generations: of what the store has; () if it has nothing that others have, too.
        """
        name, asked = message.name, msgspec.structs.replace(message, generations=generations)
        if len(self._asked) < _MOST or name in self._asked:
            self._asked[name] = asked
            self._sent.discard(name)

        def sent() -> None:
            if self._asked.get(name) is asked:
                self._sent.add(name)
                if not message.is_done_at_once:  # which has no answer
                    self.answered(name)

        return sent

    def answered(self, name: ObjectName) -> None:
        """A deletion is done: its name may be put again."""
        self._asked.pop(name, None)
        self._sent.discard(name)
        for told in self._puts.pop(name, []):
            told(None)

    def when_over(self, name: ObjectName, told: Callable[[ObjectError | None], None]) -> None:
        """Call `told` once nothing of this name is being deleted, or with why that cannot be known."""
        if name in self._asked:
            self._puts.setdefault(name, []).append(told)
        else:
            told(None)

    def again(self) -> list[DeleteObject]:
        """Return the deletions to be repeated to a directory that was lost, and give up the others.

        One that may have been done already is repeated only if it says what is to go: others may have put the name
        since then.
        """
        for name, message in list(self._asked.items()):
            if name in self._sent and not message.generations:
                self.answered(name)
        return list(self._asked.values())

    def directory_away(self, error: ObjectError) -> None:
        """The directory has been lost for too long for puts to wait."""
        puts, self._puts = self._puts, {}
        for name, waiting in puts.items():
            for told in waiting:
                told(ObjectError(f"Cannot put {name}: {error}"))
