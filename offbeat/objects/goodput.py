"""The rates at which stores send and receive, as seen between pairs of them.

What passes from one store to another is a lower bound of what either can do, so a store is as fast as the fastest of
the pairs that it was seen in lately. A slow pair alone does not say which of the two is slow.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_PARTNERS, _STORES = 8, 4096
_SLOW = 0.5  # of what half of the stores can do


class Goodput:
    """The rates of all stores."""

    def __init__(self) -> None:
        self._out: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()
        self._in: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()

    def saw(self, feeder: str, reader: str, bytes_per_s: float) -> None:
        """Note the rate from one store to another, seen while there was enough to send."""
        for rates, store, partner in ((self._out, feeder, reader), (self._in, reader, feeder)):
            seen = rates.setdefault(store, OrderedDict())
            seen[partner] = bytes_per_s
            seen.move_to_end(partner)
            rates.move_to_end(store)
            if len(seen) > _PARTNERS:
                seen.popitem(last=False)
            if len(rates) > _STORES:
                rates.popitem(last=False)

    def forget(self, store: str) -> None:
        """A store is gone."""
        self._out.pop(store, None)
        self._in.pop(store, None)

    def slow_of(self, feeder: str, reader: str, bytes_per_s: float) -> str:
        """Tell the slow store of a slow pair: the one that was never faster, or the reader if that is true of both."""
        feeds = max((rate for to, rate in self._out.get(feeder, {}).items() if to != reader), default=0.0)
        reads = max((rate for of, rate in self._in.get(reader, {}).items() if of != feeder), default=0.0)
        return feeder if reads > 2 * bytes_per_s and feeds <= 2 * bytes_per_s else reader

    def usual(self, but: Collection[str]) -> float:
        """Return what half of the stores can receive or send, in bytes per second, but for some; 0 if unknown."""
        best = [max(seen.values()) for rates in (self._in, self._out) for at, seen in rates.items() if at not in but]
        return statistics.median(best) if best else 0.0

    @property
    def slow(self) -> set[str]:
        """The stores that receive, or send, at less than half of what half of all can."""
        found = set()
        for rates in (self._in, self._out):
            best = {store: max(seen.values()) for store, seen in rates.items()}
            if len(best) > 1:
                usual = statistics.median(best.values())
                found |= {store for store, rate in best.items() if rate < _SLOW * usual}
        return found
