"""A worker with a server, and the updates that its contributions are in, part by part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.sim.max_min_fair import FlowPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.batching import Lease
    from offbeat.protocol.training import Announce
    from offbeat.sim.compute_time import ComputeTimes
    from offbeat.sim.flows import Flow
    from offbeat.sync import Policy, Push

PARTS = 10
"""Of a contribution that is pushed behind backward; the last but one is when a shard says that it is nearly there."""
_NOWHERE = FlowPath(())


@dataclass(eq=False)
class PendingUpdate:
    """An `Apply` that is not everywhere yet.

    Args:
        missing: for each part, how many of its contributions have not brought it.
        pushes, rate: what is in it, and which part of a round that is.
        before: the update that each part of this one waits for.
        after: the update that waits for this one.
        made: parts that are.
    """

    missing: list[int]
    pushes: tuple[Push, ...]
    rate: float
    before: PendingUpdate | None = None
    after: PendingUpdate | None = None
    made: int = 0
    pullers: list[SimWorker] = field(default_factory=list)

    def follow(self, before: PendingUpdate | None) -> None:
        """Be made in order behind that one."""
        if before is not None and before.made < len(before.missing):
            self.before, before.after = before, self

    def make(self, give: Callable[[SimWorker], None], whole: Callable[[PendingUpdate], None]) -> None:
        """Make the parts that can be made, and then those of the updates that wait for this one.

        Args:
            give: called for each worker that waits for parts of it.
            whole: called when all are made, before the last of them are given.
        """
        update: PendingUpdate | None = self
        while update is not None:
            parts = len(update.missing)
            most = parts if update.before is None else update.before.made
            made = update.made
            while made < most and not update.missing[made]:
                made += 1
            if made == update.made:
                return
            update.made = made
            if made == parts:
                whole(update)  # before what is given with it
            for worker in update.pullers:
                worker.due = made
                give(worker)
            if made == parts:
                update.pullers.clear()
                if update.after is not None:
                    update.after.before = None
            update = update.after


@dataclass(eq=False)
class SimWorker:
    """One worker.

    Args:
        host: whose link it is on; the rank of a worker of the beginning.
        policy: that it goes by.
        left: steps that it has still to do.
        entry: how often it was torn out of what it did; what was to happen before does not any more.
        alone: steps since its last contribution.
        clock: number of the contribution that it brings next.
        is_new: it has not had any parameters.
        is_joining: it has opened the model, and was not let go on since.
        holds: it has computed a contribution, and not gone on.
        read: updates that were in the parameters that it was given last.
        brought: parts of the contribution at hand that have arrived.
        update: that this contribution is in.
        got, due: parts of the next parameters that are here, and that may come.
        offered: parts of the contribution at hand that may be pushed by now.
        queue: parts of the next parameters that are to be sent one by one, and `queued`, how many ever were.
        announcement: of the contribution at hand, that waits behind parts which are on their way.
        lacking: parts of the next parameters that are not here, where a forward pass goes on without them.
        layer, passed_s: the next one of the forward pass, and when the one before is over.
        factor: how many times as long as the replay says this step computes; `lost_s` are lost behind backward.
    """

    rank: int
    host: int
    compute_times: ComputeTimes
    policy: Policy
    left: int
    entry: int = 0
    alone: int = 0
    clock: int = 0
    is_new: bool = True
    is_joining: bool = False
    read: int = 0
    own_step: int = 0
    begun_s: float = 0.0
    computed_s: float = 0.0
    push: Push = (-1, -1)
    holds: bool = False
    is_announced: bool = False
    is_change: bool = False
    ends: bool = False
    may_push: bool = False
    samples: int = 0
    leases: list[Lease] = field(default_factory=list)
    brought: int = 0
    arrived_s: float = 0.0
    way: FlowPath = _NOWHERE
    flow: Flow | None = None
    update: PendingUpdate | None = None
    is_pulling: bool = False
    moving: Flow | None = None  # parameters that are on their way
    is_waiting: bool = False  # to be given more, until its process or link goes on
    got: int = 0
    due: int = 0
    offered: int = PARTS
    queue: list[int] = field(default_factory=list)
    queued: int = 0
    announcement: Announce | None = None
    lacking: set[int] = field(default_factory=set)
    layer: int = 0
    passed_s: float = 0.0
    factor: float = 1.0
    lost_s: float = 0.0
