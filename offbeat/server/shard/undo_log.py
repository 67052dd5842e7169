"""The undo log: undoes and redoes the updates of each block that hold contributions which may still be withdrawn,
without I/O.

An update is made in a block as soon as that block of all its contributions is there: the *first phase*. A contribution
may lose its worker before the rest of it comes. So an *entry* is written for each update that holds one, and for all
that are made in the block after it: what the block was before, and what arrived. Once a contribution is there, whole,
at all shards, it is *committed*: the second phase. Entries at the front in which nothing can be withdrawn any more are
erased.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from offbeat.sync import Apply, Push


@dataclass(eq=False)
class LoggedUpdate:
    """An `Apply`, and what has become of it.

    Args:
        left: blocks in which it has not been made.
        open: its contributions that may still be withdrawn.
        withdrawn: those that were.
        is_held: it was taken out again, or is to be judged, and is made once nothing in it is open.
        again: of each contribution, blocks that come once more, and count only then.
        is_measured: all of it was handed out to be judged.
        judgement: what was decided about it then.
    """

    version: int
    apply: Apply
    about: Mapping[Push, Any]
    left: set[int]
    open: set[Push]
    withdrawn: set[Push] = field(default_factory=set)
    is_held: bool = False
    again: Mapping[Push, Collection[int]] = field(default_factory=dict)
    is_measured: bool = False
    judgement: Any = None

    @property
    def pushes(self) -> list[Push]:
        """The contributions in it, by worker."""
        return sorted(push for push in self.apply.pushes if push not in self.withdrawn)


@dataclass(eq=False)
class UndoEntry:
    """An update that was made in a block, and may have to be undone.

    Args:
        parts: what arrived of each contribution.
        before: what the block was before; put there by whoever makes the update.
    """

    update: LoggedUpdate
    parts: Mapping[Push, Any]
    before: Any = None


class UndoLog:
    """The entries of all blocks of a shard, in the order in which updates were made."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._entries: dict[int, list[UndoEntry]] = {block: [] for block in blocks}
        self._undone: dict[int, list[UndoEntry]] = {}

    def of(self, block: int) -> Sequence[UndoEntry]:
        """The block's entries, the oldest first."""
        return self._entries[block]

    def holds(self, version: int) -> bool:
        """Whether an update may have to be made anew in some block, perhaps because of one before it."""
        return any(entry.update.version == version for entries in self._entries.values() for entry in entries)

    def write(self, block: int, update: LoggedUpdate, parts: Mapping[Push, Any]) -> UndoEntry | None:
        """An update is made in a block; its entry, or None if it need not be undone."""
        if not update.open and not self._entries[block]:
            return None
        entry = UndoEntry(update, parts)
        self._entries[block].append(entry)
        return entry

    def trim(self, block: int, most: int | None = None) -> None:
        """Erase what need not be undone any more.

        Args:
            most: no update of a later version; None for no bound.
        """
        entries, count = self._entries[block], 0
        while count < len(entries) and not (update := entries[count].update).open:
            if most is not None and update.version > most:
                break
            count += 1
        del entries[:count]

    def undo(self, block: int, update: LoggedUpdate) -> Sequence[UndoEntry]:
        """Take out all entries from that of `update` on, and return them; nothing if it was not made in this block."""
        entries = self._entries[block]
        first = next((i for i, entry in enumerate(entries) if entry.update is update), len(entries))
        undone, self._entries[block] = entries[first:], entries[:first]
        if undone:  # what is undone already was made later
            self._undone[block] = undone + self._undone.get(block, [])
        return undone

    def take_undone(self, block: int) -> Sequence[UndoEntry]:
        """The entries that are to be made anew, the oldest first, if there are any; nobody is told of them again."""
        return self._undone.pop(block, ())

    def forget(self, block: int) -> None:
        """Forget the block's earlier states."""
        self._entries[block] = []
