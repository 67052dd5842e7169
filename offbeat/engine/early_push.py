"""Pushing a contribution to a server while backward still computes the rest of it.

    worker    forward | backward                              | step(): announces it, pushes the rest
    pushed            |  block 7 | block 6 | block 4 | ...    | the last block of each shard
    server                                                    | updates, and gives back

A block is pushed when all gradients in it are complete and it is its turn. The order is that of a `Scheduler`, which
plans from what the first steps have taken here: of a server's blocks each worker may push another one first, so that
nothing is to be agreed on. Of a schedule only the order counts: the portions are the server's blocks.

Nothing comes of a block before the contribution is announced, behind backward, with all that is known only then: its
weight, the optimizer's hyper-parameters, which parameters had no gradient. Until then of each shard the block is held
back that the next forward pass needs last, so that no shard has all of a contribution that may never be: it comes back
last, too.

Who changes a gradient between backward and the step (clipping, unscaling, another backward) has the blocks that it is
in pushed again: what was pushed is compared with what the optimizer would step with.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from offbeat.engine.issue_queue import IssueQueue
from offbeat.engine.schedule_learner import BLIND, ScheduleLearner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from offbeat.engine.prepared_model import PreparedModel
    from offbeat.scheduling import Schedule, Scheduler
    from offbeat.server.blocks import Block

_MOST_CHANGED = 8  # steps in a row in which gradients are changed behind backward: each has them pushed twice


class EarlyPush:
    """The blocks of one model's contributions, pushed while backward computes.

    Call order: `forward_begins`; `backward_begins`; `complete` for each gradient; `backward_ends`, and `stepped`.

    Args:
        model: whose gradients.
        scheduler: plans the order.
        blocks: at the server.
        shards: which shard holds each.
        now_s: the clock.
        take: copies a gradient to where it is pushed from; False if that cannot be.
        push: pushes a block, at once or when its worker's turn has come.

    Attributes:
        order: in which blocks are pushed; empty until it is known.
        pull_order: in which the forward pass needs them; empty until it is known.
        taken: gradients that were copied since the last step, in the backward at hand or before.
        pushed: blocks that were handed over to be pushed since then.
        readers: modules that read each parameter; empty until the order is known, or if that is not known of all.
    """

    def __init__(
        self,
        model: PreparedModel,
        scheduler: Scheduler,
        blocks: Sequence[Block],
        shards: Sequence[int],
        now_s: Callable[[], float],
        *,
        take: Callable[[str], bool],
        push: Callable[[int], None],
    ) -> None:
        self._scheduler, self._blocks, self._shards = scheduler, blocks, shards
        self._take, self._push = take, push
        self._learner: ScheduleLearner | None = ScheduleLearner(model.model, model.parameters, now_s)
        self._within: dict[str, list[int]] = {name: [] for name in model.parameters}  # blocks that a gradient is in
        for block in blocks:
            for name in {piece.name for piece in block.pieces}:
                self._within[name].append(block.index)
        self._exchanges_s: list[float] = []
        self._fired: Counter[str] = Counter()  # how often each gradient was added to in this backward
        self._expected: dict[str, int] = {}  # in the first ones, at most
        self._lacking: list[int] = []  # of each block, so many gradients
        self._queue: IssueQueue | None = None
        self._held_back: frozenset[int] = frozenset()
        self._is_open = False  # within a backward whose gradients are pushed
        self._changed_steps = 0  # in a row
        self.order: Sequence[int] = ()
        self.pull_order: Sequence[int] = ()
        self.readers: dict[str, tuple[torch.nn.Module, ...]] = {}
        self.taken: set[str] = set()
        self.pushed: list[int] = []

    @property
    def is_learning(self) -> bool:
        """Whether the order is still to be found."""
        return self._learner is not None

    @property
    def is_enough(self) -> bool:
        """Whether the order can be found by now."""
        return self._learner is not None and self._learner.is_done

    def forward_begins(self) -> None:
        """A forward pass begins whose gradients will be pushed."""
        if self._learner is not None:
            self._learner.forward_begins()

    def backward_begins(self) -> None:
        """A backward begins whose gradients will be pushed."""
        self._fired.clear()
        if self._learner is not None:
            self._learner.backward_begins()
            return
        # Of an earlier one, whose step was left out or which only adds up, some was pushed: that memory is in use.
        self._is_open = self._queue is not None and not self.taken
        if self._queue is not None and self._is_open:
            self._queue.restart()
            self._lacking = [len({piece.name for piece in block.pieces}) for block in self._blocks]

    def complete(self, name: str) -> None:
        """A gradient was added to: perhaps it is complete now."""
        self._fired[name] += 1
        if self._learner is not None:
            self._expected[name] = max(self._expected.get(name, 0), self._fired[name])
            self._learner.complete(name)
            return
        if not self._is_open or self._fired[name] != self._expected.get(name) or not self._take(name):
            return
        self.taken.add(name)
        assert self._queue is not None
        for block in self._within[name]:
            self._lacking[block] -= 1
            if not self._lacking[block]:
                self._queue.add(block)

    def backward_ends(self) -> None:
        """No more gradients come before the step."""
        self._is_open = False
        if self._learner is not None:
            self._learner.backward_ends()

    def stepped(self, exchange_s: float, *, changed: bool) -> None:
        """A contribution was brought.

        Args:
            exchange_s: how long that took.
            changed: whether a gradient had been taken before it was what the contribution has of it.
        """
        if self._learner is not None:
            self._exchanges_s.append(exchange_s)
        self._changed_steps = self._changed_steps + 1 if changed else 0
        self.taken, self.pushed = set(), []

    @property
    def objection(self) -> str:
        """The reason why pushing early does not pay here; "" if there is none."""
        if self._changed_steps >= _MOST_CHANGED:
            return "gradients are changed before each step of the optimizer, as by clipping"
        if self._learner is None or not self._learner.is_done:
            return ""
        if self._learner.is_blind:
            return BLIND
        lacking = self._learner.lacking
        return f"{lacking[0]} had no gradient in some step" if lacking else ""

    def plan(self, latency_s: float) -> None:
        """Find the order, from what was learnt.

        Args:
            latency_s: of a question to the server, and its answer.
        """
        learner = self._learner
        assert learner is not None, "it is found once"
        size_bytes = sum(block.size_bytes for block in self._blocks)
        # Of the steps the fastest: in others there was somebody to wait for.
        bandwidth = size_bytes / max(min(self._exchanges_s) - latency_s, 1e-6)
        profile = learner.profile([learner.measured(latency_s, bandwidth)])
        names = [one.name for one in profile.gradients]
        self.order = order_of(self._blocks, names, self._scheduler.schedule(profile))
        self.pull_order = in_order_of_need(self._blocks, names)
        self._held_back = frozenset({self._shards[block]: block for block in self.pull_order}.values())
        self._queue = IssueQueue(self.order, self._issue)
        self.readers = {} if learner.unread else learner.readers
        self.close()

    def close(self) -> None:
        """Watch no longer."""
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    def _issue(self, block: int) -> None:
        if block not in self._held_back:
            self.pushed.append(block)
            self._push(block)


def order_of(blocks: Sequence[Block], names: Sequence[str], schedule: Schedule) -> tuple[int, ...]:
    """The indices of a server's blocks in the order in which a schedule has sent all that is in them.

    Args:
        names: of the gradients that the schedule counts.

    >>> from offbeat.scheduling import GradientSlice, Schedule, ScheduledBlock
    >>> from offbeat.server.blocks import Block, ParameterSlice
    >>> sent = [ScheduledBlock((GradientSlice(i, 0, 4),)) for i in (1, 0)]
    >>> held = [Block(i, 0, 0, "float32", 4, (ParameterSlice("ab"[i], 0, 4),)) for i in (0, 1)]
    >>> order_of(held, ["a", "b"], Schedule(tuple(sent), (0, 0)))
    (1, 0)
    """
    sent: dict[str, list[tuple[int, int, int]]] = {name: [] for name in names}
    for place, block in enumerate(schedule.blocks):
        for one in block.slices:
            sent[names[one.gradient]].append((one.start, one.stop, place))
    return tuple(sorted(range(len(blocks)), key=lambda index: (_sent_at(blocks[index], sent), index)))


def in_order_of_need(blocks: Sequence[Block], names: Sequence[str]) -> tuple[int, ...]:
    """The indices of a server's blocks in the order in which a forward pass needs something of them first.

    Args:
        names: of all parameters, in the order in which it needs them.

    >>> from offbeat.server.blocks import Block, ParameterSlice
    >>> pieces = [ParameterSlice("a", 0, 4), ParameterSlice("b", 0, 4), ParameterSlice("a", 4, 4)]
    >>> held = [Block(i, 0, 0, "float32", 4, (piece,)) for i, piece in enumerate(pieces)]
    >>> in_order_of_need(held, ["b", "a"])
    (1, 0, 2)
    """
    places = {name: place for place, name in enumerate(names)}
    first = [min(places[piece.name] for piece in block.pieces) for block in blocks]
    return tuple(sorted(range(len(blocks)), key=lambda index: (first[index], index)))


def _sent_at(block: Block, sent: Mapping[str, Sequence[tuple[int, int, int]]]) -> int:
    """The place in the schedule of the last that is in a block."""
    return max(
        place
        for piece in block.pieces
        for start, stop, place in sent[piece.name]
        if start < piece.start + piece.numel and piece.start < stop
    )
