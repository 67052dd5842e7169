"""One stage of a reduce on its store: what its children send is added to its own source, row by row.

    row 0: the own source        row 1: + what child 0 sends        ...        row n: all of it, which is sent on

All rows after the first lie in the same memory: byte p of a row is written once byte p of the row before is there, and
no row is read by anybody but the next one. So children may be added in their order while all of them still send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from offbeat.wire.lane import AddingSink, CopyingSink, GrowingBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.objects import FeedStage, RunStage
    from offbeat.wire.lane import StagingPool

CREDIT_BYTES = 8 << 20
"""That a child may send ahead of what it is added to."""


class Arithmetic(Protocol):
    """The Protocol of what adds parts of objects of one dtype."""

    def add(self, out: memoryview, own: memoryview, received: bytearray) -> None:
        """out = own + received, or what else the op of the reduce is; `out` may be `own`."""

    def divide(self, memory: memoryview, divisor: int) -> None:
        """Divide what is there."""


class Stage:
    """One stage.

    Args:
        order: what it is.
        own: the source that it begins with; None if it begins with what child 0 sends.
        memory: where the sum belongs; it may be that of `own` if nobody else reads that.
        arithmetic: adds parts of the stripe.
        pool: of memory for blocks.

    Attributes:
        out: the sum, as far as it is there.
        feeds: by child, what feeds it.
        arrived, failed: the children whose bytes are all in the sum, and those that cannot be read.
    """

    def __init__(
        self, order: RunStage, own: GrowingBuffer | None, memory: memoryview, arithmetic: Arithmetic, pool: StagingPool
    ) -> None:
        self.order, self._arithmetic, self._pool = order, arithmetic, pool
        self.feeds: dict[int, FeedStage] = {}
        self.arrived: set[int] = set()
        self.failed: set[int] = set()
        generation = order.attempt
        after = [GrowingBuffer(memory, 0, generation) for _ in range(order.children)]
        self._rows: list[GrowingBuffer | None] = [own, *after]
        self.out = GrowingBuffer(memory, 0, generation)
        self._sinks: dict[int, Callable[[], None]] = {}
        self._end_passing: Callable[[], None] = lambda: None
        self._pass_on()

    def sink(self, child: int, done: Callable[[], None]) -> tuple[CopyingSink | AddingSink, int]:
        """Make the sink of a child, and return it with the byte from which on the child is to send."""
        before, row = self._rows[child], self._rows[child + 1]
        assert row is not None
        if before is None:
            return CopyingSink(row, done, start=row.progress), row.progress
        if (end_before := self._sinks.pop(child, None)) is not None:
            end_before()  # what it has and has not added yet comes again
        sink = AddingSink(before, row, self._arithmetic.add, self._pool, done, start=row.progress)
        self._sinks[child] = sink.end
        return sink, row.progress

    def before(self, child: int) -> GrowingBuffer | None:
        """Return the row that a child is added to; None if it is the first."""
        return self._rows[child]

    def close(self, order: RunStage) -> None:
        """No more children come than this says."""
        self.order = order
        self._pass_on()

    def end(self) -> None:
        """End the stage."""
        for end in (*self._sinks.values(), self._end_passing):
            end()

    def _pass_on(self) -> None:
        """Have `out` grow as the last row does."""
        last = self._rows[self.order.children]
        if last is None:
            return
        if self.order.children == 0:  # of its own source alone
            self.out.memory[:] = last.memory
            self.out.grow(len(self.out.memory))
            return
        row = last

        def advance() -> None:
            if self.order.divisor > 1 and row.progress > self.out.progress:
                self._arithmetic.divide(row.memory[self.out.progress : row.progress], self.order.divisor)
            self.out.grow(row.progress)

        self._end_passing()
        self._end_passing = row.follow(advance)
        advance()
