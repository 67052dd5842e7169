"""A split group at one of its holders: the fit whose sums a carrier brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.groups.carrier import Carrier, SumUnderWay
    from offbeat.groups.summing import Summand, Summing

T = TypeVar("T")


class SummedShard(Generic[T]):
    """One holder's part of a fit.

    Args:
        name: of the fit, the same at all holders, and of no other one.
        holders: the ranks of those who have rows, in the order in which their parts are added.
        work: on the rows that are here.
        tell: called on any thread when `is_ready` may have become true.

    Attributes:
        has_ended: whether `result` is there.
    """

    result: T

    def __init__(
        self, carrier: Carrier, name: str, holders: Sequence[int], work: Summing[T], tell: Callable[[], None]
    ) -> None:
        self._carrier, self._name, self.holders, self._work, self._tell = carrier, name, list(holders), work, tell
        self._turn, self.has_ended = 0, False
        self._before: list[str] = []
        self._total = self._add(next(work))

    @property
    def is_ready(self) -> bool:
        """Whether the sum is there with which the fit continues."""
        return self._total.future.done()

    def advance(self) -> None:
        """Continue, up to the next part of a sum or the end.

        Raises:
            NetworkError: if a worker was lost.
        """
        total = self._total.future.get()
        for name in self._before:  # all holders have that: else they would have no part in this one
            self._carrier.drop(name)
        self._before = self._total.own
        try:
            self._total = self._add(self._work.send(total))
        except StopIteration as end:
            self.result, self.has_ended = end.value, True

    def _add(self, part: Summand) -> SumUnderWay:
        self._turn += 1
        total = self._carrier.reduce(f"{self._name}/{self._turn}", part.values, self.holders, part.op)
        total.future.add_done_callback(self._tell)
        return total
