"""A parameter server behind one full-duplex link, in virtual time, for policies to be measured on.

The model of the link: a copy of the parameters takes `copy_s` in either direction if the link carries nothing else. It
is cut into blocks; whoever pushes shares the link block by block, and so does whoever pulls. A block is updated once it
has arrived from all contributions of an update, and may travel back at once.

With C the time to compute, d that of a copy, b blocks, N workers and e = d (1 + 1/b), the time of a pipelined turn:

    BSP          C + N e      all push, and all pull, at the same time
    R2SP         max(C + e, N e)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.sync import (
    Apply,
    Deadline,
    Drop,
    Evict,
    Grant,
    Joined,
    Left,
    Pulled,
    Pushed,
    PushEnding,
    Ready,
    Release,
    State,
    TakesEveryNth,
    adoption,
    on,
)
from offbeat.sync.state import observe

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.sync import Action, Event, Policy, Push


@dataclass(eq=False)
class Update:
    """An `Apply`, and how many blocks have been updated."""

    pushes: tuple[Push, ...]
    in_order: bool
    done: int = 0


@dataclass(eq=False)
class Worker:
    """Where a worker is: how many blocks of its contribution it has sent, how many of the parameters it has got."""

    push: Push = (0, 0)
    granted: bool = False
    sent: int = 0
    released: bool = False
    got: int = 0
    update: Update | None = None


@dataclass
class Server:
    """Plays `policy`.

    Args:
        compute_s: of worker and step.
        world: workers.
        copy_s: one copy of the parameters on the link.
        blocks: it is cut into.
        latency_s: from the server's word to a worker's first byte.
    """

    policy: Policy
    compute_s: Callable[[int, int], float]
    world: int
    copy_s: float = 0.0
    blocks: int = 1
    latency_s: float = 0.0
    state: State = field(default_factory=State)
    now_s: float = 0.0
    log: list[tuple[Event, tuple[Action, ...]]] = field(default_factory=list)
    applied_s: list[float] = field(default_factory=list)  # when each contribution was released
    staleness: list[int] = field(default_factory=list)
    hung: set[int] = field(default_factory=set)  # they never become ready again

    def __post_init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self._queue: list[tuple[float, int, str, int]] = []
        self._count = 0
        self._updates: list[Update] = []
        self._arrived: dict[Push, int] = {}
        self._busy = {"in": False, "out": False}
        self._next = {"in": 0, "out": 0}
        for rank in range(self.world):
            self.state = observe(self.state, Joined(rank, 0.0))
            self._enter(rank)

    def run(self, contributions: int) -> Server:
        """Until so many contributions were used, or nothing happens any more."""
        while len(self.applied_s) < contributions:
            wake_s = self.state.wake_s
            if wake_s is not None and (not self._queue or wake_s < self._queue[0][0]):
                self.now_s = max(self.now_s, wake_s)
                self._tell(Deadline(self.now_s))
            elif self._queue:
                self.now_s, _, what, rank = heapq.heappop(self._queue)
                self._happens(what, rank)
            else:
                break
        return self

    def seconds_per_contribution(self, skip: int = 0) -> float:
        """On average, after the first `skip`."""
        return (self.applied_s[-1] - self.applied_s[skip]) / (len(self.applied_s) - 1 - skip)

    def swap(self, policy: Policy) -> None:
        """Another policy takes over."""
        event = adoption(self.policy, policy, self.now_s)
        self.policy = policy
        self._tell(event)

    def pace(self, rank: int, every: int) -> None:
        """The worker takes part in every `every`-th round only."""
        self._tell(TakesEveryNth(rank, every, self.now_s))

    def join(self, rank: int) -> None:
        self._tell(Joined(rank, self.now_s))
        self._enter(rank)

    def leave(self, rank: int) -> None:
        self._lose(rank)
        self._tell(Left(rank, self.now_s))

    @property
    def grants(self) -> list[int]:
        """The workers that were granted a push, in order."""
        return [action.worker for _, actions in self.log for action in actions if isinstance(action, Grant)]

    def _enter(self, rank: int) -> None:
        self.workers[rank] = Worker()
        self._soon("ready", rank, self.compute_s(rank, 0))

    def _happens(self, what: str, rank: int) -> None:
        worker = self.workers.get(rank)
        if what in ("in", "out"):
            self._busy[what] = False
        if worker is None:
            self._serve()
        elif what == "granted":
            worker.granted, worker.sent = True, 0
            self._serve()
        elif what == "ready":
            step = self.state.members[rank].step
            worker.push = (rank, step)
            self._tell(Ready(rank, step, self.now_s))
        elif what == "in":
            worker.sent += 1
            self._arrived[worker.push] = worker.sent
            if worker.sent == self.blocks - max(1, self.blocks // 10):
                self._tell(PushEnding(rank, worker.push[1], self.now_s))
            if worker.sent == self.blocks:
                worker.granted = False
                self._tell(Pushed(rank, worker.push[1], self.now_s))
            self._serve()
        else:
            worker.got += 1
            if worker.got == self.blocks:
                self.workers[rank] = Worker(granted=worker.granted, sent=worker.sent, push=worker.push)
                if rank not in self.hung:
                    self._soon("ready", rank, self.compute_s(rank, self.state.members[rank].step))
                self._tell(Pulled(rank, self.now_s))
            self._serve()

    def _tell(self, event: Event) -> None:
        bases = {rank: member.base for rank, member in self.state.members.items()}
        version = self.state.version
        self.state, actions = on(self.policy, self.state, event)
        self.log.append((event, actions))
        for action in actions:
            match action:
                case Grant(worker=rank):
                    self._soon("granted", rank, self.latency_s)
                case Apply(pushes=pushes, in_order=in_order):
                    update = Update(pushes, in_order)
                    self._updates.append(update)
                    for push in pushes:
                        self.workers[push[0]].update = update
                        self.staleness.append(version - bases[push[0]])
                    version += 1
                case Release(worker=rank):
                    self.workers[rank].released, self.workers[rank].got = True, 0
                    if self.workers[rank].update is not None:
                        self.applied_s.append(self.now_s)
                    bases[rank] = version
                case Evict(worker=rank):
                    self._lose(rank)
                case Drop():
                    pass
        self._serve()

    def _lose(self, rank: int) -> None:
        worker = self.workers.pop(rank)
        self._arrived[worker.push] = self.blocks  # nobody waits for what is lost
        self._serve()

    def _serve(self) -> None:
        """Update what has arrived; let the next blocks travel."""
        least = self.blocks
        for update in self._updates:
            done = min(self._arrived.get(push, 0) for push in update.pushes)
            update.done = min(done, least) if update.in_order else done
            least = min(least, update.done)
        self._updates = [update for update in self._updates if update.done < self.blocks]
        for way in ("in", "out"):
            waiting = [] if self._busy[way] else [r for r, w in self.workers.items() if self._may_travel(way, w, least)]
            if waiting:
                rank = min(waiting, key=lambda rank: (rank < self._next[way], rank))
                self._busy[way], self._next[way] = True, rank + 1
                self._soon(way, rank, self.copy_s / self.blocks)

    def _may_travel(self, way: str, worker: Worker, least: int) -> bool:
        if way == "in":
            return worker.granted and worker.sent < self.blocks
        here = least if worker.update is None else worker.update.done
        return worker.released and worker.got < here

    def _soon(self, what: str, rank: int, in_s: float) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + in_s, self._count, what, rank))
