"""Which contribution has arrived, which update waits for it, and who waits for the update; per block, without I/O.

A policy decides about whole contributions, often before they have arrived. The ledger carries that out block by block,
so that one block travels back to a worker while the next one of its contribution is still on its way.

Rules:

* An update is made in a block once that block of all its contributions is there; if it is `in_order`, once all
  earlier updates of the block have been made as well.
* A released worker is given a block once the update with its own contribution has been made there; if that was dropped
  or there was none, once all updates so far have.
* Each block of a contribution is taken once, and contributions of a worker come in order, one at a time.
* A worker that is lost takes along the blocks that have not arrived; updates go on without them.
* A mark is put behind the updates so far. No block is updated beyond it before it has been updated up to it, whatever
  the order of updates, and has then been kept: what is kept of all blocks together is one version of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from offbeat.sync import Apply, Push


@dataclass(frozen=True)
class Make:
    """Update `block` with the weighted mean of `parts`.

    Args:
        version: of the parameters, counting updates from 1.
        parts: of each contribution what was said about it and what arrived, by worker; empty if all were lost.
        rate: of the `Apply`.
    """

    block: int
    version: int
    parts: tuple[tuple[Any, Any], ...]
    rate: float


@dataclass(frozen=True)
class Give:
    """Send `block` to `worker`, which was released for `step`."""

    block: int
    worker: int
    step: int


@dataclass(frozen=True)
class Keep:
    """Keep what `block` is now: it has been updated up to the mark, and no further."""

    block: int


@dataclass(frozen=True)
class Loss:
    """A contribution that did not arrive whole.

    Args:
        blocks: how many of its blocks did not.
    """

    push: Push
    blocks: int


@dataclass(eq=False)
class Arrival:
    """A contribution on its way: what is there, by block; None where it has been used or is not wanted."""

    blocks: dict[int, Any] = field(default_factory=dict)
    wanted: bool = True


@dataclass(eq=False)
class Update:
    """An `Apply`, and the blocks in which it has not been made."""

    version: int
    apply: Apply
    about: Mapping[Push, Any]
    left: set[int]


@dataclass(eq=False)
class Taker:
    """A released worker: for which step, after which updates, and the blocks it has not been given."""

    step: int
    after: tuple[Update, ...]
    left: set[int]


class Ledger:
    """The books of one shard. After any call, `due` says what can be done now.

    Args:
        blocks: indices of the blocks it holds.
        version: updates before this one began.
    """

    def __init__(self, blocks: Iterable[int], version: int = 0) -> None:
        self._blocks = dict.fromkeys(blocks)  # in order, and found at once
        self._next: dict[int, int] = {}  # worker: number of the contribution it may push
        self._arrivals: dict[Push, Arrival] = {}
        self._updates: list[Update] = []  # under way, by version
        self._takers: dict[int, Taker] = {}
        self._applied: dict[int, int] = {}  # worker: its last contribution that is in an update
        self.version = self._mark = version
        self._unkept: set[int] = set()  # blocks that have not been kept since the mark

    def admit(self, worker: int, clock: int, *, stayed: bool = False) -> None:
        """The worker takes part; its next contribution has the number `clock`.

        Args:
            stayed: it had only stepped out, and what has come of that contribution is part of it.
        """
        # What it began to push in an earlier life, and nobody had heard of when it was lost.
        for push in [push for push in self._arrivals if push[0] == worker and push[1] >= clock + stayed]:
            del self._arrivals[push]
        arrival = self._arrivals.get((worker, clock))
        self._next[worker] = clock + (arrival is not None and len(arrival.blocks) == len(self._blocks))

    def next(self, worker: int) -> int | None:
        """Number of the contribution that is next or on its way; None if the worker does not take part."""
        return self._next.get(worker)

    def expects(self, push: Push, block: int) -> bool:
        """Whether this block of a contribution is still to come."""
        worker, clock = push
        if self._next.get(worker) != clock or block not in self._blocks:
            return False
        return push not in self._arrivals or block not in self._arrivals[push].blocks

    def is_past(self, push: Push) -> bool:
        """Whether the worker has brought this contribution before, or does not take part any more."""
        worker, clock = push
        return worker not in self._next or clock < self._next[worker]

    def arrive(self, push: Push, block: int, part: Any) -> int:
        """A block of a contribution that is expected is here; returns how many are still to come."""
        assert self.expects(push, block), (push, block)
        arrival = self._arrivals.setdefault(push, Arrival())
        arrival.blocks[block] = part if arrival.wanted else None
        missing = len(self._blocks) - len(arrival.blocks)
        if not missing:
            self._next[push[0]] += 1
            if not arrival.wanted:
                del self._arrivals[push]
        return missing

    def apply(self, apply: Apply, about: Mapping[Push, Any]) -> None:
        """The policy's decision about contributions that have arrived or will.

        Args:
            about: what is to be handed on about each.
        """
        self.version += 1
        for push in apply.pushes:
            self._arrivals.setdefault(push, Arrival())
            self._applied[push[0]] = push[1]
        self._updates.append(Update(self.version, apply, about, set(self._blocks)))

    def mark(self) -> None:
        """Have each block kept as it is after the updates so far; the last mark must have been reached everywhere."""
        assert not self._unkept, self._unkept
        self._mark, self._unkept = self.version, set(self._blocks)

    def drop(self, push: Push, *, coming: bool) -> None:
        """The contribution is not used.

        Args:
            coming: whether the worker may have begun to push it; what still comes is discarded.
        """
        worker, clock = push
        if self._next.get(worker) != clock:  # it is here, whole
            self._arrivals.pop(push, None)
        elif coming:
            arrival = self._arrivals.setdefault(push, Arrival())
            arrival.wanted, arrival.blocks = False, dict.fromkeys(arrival.blocks)
        else:
            self._next[worker] = clock + 1

    def release(self, worker: int, step: int) -> None:
        """The worker may have the parameters for `step`."""
        own = (worker, step - 1)
        after = tuple(update for update in self._updates if own in update.apply.pushes)
        if self._applied.get(worker) != step - 1:
            after = tuple(self._updates)
        self._takers[worker] = Taker(step, after, set(self._blocks))

    def lose(self, worker: int, *, stays: bool = False) -> Loss | None:
        """The worker is gone, until it is admitted again.

        Args:
            stays: it only steps out; what has come of a contribution that nobody has decided about is kept.
        """
        clock = self._next.pop(worker, None)
        self._takers.pop(worker, None)
        self._applied.pop(worker, None)
        if clock is None or (arrival := self._arrivals.get((worker, clock))) is None:
            return None
        push, missing = (worker, clock), len(self._blocks) - len(arrival.blocks)
        is_decided = any(push in update.apply.pushes for update in self._updates)
        if stays and not is_decided:
            return None
        for block in self._blocks:
            arrival.blocks.setdefault(block, None)
        if not is_decided:
            del self._arrivals[push]
        return Loss(push, missing) if arrival.wanted else None

    def due(self, block: int | None = None) -> Iterator[Make | Keep | Give]:
        """What can be done now, in order; it counts as done when it is yielded.

        Args:
            block: the only one that changed since the last call; any may have if None.
        """
        for one in self._blocks if block is None else (block,):
            yield from self._makes(one)
            if self._is_at_mark(one):
                self._unkept.discard(one)
                yield Keep(one)
                yield from self._makes(one)
            yield from self._gives(one)
        for update in [update for update in self._updates if not update.left]:
            self._updates.remove(update)
            for push in update.apply.pushes:
                self._arrivals.pop(push, None)

    def _is_at_mark(self, block: int) -> bool:
        return block in self._unkept and not any(block in u.left for u in self._updates if u.version <= self._mark)

    def _makes(self, block: int) -> Iterator[Make]:
        first = True  # all earlier updates have been made here
        for update in self._updates:
            if block not in update.left:
                continue
            if block in self._unkept and update.version > self._mark:
                return
            pushes = sorted(update.apply.pushes)
            if (first or not update.apply.in_order) and all(block in self._arrivals[push].blocks for push in pushes):
                update.left.discard(block)
                parts = []
                for push in pushes:
                    blocks = self._arrivals[push].blocks
                    if blocks[block] is not None:
                        parts.append((update.about[push], blocks[block]))
                    blocks[block] = None
                yield Make(block, update.version, tuple(parts), update.apply.rate)
            else:
                first = False

    def _gives(self, block: int) -> Iterator[Give]:
        for worker, taker in list(self._takers.items()):
            if block in taker.left and all(block not in update.left for update in taker.after):
                taker.left.discard(block)
                if not taker.left:
                    del self._takers[worker]
                yield Give(block, worker, taker.step)
