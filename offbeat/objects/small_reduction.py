"""A reduce of small objects: the directory has their bytes, and the store that asks adds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.protocol.objects import ReduceSmall, UsedSource

if TYPE_CHECKING:
    from offbeat.objects.stripe_sum import Instructions
    from offbeat.protocol.objects import ObjectMeta, ObjectName, ReduceObjects

SMALL_SUM_BYTES = 256 << 10
"""The most bytes that the parts of a small sum have together; stores read larger sums from each other."""


class SmallReduction:
    """One reduce, of sources that are small or not there yet.

    Args:
        request: what is asked.
        caller: the store that asks.
        generation: of the sum that it makes.

    Attributes:
        meta: of the target; None as long as no source is there.
        is_late: whether the patience is over.
    """

    def __init__(self, request: ReduceObjects, caller: str, generation: int) -> None:
        self.request, self.caller, self._generation = request, caller, generation
        self.meta: ObjectMeta | None = None
        self._parts: dict[ObjectName, bytes] = {}
        self._is_over = self.is_late = False

    @property
    def used(self) -> tuple[ObjectName, ...]:
        """The sources that are in the sum, or are to be; in the order in which they are added."""
        if self.request.in_order:
            return tuple(source for source in self.request.sources if source in self._parts)
        return tuple(self._parts)

    @property
    def used_sources(self) -> tuple[UsedSource, ...]:
        """Return these, as they are told."""
        return tuple(UsedSource(source) for source in self.used)

    @property
    def there(self) -> set[ObjectName]:
        """Return the sources that are there."""
        return set(self._parts)

    @property
    def lacking(self) -> int:
        """Return how many more are needed."""
        return max(0, self.request.count - len(self._parts))

    def ready(self, source: ObjectName, data: bytes) -> Instructions:
        """A source is there."""
        if self._is_over or source in self._parts:
            return []
        self._parts[source] = data
        if len(self._parts) == self.request.count:
            return self._sum()
        return self.expire() if self.is_late else []

    def lost(self, store: str) -> Instructions:
        """A store is gone, which changes nothing: the bytes are here."""
        return []

    def expire(self) -> Instructions:
        """The patience is over: make the sum of the sources that are there, as soon as these are enough."""
        self.is_late = True
        is_enough = len(self._parts) >= self.request.least and not self.request.in_order
        return self._sum() if is_enough and not self._is_over else []

    def end(self) -> Instructions:
        """The sum is not wanted any more."""
        self._is_over = True
        return []

    def _sum(self) -> Instructions:
        assert self.meta is not None
        self._is_over = True
        parts = tuple(self._parts[source] for source in self.used)
        order = ReduceSmall(
            name=self.request.name,
            meta=self.meta,
            generation=self._generation,
            op=self.request.op,
            used=self.used,
            parts=parts,
        )
        return [(self.caller, order)]
