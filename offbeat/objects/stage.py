"""One stage of a reduce on its store: what its children send is added to its own source, row by row.

    row 0: the own source        row 1: + what child 0 sends        ...        row n: all of it, which is sent on

All rows after the first lie in the same memory: element p of a row is written once element p of the row before is
there, and no row is read by anybody but the next one. So children may be added in their order while all of them still
send. Rows, children and what is sent on may have different dtypes (`edge_dtypes`); if what is sent on is not of the
dtype in which the stage adds, it is a rounded copy of the last row, in memory of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from offbeat.objects.edge_dtypes import EdgeDtypes
from offbeat.objects.stripes import cut
from offbeat.protocol.object_lanes import ALL_BYTES
from offbeat.protocol.objects import ITEM_BYTES
from offbeat.wire.lane import AddingSink, CopyingSink, GrowingBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.objects import FeedStage, RunStage
    from offbeat.wire.lane import StagingPool

CREDIT_BYTES = 8 << 20
"""That a child may send ahead of what it is added to."""


class Arithmetic(Protocol):
    """The Protocol of what adds parts of objects in one dtype."""

    def add(
        self, out: memoryview, own: memoryview, received: memoryview | bytearray, own_dtype: str, received_dtype: str
    ) -> None:
        """out = own + received, or what else the op of the reduce is; `out` may be `own`, which may be empty."""

    def divide(self, memory: memoryview, divisor: int) -> None:
        """Divide what is there."""

    def convert(self, out: memoryview, memory: memoryview, dtype: str, to: str) -> None:
        """Write elements of one dtype into `out` as another one."""


class Stage:
    """One stage.

    Args:
        order: what it is.
        own: the source that it begins with; None if it begins with what child 0 sends.
        target: where the sum belongs, at the root; None elsewhere.
        arithmetic: adds parts of the stripe, in the dtype of the rows.
        blocks: memory for what waits to be added.
        sums: memory for the rows; `free` gives it back.

    Attributes:
        out: the sum, as far as it is there.
        feeds: by child, what feeds it.
        arrived, failed: the children whose bytes are all in the sum, and those that cannot be read.
    """

    def __init__(
        self,
        order: RunStage,
        own: GrowingBuffer | None,
        target: memoryview | None,
        arithmetic: Arithmetic,
        *,
        blocks: StagingPool,
        sums: StagingPool,
    ) -> None:
        self.order, self._arithmetic, self._blocks, self._sums = order, arithmetic, blocks, sums
        self._dtypes = dtypes = EdgeDtypes.of(order.meta.dtype, order.op, order.wire)
        self._out_dtype = dtypes.inner if target is None else dtypes.source
        self.feeds: dict[int, FeedStage] = {}
        self.arrived: set[int] = set()
        self.failed: set[int] = set()
        self._taken: list[bytearray] = []
        begin, end = range_of(order)
        self._numel = (end - begin) // order.meta.item_bytes
        out = target if target is not None else self._memory(self._out_dtype)
        memory = out if self._out_dtype == dtypes.total else self._memory(dtypes.total)
        after = [GrowingBuffer(memory, 0, order.attempt) for _ in range(order.children)]
        self._rows: list[GrowingBuffer | None] = [own, *after]
        self.out = GrowingBuffer(out, 0, order.attempt)
        self._sinks: dict[int, Callable[[], None]] = {}
        self._end_passing: Callable[[], None] = lambda: None
        self._pass_on()

    def sink(self, child: int, done: Callable[[], None]) -> tuple[CopyingSink | AddingSink, int]:
        """Make the sink of a child, and return it with the byte from which on the child is to send."""
        before, row, dtype = self._rows[child], self._rows[child + 1], self._dtype_of(child)
        assert row is not None
        total = self._dtypes.total
        start = row.progress // ITEM_BYTES[total] * ITEM_BYTES[dtype]
        if before is None and dtype == total:
            return CopyingSink(row, done, start=start), start
        if (end_before := self._sinks.pop(child, None)) is not None:
            end_before()  # what it has and has not added yet comes again
        own_dtype = self._dtypes.source if child == 0 else total
        own = before or GrowingBuffer(memoryview(b""))
        sink = AddingSink(
            own,
            row,
            partial(self._arithmetic.add, own_dtype=own_dtype, received_dtype=dtype),
            self._blocks,
            done,
            start=start,
            item_bytes=(ITEM_BYTES[own_dtype] if before else 0, ITEM_BYTES[dtype], ITEM_BYTES[total]),
        )
        self._sinks[child] = sink.end
        return sink, start

    def stop_adding(self, child: int) -> int:
        """Add no more of what a child has sent so far; returns the number of elements that are in the sum."""
        if (end := self._sinks.pop(child, None)) is not None:
            end()
        row = self._rows[child + 1]
        assert row is not None
        return row.progress // ITEM_BYTES[self._dtypes.total]

    def before(self, child: int) -> GrowingBuffer | None:
        """Return the row that a child is added to; None if it is the first."""
        return self._rows[child]

    def allowed(self, child: int) -> int:
        """Return how many of its bytes a child may send, so that few of them wait to be added."""
        if (before := self._rows[child]) is None:
            return ALL_BYTES
        own_dtype = self._dtypes.source if child == 0 else self._dtypes.total
        return before.progress // ITEM_BYTES[own_dtype] * ITEM_BYTES[self._dtype_of(child)] + CREDIT_BYTES

    def close(self, order: RunStage) -> None:
        """No more children come than this says."""
        self.order = order
        self._pass_on()

    def end(self) -> None:
        """End the stage."""
        for end in (*self._sinks.values(), self._end_passing):
            end()

    def free(self, *, is_sent: bool) -> None:
        """Give the memory of the sums back, but what is still being sent."""
        for memory in self._taken:
            if not (is_sent and memory is self.out.memory.obj):
                self._sums.give(memory)
        self._taken.clear()

    def _memory(self, dtype: str) -> memoryview:
        self._taken.append(self._sums.take(self._numel * ITEM_BYTES[dtype]))
        return memoryview(self._taken[-1])

    def _dtype_of(self, child: int) -> str:
        """The dtype of what a child sends."""
        return self._dtypes.inner if self.feeds[child].source is None else self._dtypes.leaf

    def _pass_on(self) -> None:
        """Have `out` grow as the last row does."""
        row = self._rows[self.order.children]
        if row is None:
            return
        row_dtype = self._dtypes.total if self.order.children else self._dtypes.source  # of its own source alone
        row_bytes, out_bytes = ITEM_BYTES[row_dtype], ITEM_BYTES[self._out_dtype]

        def advance() -> None:
            begin, end = self.out.progress // out_bytes, row.progress // row_bytes
            if begin == end:
                return
            ready, out = row.memory[begin * row_bytes : end * row_bytes], self.out.memory
            if self.order.divisor > 1:
                self._arithmetic.divide(ready, self.order.divisor)
            if row.memory is not out:
                self._arithmetic.convert(out[begin * out_bytes : end * out_bytes], ready, row_dtype, self._out_dtype)
            self.out.grow(end * out_bytes)

        self._end_passing()
        self._end_passing = row.follow(advance)
        advance()


def range_of(order: RunStage) -> tuple[int, int]:
    """The bytes of an order's stripe in each of the sources."""
    return cut(order.meta.size_bytes, order.meta.stripes, order.meta.item_bytes)[order.stripe]
