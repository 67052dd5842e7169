"""The order in which complete buckets are issued.

On an ordered fabric exchanges match by order of issue: the order follows from plan and layout, never from what arrives
first, or workers wait for each other for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.layout import Layout


def first_in_first_out(layout: Layout) -> Sequence[int]:
    """The order in which buckets are expected to be complete."""
    return range(len(layout.buckets))


class IssueQueue:
    """Holds complete buckets back until it is their turn. Call order, each backward: `restart`, `add` ..., `flush`.

    Args:
        order: of the buckets' indices.
        issue: issues the bucket of an index.
    """

    def __init__(self, order: Sequence[int], issue: Callable[[int], None]) -> None:
        self._order, self._issue = tuple(order), issue
        self._complete: set[int] = set()
        self._issued = 0

    def restart(self) -> None:
        """Forget what was complete: another backward begins."""
        self._complete.clear()
        self._issued = 0

    def add(self, index: int) -> None:
        """Issue a bucket that is complete, and those that have waited for it; or hold it back."""
        self._complete.add(index)
        while self._issued < len(self._order) and self._order[self._issued] in self._complete:
            self._issue_next()

    def flush(self) -> None:
        """Issue all that are left."""
        while self._issued < len(self._order):
            self._issue_next()

    def has_issued(self, index: int) -> bool:
        """Whether a bucket is under way."""
        return index in self._order[: self._issued]

    def _issue_next(self) -> None:
        self._issue(self._order[self._issued])
        self._issued += 1
