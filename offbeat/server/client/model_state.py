"""One model at a worker: what it holds, and where it is on its way through a step."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.protocol.training import BlockOf, PieceOf
from offbeat.server.client.requests import ServerRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from offbeat.protocol.optimizer_spec import OptimizerSpec
    from offbeat.protocol.training import ContributionInfo, ReleaseWorker
    from offbeat.server.blocks import Block
    from offbeat.server.client.requests import PulledParameters

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
    parts: Mapping[int, torch.Tensor] | None = None
    missing: set[int] = field(default_factory=set)  # blocks that have not come with this number:
    number: int = 0  # the highest that came with `PullBlock` for the step that it waits for
    last_number: int = 0  # with which the parameters that it has came
    block_came: threading.Condition = field(default_factory=threading.Condition)  # or there is nothing to wait for
    going: ReleaseWorker | None = None  # the release whose parameters are still coming
    is_gated: bool = True  # whether it waits for its grant before it pushes
    names: dict[str, int] = field(default_factory=dict)
    plan: str = ""
    layout: str = ""
    optimizer: OptimizerSpec | None = None
    about: ContributionInfo | None = None  # what is said of the contribution that it has
    announced: tuple[int, ...] = ()  # numbers under which that was announced
    pushed: set[int] = field(default_factory=set)  # blocks that were pushed before the contribution was announced
    void: set[int] = field(default_factory=set)  # of these, those that not every shard may have any more
    life: int = 0  # of the server, when it was let in last; 0 before the first time
    new_life: int = 0  # of the server that is to let it in now
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
    def may_push_early(self) -> bool:
        """Whether blocks of the contribution that is being computed may be pushed."""
        return self.is_in and not self.is_gated and not self.is_entering and self.going is None and self.parts is None

    def forget_pushes(self) -> None:
        """Have all that was pushed before the contribution is announced be pushed again: some shards forget it."""
        self.void |= self.pushed
        self.pushed = set()

    def count_on(self, clock: int) -> None:
        """Compute, or bring, the contribution of this number next."""
        if clock != self.clock:
            self.clock, self.pushed, self.void = clock, set(), set()

    def expects(self, block: int, number: int) -> bool:
        """Whether this block may come; also once more, with a greater number."""
        return block in self.missing or (number > self.number and block < len(self.blocks))

    def await_all(self) -> None:
        """All blocks are to come."""
        self.missing, self.number = set(range(len(self.blocks))), 0

    def take(self, block: int, number: int) -> None:
        """A block is here; if it came with a greater number than others, these are to come once more."""
        if number > self.number:
            self.missing, self.number = set(range(len(self.blocks))), number
        if number == self.number:
            self.missing.discard(block)

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
