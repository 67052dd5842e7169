"""Workers and a parameter server.

The policy, its state and the books of what was promised are the server's own (`Coordinator`), as are the leases and the
tuning of batches (`Dealer`); workers, links and shards are played:

* A worker computes, announces its contribution, pushes it as soon as it may, and has its next parameters when the last
  of them has arrived.
* A contribution is cut into `_PARTS`, which stand for its blocks: a part of an update is made when that part of all its
  contributions is there, and of all earlier updates where those go in order; then it travels back.
* All servers are one, with the sum of their links: parameters are spread over them evenly.
* TCP shares a link unevenly. Which stream of several gets more changes from step to step (`_WEIGHTS`); an update that
  needs all of them waits for the one that gets least. With even shares `BSP` came out 16 % too fast on ps_uniform;
  these weights make it right there, and on the scenarios that they were not chosen by.
* What the plan's controller decides is adopted when word of it has gone to all workers and back, or, while one is
  stopped, when its silence is taken for consent.
* A message waits behind the data on its way: half a queue where several streams share the link. One alone, which is
  sent as fast as it arrives, leaves none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.control import Swap
from offbeat.fabric.server.deals import Enrol
from offbeat.fabric.server.lead.coordinator import Coordinator, times_s
from offbeat.fabric.server.lead.dealer import Dealer
from offbeat.fabric.server.lead.swaps import CONSENT_S
from offbeat.pacing import Lease
from offbeat.sim.fair import Way
from offbeat.sim.flows import Flows
from offbeat.sim.replicated import Played
from offbeat.sim.timeline import Timeline
from offbeat.sim.troubles import Troubles
from offbeat.sync import (
    Apply,
    Deadline,
    Drop,
    Ending,
    Evict,
    Grant,
    LocalSGD,
    Paced,
    Pulled,
    Pushed,
    Ready,
    Release,
    State,
    Wake,
)
from offbeat.sync.state import UNCOUNTED_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from offbeat.pacing import Over
    from offbeat.plan import Plan
    from offbeat.sim.course import Course
    from offbeat.sim.flows import Flow
    from offbeat.sim.links import Links
    from offbeat.sync import Action, Policy, Push

_PARTS = 10  # the last but one of them is when a shard says that a contribution is nearly there
_WEIGHTS = (0.5, 1.0, 2.0)
_NOWHERE = Way(())
_ASKED = 20  # times in the seconds that it looks back
_STEP_S = 0.002  # of a worker, beyond computing and waiting: packing, the end of the step, Python


@dataclass(eq=False)
class _Update:
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
    before: _Update | None = None
    after: _Update | None = None
    made: int = 0
    pullers: list[_Worker] = field(default_factory=list)


@dataclass(eq=False)
class _Worker:
    """One worker.

    Args:
        policy: that it goes by.
        left: steps that it has still to do.
        alone: steps since its last contribution.
        read: updates that were in the parameters that it was given last.
        brought: parts of the contribution at hand that have arrived.
        update: that this contribution is in.
        got, due: parts of the next parameters that are here, and that may come.
    """

    rank: int
    course: Course
    policy: Policy
    left: int
    alone: int = 0
    read: int = 0
    own_step: int = 0
    begun_s: float = 0.0
    computed_s: float = 0.0
    push: Push = (-1, -1)
    is_announced: bool = False
    is_change: bool = False
    ends: bool = False
    may_push: bool = False
    samples: int = 0
    leases: list[Lease] = field(default_factory=list)
    brought: int = 0
    arrived_s: float = 0.0
    way: Way = _NOWHERE
    flow: Flow | None = None
    update: _Update | None = None
    is_pulling: bool = False
    is_moving: bool = False
    got: int = 0
    due: int = 0


class Served:
    """A row whose plan has a server, in virtual time.

    Args:
        plan: of the row.
        courses: of the workers.
        links: of the scenario.
        size_bytes: of a contribution on the wire; `pull_bytes` of the parameters.
        steps: of each worker.
        batch: samples of a worker's step, if batches are not tuned.
        troubles: what goes wrong meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        courses: Sequence[Course],
        links: Links,
        *,
        size_bytes: float,
        pull_bytes: float,
        steps: int,
        batch: int,
        troubles: Troubles | None = None,
    ) -> None:
        self._plan, self._links, self._batch = plan, links, batch
        self._sync, self._is_swapping = plan.sync, False
        self._troubles = troubles or Troubles()
        self._push_bytes, self._pull_bytes = size_bytes / _PARTS, pull_bytes / _PARTS
        self._timeline = timeline = Timeline()
        self._flows = Flows(timeline, {"in": links.servers, "out": links.servers})
        self._workers = [_Worker(rank, course, plan.sync, steps) for rank, course in enumerate(courses)]
        self._shares = [random.Random(f"share {rank}") for rank in range(len(courses))]
        self._steps = steps
        self._coordinator = Coordinator(plan.sync, len(courses), lambda: timeline.now_s, State(hosts=links.shards))
        self._dealer = None if plan.tuning is None else Dealer(lambda _: plan.tuning, lambda: timeline.now_s)
        self._last_in_order: _Update | None = None
        self._wake = 0
        self.played = Played([[] for _ in courses], [[] for _ in courses], [[] for _ in courses], [])

    def play(self) -> Played:
        """All steps of all workers.

        Raises:
            AssertionError: if a worker waits for ever; `check_policy` says why the policy lets it.
        """
        for worker in self._workers:
            self._coordinator.join(worker.rank)
        if self._dealer is not None:
            self._enrol(self._dealer)
        self._carry_out(self._coordinator.start_if_all_are_here())
        for worker in self._workers:
            worker.may_push = not self._sync.gated
            self._compute(worker)
        self._ask_again()
        self._timeline.run()
        waiting = [worker.rank for worker in self._workers if worker.left]
        assert not waiting, f"workers {waiting} wait for ever with {self._sync!r}"
        return self.played

    # -- a worker's way through a step ---------------------------------------------------------------------------

    def _compute(self, worker: _Worker) -> None:
        if not worker.left:
            self._to_server(lambda: self._leave(worker))
            return
        worker.begun_s, worker.samples = self._timeline.now_s, self._batch
        if self._dealer is not None:
            worker.samples = worker.leases[-1].count
        tuned = worker.samples if self._dealer is not None else None
        computing_s, lost_s = worker.course.next_s(tuned)
        worker.computed_s = computing_s + lost_s
        done_s = self._troubles.done_s(worker.rank, self._timeline.now_s, worker.computed_s)
        self._timeline.at(done_s, lambda: self._computed(worker))

    def _computed(self, worker: _Worker) -> None:
        before, policy = worker.policy, self._sync
        if before != policy and not isinstance(before, LocalSGD):
            self._goes_over(worker, policy)
        what = worker.policy.contributes(worker.own_step)
        worker.own_step, worker.alone = worker.own_step + 1, worker.alone + 1
        if before != policy and isinstance(before, LocalSGD):
            what = what or "change"  # it brings what it has
            self._goes_over(worker, policy, brings=1)
        if what is None:
            self._stepped(worker)
            return
        worker.is_change = what == "change"
        worker.ends = worker.is_change and before != policy
        worker.is_announced, worker.brought, worker.update, worker.flow = False, 0, None, None
        self._timeline.after(_STEP_S / 2, lambda: self._bring(worker))

    def _goes_over(self, worker: _Worker, policy: Policy, brings: int = 0) -> None:
        """As `offbeat.engine.swaps_alone` does."""
        member = self._coordinator.state.members.get(worker.rank)
        number = brings if member is None else member.step + brings
        worker.policy = policy
        worker.own_step = policy.step_of(number) if isinstance(policy, LocalSGD) else number

    def _bring(self, worker: _Worker) -> None:
        member = self._coordinator.state.members.get(worker.rank)
        if member is None:  # it was evicted while it computed
            self._come_back(worker)
            return
        worker.push = (worker.rank, member.step)
        worker.may_push = worker.may_push and not self._sync.gated
        if worker.may_push:
            # Word of it goes ahead of it on the same link.
            self._ready(worker)
            self._send(worker)
        else:
            self._to_server(lambda: self._ready(worker))

    def _ready(self, worker: _Worker) -> None:
        rank, clock = worker.push
        now_s, member = self._timeline.now_s, self._coordinator.state.members.get(worker.rank)
        if member is None:
            self._come_back(worker)
            return
        worker.is_announced = True
        if self._dealer is not None:
            used = [(0, lease.number) for lease in worker.leases]
            computing_s = now_s - member.since_s if member.steps_here >= UNCOUNTED_STEPS else None
            self._dealer.announce(0, worker.push, used, computing_s)
            worker.leases = []
        weight, worker.alone = float(worker.samples * worker.alone), 0
        self.played.read[worker.push] = worker.read
        self._carry_out(
            self._coordinator.bring(Ready(rank, clock, now_s, weight), change=worker.is_change, ends=worker.ends)
        )

    def _send(self, worker: _Worker) -> None:
        """Push the next part."""
        push, back_s = worker.push, self._troubles.back_s(worker.rank, self._timeline.now_s)
        if back_s > self._timeline.now_s:
            self._timeline.at(back_s, lambda: self._send(worker) if worker.push == push else None)
            return
        if not worker.brought:
            weight = self._shares[worker.rank].choice(_WEIGHTS)
            worker.way = Way(("in",), self._links.worker[worker.rank], weight)
        if self._troubles.all:
            worker.way = worker.way._replace(most=self._rate(worker))
        worker.flow = self._flows.start(worker.way, self._push_bytes, lambda: self._part_arrives(worker, push))

    def _part_arrives(self, worker: _Worker, push: Push) -> None:
        if worker.push != push:
            return
        if worker.update is not None:
            self._bring_part(worker.update, worker.brought)
        worker.brought += 1
        now_s = self._timeline.now_s
        if worker.brought < _PARTS:
            self._send(worker)
            if worker.brought == _PARTS - 1:
                self._tell(Ending(*push, now_s))
            return
        worker.arrived_s = now_s
        if self._dealer is not None:
            self._dealer.whole(0, push)
        self._tell(Pushed(*push, now_s))

    def _pull(self, worker: _Worker) -> None:
        """The worker may have its next parameters, as far as they are made."""
        worker.is_pulling, worker.got = True, 0
        worker.due = _PARTS if worker.update is None else worker.update.made
        if worker.update is not None:
            worker.update.pullers.append(worker)
        self._give(worker)

    def _give(self, worker: _Worker) -> None:
        parts, back_s = worker.due - worker.got, self._troubles.back_s(worker.rank, self._timeline.now_s)
        if worker.is_moving or not parts:
            return
        worker.is_moving = True
        if back_s > self._timeline.now_s:
            self._timeline.at(back_s, lambda: self._give_now(worker))
            return
        way, worker.read = Way(("out",), self._rate(worker)), len(self.played.updates)

        def there() -> None:
            worker.is_moving, worker.got = False, worker.got + parts
            if worker.got < _PARTS:
                self._give(worker)
            else:
                worker.is_pulling = False
                self._timeline.after(self._links.to_server_s + _STEP_S / 2, lambda: self._pulled(worker))

        self._flows.start(way, parts * self._pull_bytes, there)

    def _give_now(self, worker: _Worker) -> None:
        worker.is_moving = False
        self._give(worker)

    def _rate(self, worker: _Worker) -> float:
        """Bytes per second of its link, now."""
        return self._links.worker[worker.rank] * self._troubles.part(worker.rank, self._timeline.now_s)

    def _pulled(self, worker: _Worker) -> None:
        member = self._coordinator.state.members.get(worker.rank)
        if member is not None and self._dealer is not None:
            self._dealer.stepped(worker.rank, *times_s(member, worker.arrived_s, self._timeline.now_s))
        self._tell(Pulled(worker.rank, self._timeline.now_s))
        self._pace()
        worker.may_push = not self._sync.gated
        self._stepped(worker)

    def _stepped(self, worker: _Worker) -> None:
        took_s = self._timeline.now_s - worker.begun_s
        self.played.step_s[worker.rank].append(took_s)
        self.played.samples[worker.rank].append(worker.samples)
        self.played.waited_s[worker.rank].append(took_s - worker.computed_s)
        worker.left -= 1
        self._compute(worker)

    def _leave(self, worker: _Worker) -> None:
        if self._dealer is not None:
            self._deal(self._dealer.lose(worker.rank).get(0, {}).items())
        self._carry_out(self._coordinator.leave(worker.rank))

    def _come_back(self, worker: _Worker) -> None:
        """It was evicted: what it computed is outdated, and it begins again with the newest parameters."""
        worker.update = None
        self._carry_out(self._coordinator.join(worker.rank))
        self._pull(worker)

    # -- what the policy decides ---------------------------------------------------------------------------------

    def _tell(self, event: Ready | Ending | Pushed | Pulled | Paced | Deadline) -> None:
        self._carry_out(self._coordinator.tell(event))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        actions = tuple(actions)
        if self._dealer is not None:
            for rank in sorted(action.worker for action in actions if isinstance(action, Release)):
                self._deal([(rank, self._dealer.refill(rank).get(0, []))])
        for action in actions:
            match action:
                case Grant(worker=rank):
                    worker = self._workers[rank]
                    if not worker.may_push:
                        self._to_worker(lambda one=worker: self._granted(one))  # type: ignore[misc]
                case Apply():
                    self._apply(action)
                case Drop(pushes=pushes):
                    for push in pushes:
                        self._drop(push)
                case Release(worker=rank):
                    self.played.staleness.append(self._coordinator.last_staleness.get(rank, 0))
                    self._pull(self._workers[rank])
                case Evict(worker=rank):
                    self._evict(self._workers[rank])
                case Wake(at_s=at_s):
                    self._wake += 1
                    self._timeline.at(at_s, lambda number=self._wake: self._wake_up(number))  # type: ignore[misc]
        if any(isinstance(action, Apply) for action in actions):
            self._ask()

    def _granted(self, worker: _Worker) -> None:
        if worker.is_announced and not worker.brought and worker.flow is None:
            self._send(worker)

    def _apply(self, action: Apply) -> None:
        missing = [0] * _PARTS
        update = _Update(missing, action.pushes, action.rate)
        for push in action.pushes:
            if self._dealer is not None:
                self._dealer.applied(0, push)
            worker = self._workers[push[0]]
            if worker.push == push and worker.brought < _PARTS:
                for part in range(worker.brought, _PARTS):
                    missing[part] += 1
            if worker.push == push:
                worker.update = update
        if action.in_order:
            before, self._last_in_order = self._last_in_order, update
            if before is not None and before.made < _PARTS:
                update.before, before.after = before, update
        self._make(update)

    def _bring_part(self, update: _Update, part: int) -> None:
        update.missing[part] -= 1
        self._make(update)

    def _make(self, first: _Update) -> None:
        """Make the parts of an update that can be made, and then of those that wait for it."""
        update: _Update | None = first
        while update is not None:
            most = _PARTS if update.before is None else update.before.made
            made = update.made
            while made < most and not update.missing[made]:
                made += 1
            if made == update.made:
                return
            update.made = made
            for worker in update.pullers:
                worker.due = made
                self._give(worker)
            if made == _PARTS:
                self.played.updates.append((self._timeline.now_s, update.pushes, update.rate))
                update.pullers.clear()
                if update.after is not None:
                    update.after.before = None
            update = update.after

    def _drop(self, push: Push) -> None:
        if self._dealer is not None:
            self._dealer.dropped(0, push)
        worker = self._workers[push[0]]
        if worker.push == push:
            self._stop(worker)

    def _evict(self, worker: _Worker) -> None:
        self._stop(worker)
        if self._dealer is not None:
            self._deal(self._dealer.lose(worker.rank).get(0, {}).items())
        if worker.is_announced and not worker.is_pulling:
            self._to_worker(lambda: self._come_back(worker))

    def _stop(self, worker: _Worker) -> None:
        """Nothing more of its contribution is sent."""
        if worker.update is not None:
            for part in range(worker.brought, _PARTS):
                worker.update.missing[part] -= 1
            self._make(worker.update)
        if worker.flow is not None:
            self._flows.stop(worker.flow)
        worker.push, worker.update = (worker.rank, -1), None

    def _wake_up(self, number: int) -> None:
        if number == self._wake:
            self._tell(Deadline(self._timeline.now_s))

    # -- who swaps the policy ------------------------------------------------------------------------------------

    def _ask_again(self) -> None:
        """Ask the controller now, and again while there is somebody to decide about."""
        controller = self._plan.controller
        if controller is not None and any(worker.left for worker in self._workers):
            self._ask()
            self._timeline.after(controller.looks_back_s / _ASKED, self._ask_again)

    def _ask(self) -> None:
        controller = self._plan.controller
        metrics = None if controller is None or self._is_swapping else self._coordinator.metrics(controller)
        if controller is None or metrics is None:
            return
        decision = controller.decide(metrics)
        if isinstance(decision, Swap):
            self._is_swapping = True
            now_s = self._timeline.now_s
            silent = any(self._troubles.back_s(worker.rank, now_s) > now_s for worker in self._workers)
            agreed_s = CONSENT_S if silent else 2 * self._links.to_server_s
            self._timeline.after(agreed_s, lambda: self._adopt(decision))

    def _adopt(self, swap: Swap) -> None:
        self._is_swapping, self._sync = False, swap.sync
        self.played.swaps.append((self._timeline.now_s, swap.sync, swap.reason))
        if self._dealer is not None:
            self._dealer.together(swap.sync.bound == 0)
        self._carry_out(self._coordinator.swap(swap.sync, by_controller=True))

    # -- data ----------------------------------------------------------------------------------------------------

    def _enrol(self, dealer: Dealer) -> None:
        world = len(self._workers)
        about = Enrol(
            loader=0,
            plan="",
            world=world,
            samples=2 * self._steps * self._batch * world,
            seed=0,
            shuffle=False,
            drop_last=False,
            batch=self._batch,
        )
        for worker in self._workers:
            together = self._sync.bound == 0
            self._deal(dealer.enrol(worker.rank, about, together=together, world=world).items())

    def _deal(self, deals: Iterable[tuple[int, Iterable[Lease | Over]]]) -> None:
        for rank, dealt in deals:
            self._workers[rank].leases += [deal for deal in dealt if isinstance(deal, Lease)]

    def _pace(self) -> None:
        for rank, every in self._dealer.every().items() if self._dealer is not None else ():
            member = self._coordinator.state.members.get(rank)
            if member is not None and member.every != every:
                self._tell(Paced(rank, every, self._timeline.now_s))

    # -- messages ------------------------------------------------------------------------------------------------

    def _to_server(self, happen: Callable[[], None]) -> None:
        self._message("in", happen)

    def _to_worker(self, happen: Callable[[], None]) -> None:
        self._message("out", happen)

    def _message(self, link: str, happen: Callable[[], None]) -> None:
        behind_s = self._links.queue_s if self._flows.on(link) > 1 else 0.0
        self._timeline.after(self._links.to_server_s + behind_s, happen)
