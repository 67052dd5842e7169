"""Chains of stores, each of which reads an object, or a stripe of it, from the one before it.

    a -> b -> c        a has all of it; b reads from a, c from b while b still reads
    d                  has all of it, and feeds nobody: the next reader gets d

A chain begins with a store that has all of the object, or makes it; each other store is fed by the one before it, so it
never has more than that one. A reader is put at the end of the shortest chain, so a holder that feeds nobody comes
first, readers that ask together become one pipeline, and readers that ask one after another double the holders. Once a
store has all of it, it begins a chain of its own, so those before it in its chain feed one store less.

Nobody is fed by a store that depends on it: a chain has no circle. A chain whose first store is lost is *orphaned*
unless the next one has all of it: nobody may join it, and it is put after another chain as soon as there is one. Then
each of its stores continues where it is.

Without I/O and without time. After the directory of Hoplite (Zhuang et al., SIGCOMM 2021, section 4.2), whose published
code attaches an orphaned chain twice and answers a second report of the same lost feeder with no address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@dataclass(frozen=True)
class StripeOrder:
    """The order of readers in the chain of one stripe of an object, which is another one in each stripe.

    In the first stripe a reader is put after those that ask at the same time, in the last one before them, and in
    between in between. So each reader has several feeders, and the loss of one stops it in some stripes alone. Whoever
    has begun to read is not put after one that has nothing yet.

    Args:
        stripe, stripes: its number, of so many.
        begun: the stores that have begun to read the object, or have read it.
    """

    stripe: int
    stripes: int
    begun: Collection[str]

    def skips(self, chain: list[str]) -> int:
        """Return how many of those at the end of a chain a new reader is put before."""
        begun = next((at for at in range(len(chain) - 1, 0, -1) if chain[at] in self.begun), 0)
        return round((len(chain) - 1 - begun) * self.stripe / max(1, self.stripes - 1))


class Chains:
    """The chains of one object.

    Stores are named by their addresses. Whoever calls tells each store whose feeder has changed: `feeders` says who
    feeds whom at any moment, and every method that may change it returns the stores for which it did.
    """

    def __init__(self) -> None:
        self._chains: list[list[str]] = []
        self._orphans: list[list[str]] = []
        self._whole: set[str] = set()
        self._apart: set[frozenset[str]] = set()

    def __contains__(self, store: str) -> bool:
        return any(store in chain for chain in self._all())

    @property
    def stores(self) -> set[str]:
        """Return the stores that have some of it, or wait for it."""
        return {store for chain in self._all() for store in chain}

    @property
    def whole(self) -> set[str]:
        """Return the stores that have all of it."""
        return set(self._whole)

    @property
    def is_orphaned(self) -> bool:
        """Whether nobody has all of it, or makes it, any more."""
        return not self._chains

    @property
    def feeders(self) -> dict[str, str | None]:
        """Return the feeder of each store that reads; None for the first of an orphaned chain."""
        fed: dict[str, str | None] = {chain[0]: None for chain in self._orphans}
        for chain in self._all():
            fed |= dict(zip(chain[1:], chain, strict=False))
        return fed

    def put(self, store: str, *, is_whole: bool = True) -> set[str]:
        """A store has all of it, or makes it now. Orphaned chains are put after it."""
        before = self.feeders
        self._take_out(store)
        self._chains.append([store])
        if is_whole:
            self._whole.add(store)
        self._adopt()
        return self._changed(before)

    def read(
        self, store: str, slow: Collection[str] = (), later: Collection[str] = (), order: StripeOrder | None = None
    ) -> set[str]:
        """A store asks for it: at the end of the shortest chain, but before the stores of it that are slow, or `later`.

        Without any chain it waits as an orphan.

        Args:
            store: that asks.
            slow, later: before which it is put.
            order: of its stripe, so that it has another feeder in each; None for an object without stripes.
        """
        before = self.feeders
        if store not in self:
            self._orphans.append([store])
        elif before.get(store, "") is None:  # it has waited, and perhaps the link that failed is there again
            self._apart = {pair for pair in self._apart if store not in pair}
        self._adopt(slow, later, order)
        return self._changed(before)

    def arrived(self, store: str) -> set[str]:
        """A store has all of it now: it begins a chain, and the one before it feeds it no more."""
        before = self.feeders
        self._whole.add(store)
        for chains in (self._chains, self._orphans):
            for chain in chains:
                if store in chain:
                    at = chain.index(store)
                    chains.remove(chain)
                    if at:  # it may have read from others before it was put here, so those before it may have less
                        chains.append(chain[:at])
                    self._chains.append(chain[at:])
                    self._adopt()
                    return self._changed(before) - {store}
        return self.put(store)

    def lose(self, store: str) -> set[str]:
        """A store is gone, or has let go of its copy."""
        before = self.feeders
        self._take_out(store)
        return self._changed(before)

    def feeder_failed(self, reader: str, feeder: str) -> set[str]:
        """A reader cannot read from its feeder, which others may still reach: the two are kept apart.

        The reader takes its feeder's place, and the feeder reads elsewhere, unless it has all of it or makes it. Where
        nobody else can feed one of the two, it waits as an orphan: for another chain, or until it asks again (`read`).
        A report that is out of date changes nothing.
        """
        before = self.feeders
        if before.get(reader) != feeder:
            return set()
        self._apart.add(frozenset((reader, feeder)))
        if feeder in before:
            self._take_out(feeder)
            self._orphans.append([feeder])
        else:  # it is the first of its chain
            chain = next(chain for chain in self._chains if chain[0] == feeder)
            self._orphans.append(chain[1:])
            del chain[1:]
        self._adopt()
        return self._changed(before)

    def restart(self, root: str) -> None:
        """All begins anew: nobody has any of it but `root`, which makes it; the readers keep their order."""
        readers = [store for chain in self._all() for store in chain if store != root]
        self._whole.clear()
        self._apart.clear()
        self._chains, self._orphans = [[root, *readers]], []

    def avoid(self, store: str, slow: Collection[str] = ()) -> set[str]:
        """Have nobody wait for a store that is slow: it is moved to the end of its chain.

        Those that read from the first of a chain are put after another chain, if there is one that does not begin with
        a slow store either.
        """
        before = self.feeders
        for chain in list(self._chains):
            if store in chain[1:]:
                chain.remove(store)
                chain.append(store)
            elif chain[1:] and store == chain[0] and any(other[0] not in {store, *slow} for other in self._chains):
                self._orphans.append(chain[1:])
                del chain[1:]
                self._adopt({store, *slow})
        return self._changed(before)

    def _adopt(self, slow: Collection[str] = (), later: Collection[str] = (), order: StripeOrder | None = None) -> None:
        """Put each orphaned chain after the shortest one that may feed it; where its first store can read from none,
        those after it do not wait with it, and it may then read from one of them."""
        todo = list(self._orphans)
        while todo:
            orphan = todo.pop(0)
            first = 0 if order is None else order.stripe % max(1, len(self._chains))
            chains = self._chains[first:] + self._chains[:first]
            places = [(chain, self._end_of(chain, orphan[0], slow, later, order)) for chain in chains]
            places = [(chain, at) for chain, at in places if frozenset((chain[at - 1], orphan[0])) not in self._apart]
            if places:
                chain, at = min(places, key=lambda place: (place[0][place[1] - 1] in slow, len(place[0])))
                chain[at:at] = orphan
                self._orphans.remove(orphan)
            elif chains and len(orphan) > 1:
                others = orphan[1:]
                del orphan[1:]
                self._orphans.append(others)
                todo[:0] = [others, orphan]

    def _end_of(
        self, chain: list[str], reader: str, slow: Collection[str], later: Collection[str], order: StripeOrder | None
    ) -> int:
        """Find the place of a reader in a chain: its end, but before slow ones unless it is slow, too."""
        at = next((at for at, store in enumerate(chain) if at and store in later), len(chain))
        if order is not None:
            at -= order.skips(chain)
        while reader not in slow and at > 1 and chain[at - 1] in slow:
            at -= 1
        return at

    def _take_out(self, store: str) -> None:
        self._whole.discard(store)
        for chains in (self._chains, self._orphans):
            for chain in chains:
                if store in chain:
                    was_first = chain[0] == store
                    chain.remove(store)
                    if not chain or (was_first and chains is self._chains and chain[0] not in self._whole):
                        chains.remove(chain)
                        if chain:
                            self._orphans.append(chain)
                            self._adopt()
                    return

    def _all(self) -> Iterator[list[str]]:
        yield from self._chains
        yield from self._orphans

    def _changed(self, before: dict[str, str | None]) -> set[str]:
        return {store for store, feeder in self.feeders.items() if before.get(store, store) != feeder}
