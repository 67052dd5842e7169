"""One object, as far as the directory knows it, and those that were deleted lately."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.objects.chains import Chains
    from offbeat.objects.reduction import Reduction
    from offbeat.objects.small_reduction import SmallReduction
    from offbeat.protocol.objects import ObjectMeta, ObjectName, PutObject, ReduceObjects, UsedSource

_MOST_MADE = 256
_MOST_DELETED = 16_384


@dataclass
class Entry:
    """The directory's knowledge of one object.

    Args:
        name: of it.
        meta: None as long as nobody has put it.
        digest: of its bytes; "" as long as nobody has all of them.
        inline: the bytes of a small one, as long as there is room for them; `inline_at` are the stores that got them.
        chains, generations: of each stripe.
        put_by: by store, the generations of what it has put, or is to make of small parts.
        made: generations that stores may have of it; the oldest go first.
        waiting: the stores that asked before it was put.
        twins: by store, a second put that cannot be compared yet.
        reduction: that makes it; `made_by` is what was asked for, also when it is over.
        used: the sources that it was made of.
        watched_by: the reduces that it is a source of.
        deleted_because: why it is to be deleted once no store reads it any more; "" if it is not.
        moved: the slow stores that nobody else waits for; `suspected` are those that perhaps are slow.
        done_at: the stores that have no use for it any more.
        begun: the stores that were seen to read it.
    """

    name: ObjectName
    meta: ObjectMeta | None = None
    digest: str = ""
    inline: bytes | None = None
    inline_at: set[str] = field(default_factory=set)
    chains: list[Chains] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    put_by: dict[str, tuple[int, ...]] = field(default_factory=dict)
    made: dict[tuple[int, ...], None] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)
    twins: dict[str, PutObject] = field(default_factory=dict)
    reduction: Reduction | SmallReduction | None = None
    made_by: ReduceObjects | None = None
    used: tuple[UsedSource, ...] = ()
    watched_by: list[ObjectName] = field(default_factory=list)
    deleted_because: str = ""
    moved: set[str] = field(default_factory=set)
    suspected: set[str] = field(default_factory=set)
    done_at: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)

    @property
    def whole_at(self) -> set[str]:
        """The stores that have all of it."""
        return set.intersection(*(chains.whole for chains in self.chains)) if self.chains else set()

    @property
    def makers(self) -> set[str]:
        """Return the stores that read no stripe from others: they have all of it, or make it."""
        first = [chains.stores - chains.feeders.keys() for chains in self.chains]
        return set.intersection(*first) if first else set()

    @property
    def stores(self) -> set[str]:
        """Return the stores that have some of it, or wait for it."""
        return set().union(*(chains.stores for chains in self.chains), self.waiting, self.twins, self.inline_at)

    @property
    def is_orphaned(self) -> bool:
        """Whether nobody has it, or makes it, in some stripe."""
        return not self.chains or any(chains.is_orphaned for chains in self.chains)

    @property
    def is_lost(self) -> bool:
        """Whether it was put, nobody has it any more, and nobody waits for it."""
        is_used = self.stores or self.reduction or self.watched_by or self.inline is not None
        return self.meta is not None and not is_used

    @property
    def known_generations(self) -> set[tuple[int, ...]]:
        """Return the generations in which stores may have it."""
        return {*self.made, *self.put_by.values(), tuple(self.generations)}

    def note_made(self, generations: Iterable[int]) -> tuple[int, ...]:
        """Note that stores may have it in these generations, and return them."""
        made = tuple(generations)
        self.made[made] = None
        if len(self.made) > _MOST_MADE:
            del self.made[next(iter(self.made))]
        return made


class Tombstones:
    """The generations of objects that were deleted lately: a store that was away might still have one of them."""

    def __init__(self) -> None:
        self._deleted: dict[tuple[ObjectName, tuple[int, ...]], None] = {}  # the oldest first

    def __contains__(self, put: PutObject) -> bool:
        return (put.name, put.generations) in self._deleted

    def add(self, entry: Entry) -> None:
        """An object was deleted."""
        for generations in entry.known_generations:
            self._deleted[entry.name, generations] = None
        while len(self._deleted) > _MOST_DELETED:
            del self._deleted[next(iter(self._deleted))]
