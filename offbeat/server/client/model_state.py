"""One model at a worker: what it holds, and where it is on its way through a step."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offbeat.protocol.training import BlockOf, PieceOf
from offbeat.server.client.requests import ServerRequest
from offbeat.server.encoded_block import EncodedBlock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.protocol.loss_scores import ScoreContributions
    from offbeat.protocol.optimizer_spec import OptimizerSpec
    from offbeat.protocol.training import ContributionInfo, ReleaseWorker
    from offbeat.server.blocks import Block
    from offbeat.server.client.requests import PulledParameters

Part = torch.Tensor | EncodedBlock  # what is pushed of a block: [D], or encoded
_MOST_DONE = 1 << 14  # contributions that are remembered until they are in a snapshot


@dataclass
class ModelState:
    """One model at this worker.

    Args:
        blocks: all of them.
        shards: which shard holds each.
        values: where each block's parameters lie, contiguous, on the CPU.
    """

    model: int
    blocks: Sequence[Block]
    shards: Sequence[int]
    values: Sequence[torch.Tensor]
    clock: int = 0
    request: ServerRequest[PulledParameters] = field(default_factory=ServerRequest)  # that is waited for, or was
    parts: Mapping[int, Part] | None = None
    missing: set[int] = field(default_factory=set)  # blocks that have not come with this number:
    # Where blocks land that have come already: somebody may be reading what they came with.
    beside: dict[int, torch.Tensor] = field(default_factory=dict)
    number: int = 0  # the highest that came with `PullBlock` for the step that it waits for
    last_number: int = 0  # with which the parameters that it has came
    # A block has come, or a question about losses; or there is nothing to wait for any more.
    block_came: threading.Condition = field(default_factory=threading.Condition)
    to_score: collections.deque[ScoreContributions] = field(default_factory=collections.deque)  # by a validator
    scoring: ScoreContributions | None = None  # that its training thread is about; None if it is void by now
    going: ReleaseWorker | None = None  # the release whose parameters are still coming
    is_gated: bool = True  # whether it waits for its grant before it pushes
    granted: int | None = None  # number of the contribution that was granted before it was announced
    pushes_early: bool = False  # it pushes blocks before they are announced, where it may
    pull_order: Sequence[int] = ()  # in which blocks are wanted; the server's own if empty
    names: dict[str, int] = field(default_factory=dict)
    plan: str = ""
    layout: str = ""
    optimizer: OptimizerSpec | None = None
    about: ContributionInfo | None = None  # what is said of the contribution that it has
    announced: tuple[int, ...] = ()  # numbers under which that was announced
    complete: dict[int, Part] = field(default_factory=dict)  # blocks that are not pushed before the grant
    pushed: set[int] = field(default_factory=set)  # blocks that were pushed before the contribution was announced
    void: set[int] = field(default_factory=set)  # of these, those that not every shard may have any more
    life: int = 0  # of the server, when it was let in last; 0 before the first time
    new_life: int = 0  # of the server that is to let it in now
    is_kept: bool = False  # what was acknowledged in `life` is in the parameters of that one, too
    version: int = 0  # of the parameters it has
    versions: dict[int, int] = field(default_factory=dict)  # of each block of them
    swaps: int = 0  # of the plan, as far as is known here
    is_in: bool = False
    is_entering: bool = False  # it was let in, and has not got the parameters yet
    is_outdated: bool = False  # it is to come again when it has its next contribution
    unopened: set[int] = field(default_factory=set)  # shards that have not opened it yet
    done: collections.deque[tuple[int, float]] = field(default_factory=lambda: collections.deque(maxlen=_MOST_DONE))

    @property
    def waits(self) -> bool:
        """Whether the training thread waits for the parameters, so that they may be overwritten."""
        return not self.request.is_over

    @property
    def computes(self) -> bool:
        """Whether it takes part, and has all that it computes the next contribution from."""
        return self.is_in and not self.is_entering and self.going is None and self.parts is None

    @property
    def may_push(self) -> bool:
        """Whether it need not wait (any longer) for a grant."""
        return not self.is_gated or self.granted == self.clock

    def forget_pushes(self) -> None:
        """Have all that was pushed before the contribution is announced be pushed again: some shards forget it."""
        self.void |= self.pushed
        self.pushed, self.complete, self.granted = set(), {}, None

    def count_on(self, clock: int) -> None:
        """Compute, or bring, the contribution of this number next."""
        if clock != self.clock:
            self.clock, self.pushed, self.void, self.complete, self.granted = clock, set(), set(), {}, None

    def expects(self, block: int, number: int) -> bool:
        """Whether this block may come; also once more, with a greater number."""
        return block in self.missing or (number > self.number and block < len(self.blocks))

    def await_all(self) -> None:
        """All blocks are to come."""
        self.missing, self.number = set(range(len(self.blocks))), 0

    def landing_place(self, block: int) -> torch.Tensor:
        """The memory in which a block lands [D]: its values, or beside them if they have come already."""
        self.beside.pop(block, None)  # of a time when it did not come whole
        if block in self.missing:
            return self.values[block]
        return self.beside.setdefault(block, torch.empty_like(self.values[block]))

    def take(self, block: int, number: int) -> None:
        """A block is here; if it came with a greater number than others, these are to come once more."""
        if (came := self.beside.pop(block, None)) is not None:
            self.values[block].copy_(came)
        if number > self.number:
            self.missing, self.number = set(range(len(self.blocks))), number
        if number == self.number:
            self.missing.discard(block)

    def take_question(self) -> ScoreContributions | None:
        """Take the next question about losses, if there is one."""
        with self.block_came:
            self.scoring = self.to_score.popleft() if self.to_score else None
            return self.scoring

    def forget_questions(self) -> None:
        """Forget what was asked over links that are lost: it is asked anew, or of somebody else."""
        with self.block_came:
            self.to_score.clear()
            self.scoring = None

    def tell_over(self) -> None:
        """Wake up whoever waits for blocks: the request is over."""
        with self.block_came:
            self.block_came.notify_all()

    def name_all(self) -> None:
        """Number all parameters."""
        names = dict.fromkeys(piece.name for block in self.blocks for piece in block.pieces)
        self.names = {name: i for i, name in enumerate(names)}

    def held_by(self, shard: int) -> tuple[BlockOf, ...]:
        """The blocks that a shard holds, as they travel."""
        return tuple(
            BlockOf(b.index, b.dtype, tuple(PieceOf(self.names[p.name], p.start, p.numel) for p in b.pieces))
            for b in self.blocks
            if self.shards[b.index] == shard
        )
