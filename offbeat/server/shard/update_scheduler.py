"""The schedule of updates: which contribution has arrived, which update waits for it, and who waits for the update; per
block, without I/O.

A policy decides about whole contributions, often before they have arrived. The scheduler carries that out block by
block, so that one block travels back to a worker while the next one of its contribution is still on its way. What is
half here when its worker is lost is taken out again.

Rules:

* An update is made in a block once that block of all its contributions is there; if it is `in_order`, once all
  earlier updates of the block have been made as well.
* A released worker is given a block once the update with its own contribution has been made there; if that was dropped
  or there was none, once all updates so far have. A validator that comes while updates wait to be judged is given what
  is there without them: it may be the one that they wait for.
* Each block of a contribution is taken once, and contributions of a worker come in order, one at a time. Blocks may
  come before anybody has heard of the contribution, while their worker still computes others: then nothing is made of
  them. Of those that have changed when it is announced (`again`) a second one is taken, and only that counts.
* A contribution is *open* until the coordinator says that it is whole at all shards (`commit`), or that it never will
  be (`withdraw`), because its worker is lost. Of a lost worker a shard takes nothing more, and no update goes on
  without it before that word. One that is withdrawn is in no block: updates that have it are undone, and made anew from
  what the others brought; if that is nothing they change nothing, but they count.
* No more than a few updates for each worker are kept to be undone. If that is not enough, because a contribution takes
  very long to arrive, its update is taken out again, together with those that have to come after it, and is made once
  it is whole.
* Where updates are judged, each is held until all its contributions are committed or withdrawn, and if it is `in_order`
  until all earlier ones have been made. Then it is handed out, whole, to be measured, and is made in all blocks once it
  has been judged. So none is ever undone; and since commits, judgements and marks come to all shards in one order, all
  measure the same contributions, beside the same updates that were made before.
* A mark is put behind the updates so far. No block is updated beyond it before it has been updated up to it, whatever
  the order of updates; once nothing in those is open, it is kept as it was there. So what is kept of all blocks is one
  version of the parameters, without half of anything. A mark with a contribution that is withdrawn is given up.

Who was given blocks with a contribution that is withdrawn is given them again, all with a greater `number`: how many
contributions were withdrawn, since the worker was released, from updates that it waits for, or that come before those
in order. A worker goes on when it has all blocks with one number. Why that is right, with one shard or several:

* All shards hear the same decisions in the same order, and an update with something open is known to all of them. So
  they count alike, and each worker's number ends at the same N everywhere: each block is given with N at last, and
  whoever sees an N waits for the others. Nobody waits for ever.
* Nobody goes on too early. What is withdrawn was incomplete at some shard when that one heard that the worker is gone;
  there is a block there which was not updated before the withdrawal was heard, and was given with the number that
  counts it. So no smaller number is ever there in all blocks.

Without order (`ASP`) a worker waits for its own update only, and may have computed on others' contributions that are
withdrawn later, as it may have computed on none of them: the server's parameters end without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offbeat.server.shard.undo_log import LoggedUpdate, UndoLog

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from offbeat.server.shard.undo_log import UndoEntry
    from offbeat.sync import Apply, Push

_MOST_ENTRIES = 4  # that are kept to be undone in a block, for each worker


@dataclass(frozen=True)
class ApplyUpdate:
    """Update `block` with what is made of `parts`.

    Args:
        version: of the parameters, counting updates from 1.
        parts: of each contribution what was said about it and what arrived, by worker; empty if all were withdrawn.
            What arrived is not to be changed.
        rate: of the `Apply`.
        entry: where what the block was before is to be put; None if nobody will want it.
        judgement: what was decided about the update; None if updates are not judged.
    """

    block: int
    version: int
    parts: tuple[tuple[Any, Any], ...]
    rate: float
    entry: UndoEntry | None = field(default=None, compare=False, repr=False)
    judgement: Any = None


@dataclass(frozen=True)
class MeasureUpdate:
    """Measure an update whose contributions are here, whole; it waits to be judged.

    Args:
        version: of the parameters after it.
        blocks: parts of each, as of `ApplyUpdate`.
        rate: of the `Apply`.
    """

    version: int
    blocks: Mapping[int, tuple[tuple[Any, Any], ...]]
    rate: float = 1.0


@dataclass(frozen=True)
class UndoUpdate:
    """Have `block` be what it was `before` an update; what is to be made anew follows."""

    block: int
    before: Any


@dataclass(frozen=True)
class SendBlock:
    """Send `block` to `worker`, which was released for `step`.

    Args:
        number: see above.
    """

    block: int
    worker: int
    step: int
    number: int = 0


@dataclass(frozen=True)
class CaptureBlock:
    """Keep `block` as it is after the updates up to the mark.

    Args:
        before: what it was before the next one; None if that has not been made.
    """

    block: int
    before: Any = None


@dataclass(eq=False)
class IncomingContribution:
    """A contribution on its way: what is there, by block; None where it has been used or is not wanted.

    Args:
        is_whole: it has arrived at all shards.
        again: blocks that have come to take the place of an earlier one.
    """

    blocks: dict[int, Any] = field(default_factory=dict)
    wanted: bool = True
    is_whole: bool = False
    again: set[int] = field(default_factory=set)


@dataclass(eq=False)
class PendingPull:
    """A released worker: for which step, after which updates, and the blocks it has not been given."""

    step: int
    after: tuple[LoggedUpdate, ...]
    left: set[int]
    number: int = 0

    def needs(self, update: LoggedUpdate) -> bool:
        """Whether it waits for this one, or for one that comes after it in order."""
        return update in self.after or any(a.apply.in_order and update.version < a.version for a in self.after)


class UpdateScheduler:
    """The schedule of one shard's updates. After any call, `due` says what can be done now.

    Args:
        blocks: indices of the blocks it holds.
        version: updates before this one began.
        judges: each update is judged before it is made.
    """

    def __init__(self, blocks: Iterable[int], version: int = 0, *, judges: bool = False) -> None:
        self._judges = judges
        self._blocks = dict.fromkeys(blocks)  # in order, and found at once
        self._next: dict[int, int] = {}  # worker: number of the contribution it may push
        self._arrivals: dict[Push, IncomingContribution] = {}
        self._updates: list[LoggedUpdate] = []  # not made everywhere, or open, by version
        self._undo_log = UndoLog(self._blocks)
        self._pulls: dict[int, PendingPull] = {}
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

    def expects(self, push: Push, block: int, *, again: bool = False) -> bool:
        """Whether this block of a contribution is still to come, or may come `again`."""
        worker, clock = push
        if self._next.get(worker) != clock or block not in self._blocks:
            return False
        if (arrival := self._arrivals.get(push)) is None:
            return True
        return block not in (arrival.again if again else arrival.blocks)

    def is_past(self, push: Push) -> bool:
        """Whether the worker has brought this contribution before, or does not take part any more."""
        worker, clock = push
        return worker not in self._next or clock < self._next[worker]

    def awaited(self) -> list[Push]:
        """List the contributions in updates that have not come whole, of workers that take part."""
        pushes = [push for update in self._updates for push in update.open] if self._blocks else []
        return [push for push in pushes if self._next.get(push[0]) == push[1]]

    def arrive(self, push: Push, block: int, part: Any, *, again: bool = False) -> int:
        """A block of a contribution that is expected is here; returns how many are still to come."""
        assert self.expects(push, block, again=again), (push, block)
        arrival = self._arrivals.setdefault(push, IncomingContribution())
        if again:
            arrival.again.add(block)
        arrival.blocks[block] = part if arrival.wanted else None
        missing = len(self._blocks) - len(arrival.blocks)
        if not missing:
            self._next[push[0]] += 1
            if not arrival.wanted:
                del self._arrivals[push]
        return missing

    def apply(
        self, apply: Apply, about: Mapping[Push, Any], again: Mapping[Push, Collection[int]] | None = None
    ) -> None:
        """The policy's decision about contributions that have arrived or will.

        Args:
            about: what is to be handed on about each.
            again: of some of them, the blocks that come once more, and count only then.
        """
        self.version += 1
        is_open = set()
        for push in apply.pushes:
            if not self._arrivals.setdefault(push, IncomingContribution()).is_whole:
                is_open.add(push)
            self._applied[push[0]] = push[1]
        self._updates.append(
            LoggedUpdate(
                self.version,
                apply,
                about,
                set(self._blocks),
                is_open,
                is_held=self._judges,
                again=again or {},
                is_measured=not self._judges,
            )
        )

    def judge(self, version: int, judgement: Any) -> bool:
        """An update that was measured may be made; whether there is one of this version to be judged.

        Args:
            judgement: what is to be handed on about it.
        """
        update = next((one for one in self._updates if one.version == version), None)
        if update is None or not update.is_measured or update.judgement is not None or not self._judges:
            return not self._blocks
        update.judgement = judgement
        return True

    def commit(self, push: Push) -> bool:
        """The contribution is whole at all shards; whether anything may be due now."""
        update = self._update_of(push)
        if update is None:
            self._arrivals.setdefault(push, IncomingContribution()).is_whole = True
            return False
        update.open.discard(push)
        for block in self._blocks:
            self._trim(block)
        self._close()
        return bool(self._unkept) or (update.is_held and not update.open)

    def withdraw(self, push: Push) -> bool:
        """The contribution will never be whole, and is to be in no update; whether a mark is given up for that."""
        update = self._update_of(push)
        if update is None:
            return False
        update.open.discard(push)
        update.withdrawn.add(push)
        self._arrivals.pop(push, None)
        for block in self._blocks:
            self._undo_log.undo(block, update)
        for pull in self._pulls.values():
            if pull.needs(update):
                pull.number += 1
                pull.left = set(self._blocks)
        if update.version > self._mark or not self._unkept:
            return False
        self._unkept.clear()
        return True

    def whole(self) -> set[Push]:
        """The contributions of which all blocks have arrived here; none where no blocks are held."""
        return {push for push, one in self._arrivals.items() if self._blocks and len(one.blocks) == len(self._blocks)}

    def settle(self, whole: Collection[Push]) -> tuple[list[Push], dict[Push, Any]]:
        """Decide what becomes of the updates with something open, now that nothing more arrives.

        An update that all shards have whole is finished. The contributions to any other are all withdrawn, so that it
        changes nothing: their workers still hold them, and push them again.

        Args:
            whole: contributions that have arrived at all shards.

        Returns:
            Contributions to commit, and those to withdraw with what was to be handed on about each; in this order.
        """
        self.give_up_mark()
        kept: list[Push] = []
        withdrawn: dict[Push, Any] = {}
        for update in self._updates:
            if update.open <= set(whole):
                kept += sorted(update.open)
            else:  # the open ones last: what is committed can be undone as long as something is open
                withdrawn |= {push: update.about[push] for push in sorted(update.pushes, key=update.open.__contains__)}
        return kept, withdrawn

    def give_up_mark(self) -> None:
        """Have nothing kept for a mark any more."""
        self._unkept.clear()

    @property
    def is_settled(self) -> bool:
        """Whether every update has been made in all blocks, for good."""
        return not self._updates

    def forget(self, block: int) -> None:
        """The block has been given other values, and what it was before is of no use any more."""
        self._undo_log.forget(block)

    def mark(self) -> None:
        """Have each block kept as it is after the updates so far; the last mark has been reached, or is given up."""
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
            arrival = self._arrivals.setdefault(push, IncomingContribution())
            arrival.wanted, arrival.blocks = False, dict.fromkeys(arrival.blocks)
        else:
            self._arrivals.pop(push, None)  # that came before it was announced
            self._next[worker] = clock + 1

    def release(self, worker: int, step: int, *, as_is: bool = False) -> None:
        """The worker may have the parameters for `step`.

        Args:
            as_is: those that are here, without what waits to be judged.
        """
        own = (worker, step - 1)
        after = tuple(update for update in self._updates if own in update.apply.pushes)
        if self._applied.get(worker) != step - 1:
            after = tuple(self._updates)
        if as_is and self._judges:  # what was judged before this was decided has been made, in all blocks of all shards
            after = ()
        self._pulls[worker] = PendingPull(step, after, set(self._blocks))

    def lose(self, worker: int, *, stays: bool = False) -> Push | None:
        """The worker is gone, until it is admitted again; returns its contribution that was on its way, and is lost.

        What of it is in an update is committed or withdrawn then.

        Args:
            stays: it only steps out; what has come of a contribution that nobody has decided about is kept.
        """
        clock = self._next.pop(worker, None)
        self._pulls.pop(worker, None)
        self._applied.pop(worker, None)
        if clock is None or (arrival := self._arrivals.get((worker, clock))) is None:
            return None
        push = (worker, clock)
        if stays or arrival.is_whole or self._update_of(push) is not None:
            return None
        del self._arrivals[push]
        return push if arrival.wanted else None

    def gone(self, worker: int) -> None:
        """Forget what a worker that was taken to have stepped out had begun to push, and nobody has decided about."""
        if worker in self._next:
            return  # `lose` is to come
        for push, arrival in list(self._arrivals.items()):
            is_begun = len(arrival.blocks) < len(self._blocks) and not arrival.is_whole
            if push[0] == worker and is_begun and self._update_of(push) is None:
                del self._arrivals[push]

    def due(
        self, block: int | None = None
    ) -> Iterator[UndoUpdate | ApplyUpdate | MeasureUpdate | CaptureBlock | SendBlock]:
        """Yield what can be done now, in order; it counts as done when it is yielded.

        Args:
            block: the only one that changed since the last call; any may have if None.
        """
        for one in self._blocks if block is None else (block,):
            yield from self._due(one)
        while (update := self._stuck(self._blocks if block is None else (block,))) is not None:
            self._take_out(update)
            for one in self._blocks:
                yield from self._due(one)
        if self._judges and self._blocks:
            yield from self._measures()
        self._close()

    def _measures(self) -> Iterator[MeasureUpdate]:
        first = True  # all earlier updates have been made
        for update in self._updates:
            pushes = update.pushes
            if (
                not (update.is_measured or update.open)
                and (first or not update.apply.in_order)
                and all(self._has(block, push, update) for block in self._blocks for push in pushes)
            ):
                update.is_measured = True
                yield self._whole(update)
            first = first and not update.left

    def measured(self, version: int) -> MeasureUpdate | None:
        """The update of this version, if it was measured and waits to be judged; the blocks are as before it."""
        waiting = (one for one in self._updates if one.version == version and one.is_measured)
        update = next((one for one in waiting if one.judgement is None), None)
        return None if update is None or not self._judges else self._whole(update)

    def _whole(self, update: LoggedUpdate) -> MeasureUpdate:
        blocks = {block: self._parts(block, update) for block in self._blocks}
        return MeasureUpdate(update.version, blocks, update.apply.rate)

    def _parts(self, block: int, update: LoggedUpdate) -> tuple[tuple[Any, Any], ...]:
        return tuple((update.about[push], self._arrivals[push].blocks[block]) for push in update.pushes)

    def _due(self, block: int) -> Iterator[UndoUpdate | ApplyUpdate | CaptureBlock | SendBlock]:
        yield from self._redo(block)
        yield from self._makes(block)
        yield from self._keep(block)
        yield from self._gives(block)

    def _redo(self, block: int) -> Iterator[UndoUpdate | ApplyUpdate]:
        entries = self._undo_log.take_undone(block)
        if entries:
            yield UndoUpdate(block, entries[0].before)
        for entry in entries:
            if block not in entry.update.left:
                yield self._make(block, entry.update, {p: entry.parts[p] for p in entry.update.pushes})

    def _makes(self, block: int) -> Iterator[ApplyUpdate | CaptureBlock]:
        first = True  # all earlier updates have been made here
        for update in self._updates:
            if block not in update.left:
                continue
            if block in self._unkept and update.version > self._mark:
                yield from self._keep(block)
                if block in self._unkept and (self._is_behind(block) or len(self._undo_log.of(block)) >= self._most):
                    return
            pushes, is_held = update.pushes, update.is_held and bool(update.open)
            is_held |= self._judges and update.judgement is None
            if (
                (first or not update.apply.in_order)
                and not is_held
                and all(self._has(block, push, update) for push in pushes)
            ):
                update.left.discard(block)
                parts = {push: self._arrivals[push].blocks[block] for push in pushes}
                for push in pushes:
                    self._arrivals[push].blocks[block] = None
                yield self._make(block, update, parts)
            else:
                first = False

    def _has(self, block: int, push: Push, update: LoggedUpdate) -> bool:
        """Whether a block of a contribution is here, as it is to be in the update.

        Of one that is whole nothing comes any more: what was to come again has, but from who breaks its word.
        """
        arrival = self._arrivals[push]
        is_whole = len(arrival.blocks) == len(self._blocks)
        return block in arrival.blocks and (
            is_whole or block in arrival.again or block not in update.again.get(push, ())
        )

    def _make(self, block: int, update: LoggedUpdate, parts: Mapping[Push, Any]) -> ApplyUpdate:
        entry = self._undo_log.write(block, update, parts)
        brought = tuple((update.about[push], part) for push, part in parts.items())
        return ApplyUpdate(block, update.version, brought, update.apply.rate, entry, update.judgement)

    def _keep(self, block: int) -> Iterator[CaptureBlock]:
        """Capture the block if it has been updated up to the mark, and nothing in that is open."""
        if block not in self._unkept or self._is_behind(block):
            return
        entries = self._undo_log.of(block)
        if not entries or entries[0].update.version > self._mark:
            self._unkept.discard(block)
            yield CaptureBlock(block, entries[0].before if entries else None)
            self._trim(block)

    def _gives(self, block: int) -> Iterator[SendBlock]:
        for worker, pull in tuple(self._pulls.items()):
            if block in pull.left and all(block not in update.left for update in pull.after):
                pull.left.discard(block)
                yield SendBlock(block, worker, pull.step, pull.number)

    def _is_behind(self, block: int) -> bool:
        return any(block in u.left for u in self._updates if u.version <= self._mark)

    @property
    def _most(self) -> int:
        return _MOST_ENTRIES * max(1, len(self._next))

    def _stuck(self, blocks: Iterable[int]) -> LoggedUpdate | None:
        """One for which too much is kept; what is before a mark stays, and nothing goes far beyond it meanwhile."""
        for block in blocks:
            entries = self._undo_log.of(block)
            if len(entries) > self._most and (entries[0].update.version > self._mark or not self._unkept):
                return entries[0].update
        return None

    def _take_out(self, update: LoggedUpdate) -> None:
        """Undo an update, as if some of it had not arrived."""
        update.is_held = True
        for block in self._blocks:
            for entry in self._undo_log.undo(block, update):
                if entry.update is update or (entry.update.apply.in_order and entry.update.version > update.version):
                    entry.update.left.add(block)
                    for push in entry.update.pushes:
                        self._arrivals[push].blocks[block] = entry.parts[push]

    def _trim(self, block: int) -> None:
        """Erase what need not be undone; what is beyond a mark tells what was there."""
        self._undo_log.trim(block, self._mark if block in self._unkept else None)

    def _close(self) -> None:
        """Forget the updates that are done with; one in order tells what comes before it, while that is open."""
        is_open = False
        for update in tuple(self._updates):
            if not update.left and not update.open and not (is_open and update.apply.in_order):
                self._updates.remove(update)
                for push in update.apply.pushes:
                    self._arrivals.pop(push, None)
            is_open |= bool(update.open)

    def is_final(self, version: int) -> bool:
        """Whether an update has been made in all blocks, and none will be undone."""
        return all(update.version != version for update in self._updates) and not self._undo_log.holds(version)

    def _update_of(self, push: Push) -> LoggedUpdate | None:
        """The one that it is in."""
        return next((update for update in self._updates if push in update.apply.pushes), None)
