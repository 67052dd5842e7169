"""Workers and a parameter server.

The policy, its state and the books of what was promised are the server's own (`PolicyRunner`), as are the leases and
the tuning of batches (`LeaseManager`); workers, links and shards are played:

* A worker computes, announces its contribution, pushes it as soon as it may, and has its next parameters when the last
  of them has arrived.
* A contribution is cut into `PARTS`, which stand for its blocks: a part of an update is made when that part of all its
  contributions is there, and of all earlier updates where those go in order; then it travels back.
* All servers are one, with the sum of their links: parameters are spread over them evenly.
* TCP shares a link unevenly. Which stream of several gets more changes from step to step (`transfers`); an update that
  needs all of them waits for the one that gets least. With even shares `BSP` came out 16 % too fast on ps_uniform;
  these weights make it right there, and on the scenarios that they were not chosen by.
* What the plan's controller decides is adopted when word of it has gone to all workers and back, or, while one is
  stopped, when its silence is taken for consent.
* A message waits behind the data on its way: half a queue where several streams share the link. One alone, which is
  sent as fast as it arrives, leaves none.
* What goes wrong is done to it from outside (`faults`): workers are given up, come back, end and join; the server
  begins a new life, in which whoever has a contribution brings it again (`offbeat.coordinator.reconnect`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.control import Swap
from offbeat.coordinator.plan_swap import CONSENT_S
from offbeat.coordinator.policy_runner import PolicyRunner
from offbeat.sim.disturbances import SERVER, Disturbances
from offbeat.sim.faults import Faults
from offbeat.sim.leased_data import LeasedData
from offbeat.sim.result import SimResult
from offbeat.sim.timeline import Timeline
from offbeat.sim.transfers import SimulatedTransfers
from offbeat.sim.worker import SimWorker
from offbeat.sync import (
    Apply,
    Deadline,
    Drop,
    Evict,
    Grant,
    LocalSGD,
    Pulled,
    Pushed,
    PushEnding,
    Ready,
    Release,
    State,
    TakesEveryNth,
    Wake,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from offbeat.plan import Plan
    from offbeat.sim.compute_time import ComputeTimes
    from offbeat.sim.links import Links
    from offbeat.sim.worker import PendingUpdate
    from offbeat.sync import Action, Policy, Push

_ASKED = 20  # times in the seconds that it looks back
_STEP_S = 0.002  # of a worker, beyond computing and waiting: packing, the end of the step, Python


class SimulatedServer:
    """A row whose plan has a server, in virtual time. A `Cluster`, and a `TransferOwner`.

    Args:
        plan: of the row.
        courses: of the workers.
        links: of the scenario.
        size_bytes: of a contribution on the wire; `pull_bytes` of the parameters.
        steps: of each worker.
        batch: samples of a worker's step, if batches are not tuned.
        troubles: what goes wrong meanwhile, at its time; `faults`, at a worker's step.
    """

    def __init__(
        self,
        plan: Plan,
        courses: Sequence[ComputeTimes],
        links: Links,
        *,
        size_bytes: float,
        pull_bytes: float,
        steps: int,
        batch: int,
        troubles: Disturbances | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._plan, self._links, self._batch = plan, links, batch
        self._sync, self._is_swapping = plan.sync, False
        self._troubles, self._faults = troubles or Disturbances(), faults or Faults()
        self._timeline = timeline = Timeline()
        self._transfers = SimulatedTransfers(
            self, timeline, links, self._troubles, push_bytes=size_bytes, pull_bytes=pull_bytes
        )
        self._workers = [SimWorker(rank, rank, course, plan.sync, steps) for rank, course in enumerate(courses)]
        self._steps, self._world = steps, len(courses)
        self._life = 0
        self._coordinator = PolicyRunner(plan.sync, len(courses), lambda: timeline.now_s, State(hosts=links.shards))
        self._data = LeasedData(
            plan.tuning,
            lambda: timeline.now_s,
            self._workers,
            batch=batch,
            samples=2 * steps * batch * len(courses),
        )
        self._wake = 0
        self.played = SimResult.of(len(courses))

    def play(self) -> SimResult:
        """All steps of all workers.

        Raises:
            AssertionError: if a worker waits for ever; `check_policy` says why the policy lets it.
        """
        for worker in self._workers:
            self._coordinator.join(worker.rank)
        self._data.enrol(self._workers, together=self._sync.bound == 0)
        self._carry_out(self._coordinator.start_if_all_are_here())
        for worker in list(self._workers):
            worker.may_push = not self._sync.gated
            self._compute(worker)
        self._ask_again()
        self._timeline.run()
        waiting = [worker.rank for worker in self._workers if worker.left]
        assert not waiting, f"workers {waiting} wait for ever with {self._sync!r}"
        return self.played

    # -- a worker's way through a step ---------------------------------------------------------------------------

    def _compute(self, worker: SimWorker) -> None:
        if not worker.left:
            self._to_server(lambda: self._leave(worker))
            return
        self._strike(worker, computed=False)
        if not worker.left:
            return
        worker.begun_s, worker.samples = self._timeline.now_s, self._batch
        tuned = self._data.next(worker)
        worker.samples = self._batch if tuned is None else tuned
        computing_s, lost_s = worker.course.next_s(tuned)
        worker.computed_s = computing_s + lost_s
        done_s = self._troubles.done_s(worker.rank, self._timeline.now_s, worker.computed_s)
        self._timeline.at(done_s, lambda: self._computed(worker))

    def _computed(self, worker: SimWorker) -> None:
        self._strike(worker, computed=True)
        if not worker.left:
            return
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
        worker.holds = True
        worker.is_announced, worker.brought, worker.update, worker.flow = False, 0, None, None
        self._later(worker, _STEP_S / 2, lambda: self._bring(worker))

    def _goes_over(self, worker: SimWorker, policy: Policy, brings: int = 0) -> None:
        """As `offbeat.engine.server_switch` does."""
        member = self._coordinator.state.members.get(worker.rank)
        number = brings if member is None else member.step + brings
        worker.policy = policy
        worker.own_step = policy.step_of(number) if isinstance(policy, LocalSGD) else number

    def _bring(self, worker: SimWorker) -> None:
        back_s = max(self._troubles.back_s(rank, self.now_s) for rank in (worker.rank, SERVER))
        if back_s > self.now_s:
            self._later(worker, back_s - self.now_s, lambda: self._bring(worker))
            return
        member = self._coordinator.state.members.get(worker.rank)
        if member is None:  # it was evicted while it computed
            self._come_back(worker)
            return
        worker.push = (worker.rank, member.step)
        worker.may_push = worker.may_push and not self._sync.gated
        if worker.may_push:
            # Word of it goes ahead of it on the same link.
            self._ready(worker)
            self._transfers.send(worker)
        else:
            self._to_server(lambda: self._ready(worker))

    def _ready(self, worker: SimWorker) -> None:
        rank, clock = worker.push
        member = self._coordinator.state.members.get(worker.rank)
        if member is None:
            self._come_back(worker)
            return
        worker.is_announced = True
        self._data.announce(worker, member)
        weight, worker.alone = float(worker.samples * worker.alone), 0
        self.played.read[worker.push] = worker.read
        ready = Ready(rank, clock, self._timeline.now_s, weight)
        self._carry_out(self._coordinator.bring(ready, change=worker.is_change, ends=worker.ends))

    def arriving(self, event: PushEnding | Pushed) -> None:
        """A contribution is nearly there, or whole."""
        if isinstance(event, Pushed):
            self._data.whole((event.worker, event.clock))
        self._tell(event)

    def made(self, update: PendingUpdate) -> None:
        """An update is made everywhere."""
        self.played.updates.append((self.now_s, update.pushes, update.rate))

    def given(self, worker: SimWorker) -> None:
        """A worker has all of its next parameters."""
        self._later(worker, self._links.to_server_s + _STEP_S / 2, lambda: self._pulled(worker))

    def _pulled(self, worker: SimWorker) -> None:
        self._data.stepped(worker, self._coordinator.state.members.get(worker.rank))
        self._tell(Pulled(worker.rank, self._timeline.now_s))
        self._pace()
        worker.may_push = not self._sync.gated
        self._stepped(worker)

    def _stepped(self, worker: SimWorker) -> None:
        took_s = self._timeline.now_s - worker.begun_s
        worker.holds = False
        if worker.rank < self._world:
            self.played.step_s[worker.rank].append(took_s)
            self.played.samples[worker.rank].append(worker.samples)
            self.played.waited_s[worker.rank].append(took_s - worker.computed_s)
        worker.left -= 1
        self._compute(worker)

    def _leave(self, worker: SimWorker) -> None:
        self._data.lose(worker.rank)
        self._carry_out(self._coordinator.leave(worker.rank))

    def _come_back(self, worker: SimWorker) -> None:
        """It was evicted: what it computed is outdated, and it begins again with the newest parameters."""
        worker.update = None
        self._carry_out(self._coordinator.join(worker.rank))
        if self._faults.all:
            self._data.enrol([worker], together=self._sync.bound == 0)
        self._transfers.pull(worker)

    # -- what the policy decides ---------------------------------------------------------------------------------

    def _tell(self, event: Ready | PushEnding | Pushed | Pulled | TakesEveryNth | Deadline) -> None:
        self._carry_out(self._coordinator.tell(event))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        actions = tuple(actions)
        self._data.release(action.worker for action in actions if isinstance(action, Release))
        for action in actions:
            match action:
                case Grant(worker=rank):
                    worker = self._workers[rank]
                    if not worker.may_push:
                        self._to_worker(lambda one=worker: self._granted(one))  # type: ignore[misc]
                case Apply(pushes=pushes):
                    for push in pushes:
                        self._data.applied(push)
                    self._transfers.apply(action, self._workers)
                case Drop(pushes=pushes):
                    for push in pushes:
                        self._drop(push)
                case Release(worker=rank):
                    if rank < self._world:
                        self.played.staleness[rank].append(self._coordinator.last_staleness.get(rank, 0))
                    self._transfers.pull(self._workers[rank])
                case Evict(worker=rank):
                    self._evict(self._workers[rank])
                case Wake(at_s=at_s):
                    self._wake += 1
                    self._timeline.at(at_s, lambda number=self._wake: self._wake_up(number))  # type: ignore[misc]
        if any(isinstance(action, Apply) for action in actions):
            self._ask()

    def _granted(self, worker: SimWorker) -> None:
        if worker.is_announced and not worker.brought and worker.flow is None:
            self._transfers.send(worker)

    def _drop(self, push: Push) -> None:
        self._data.dropped(push)
        worker = self._workers[push[0]]
        if worker.push == push:
            self._transfers.stop(worker)

    def _evict(self, worker: SimWorker) -> None:
        self._transfers.stop(worker)
        self._data.lose(worker.rank)
        if worker.holds and worker.is_announced and not worker.is_pulling:
            self._to_worker(lambda: self._come_back(worker))

    def _wake_up(self, number: int) -> None:
        if number == self._wake:
            self._when_up(lambda: self._tell(Deadline(self._timeline.now_s)) if number == self._wake else None)

    # -- who swaps the policy ------------------------------------------------------------------------------------

    def _ask_again(self) -> None:
        """Ask the controller now, and again while there is somebody to decide about."""
        controller = self._plan.controller
        if controller is not None and any(worker.left for worker in self._workers):
            self._when_up(self._ask)
            self._timeline.after(controller.looks_back_s / _ASKED, self._ask_again)

    def _ask(self) -> None:
        controller = self._plan.controller
        metrics = None if controller is None or self._is_swapping else self._coordinator.metrics(controller)
        if controller is None or metrics is None:
            return
        decision = controller.decide(metrics)
        if isinstance(decision, Swap):
            self._is_swapping, life = True, self._life
            now_s = self._timeline.now_s
            silent = any(self._troubles.back_s(worker.rank, now_s) > now_s for worker in self._workers)
            agreed_s = CONSENT_S if silent else 2 * self._links.to_server_s
            self._timeline.after(agreed_s, lambda: self._adopt(decision) if life == self._life else None)

    def _adopt(self, swap: Swap) -> None:
        self._is_swapping, self._sync = False, swap.sync
        self.played.swaps.append((self._timeline.now_s, swap.sync, swap.reason))
        self._data.together(swap.sync.bound == 0)
        self._carry_out(self._coordinator.swap(swap.sync, by_controller=True))

    def _pace(self) -> None:
        for rank, every in self._data.every().items():
            member = self._coordinator.state.members.get(rank)
            if member is not None and member.every != every:
                self._tell(TakesEveryNth(rank, every, self._timeline.now_s))

    # -- messages ------------------------------------------------------------------------------------------------

    def _to_server(self, happen: Callable[[], None]) -> None:
        self._message("in", happen)

    def _to_worker(self, happen: Callable[[], None]) -> None:
        self._message("out", happen)

    def _message(self, link: str, happen: Callable[[], None]) -> None:
        life = self._life
        self._timeline.after(
            self._links.to_server_s + self._transfers.queue_s(link),
            lambda: self._when_up(lambda: happen() if life == self._life else None),
        )

    def _later(self, worker: SimWorker, delay_s: float, happen: Callable[[], None]) -> None:
        """Let it happen, unless the worker is torn out of what it does before."""
        entry = worker.entry
        self._timeline.after(delay_s, lambda: happen() if worker.entry == entry else None)

    def _when_up(self, happen: Callable[[], None]) -> None:
        """Now, or when the server is there again."""
        back_s = self._troubles.back_s(SERVER, self._timeline.now_s)
        if back_s > self._timeline.now_s:
            self._timeline.at(back_s, lambda: self._when_up(happen))
        else:
            happen()

    # -- what goes wrong -----------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return self._timeline.now_s

    def _strike(self, worker: SimWorker, *, computed: bool) -> None:
        if not self._faults.all or worker.rank >= self._world:
            return
        for fault in self._faults.due(worker.rank, len(self.played.step_s[worker.rank]), computed=computed):
            self.played.struck.append((self.now_s, fault))
            self._faults.strike(fault, self, self._troubles, worker.computed_s if computed else 0.0)

    def end(self, rank: int, missed_s: float | None) -> None:
        """A worker computes nothing any more; it is missed so much later, or says good-bye if that is None."""
        worker = self._workers[rank]
        worker.left, worker.entry = 0, worker.entry + 1
        self.played.ended.add(rank)
        if missed_s is None:
            self._to_server(lambda: self._leave(worker))
        else:
            self._timeline.after(missed_s, lambda: self._when_up(lambda: self._give_up(worker)))

    def miss(self, rank: int, after_s: float, until_s: float) -> None:
        """So much later a worker is given up, which comes back at `until_s`; all of them if it is `SERVER`."""
        for worker in self._workers if rank == SERVER else [self._workers[rank]]:
            self._timeline.after(after_s, lambda one=worker: self._give_up(one))  # type: ignore[misc]
            self._timeline.at(until_s, lambda one=worker: self._return(one))  # type: ignore[misc]

    def _give_up(self, worker: SimWorker) -> None:
        """The server goes on without it."""
        self._transfers.tear_out(worker)
        self._leave(worker)

    def _return(self, worker: SimWorker) -> None:
        """Who was given up comes back; whoever computes then comes with what it computes, which is outdated."""
        if worker.left and worker.holds:
            worker.entry += 1
            self._to_server(lambda: self._come_back(worker))

    def join(self, host: int, after_s: float) -> None:
        """So much later another worker comes, beside this one."""

        def come() -> None:
            rank = len(self._workers)
            course = self._workers[host].course.of_another(rank)
            worker = SimWorker(rank, host, course, self._sync, self._steps, may_push=not self._sync.gated)
            self._workers.append(worker)
            self._carry_out(self._coordinator.join(rank))
            self._data.enrol([worker], together=self._sync.bound == 0)
            self._transfers.give_all(worker, lambda: self._compute(worker))

        self._timeline.after(after_s, lambda: self._when_up(come))

    def throttle(self, at_s: float) -> None:
        """The troubles of the server change then, and with them what passes it."""

        self._timeline.at(at_s, self._transfers.throttle)

    def restart(self, after_s: float) -> None:
        """The server is gone; its next life begins so much later."""
        self._life += 1
        self._is_swapping, self._wake = False, self._wake + 1
        for worker in self._workers:
            self._transfers.tear_out(worker)
        self._transfers.forget()
        life = self._life
        self._timeline.after(after_s, lambda: self._begin_again() if life == self._life else None)

    def _begin_again(self) -> None:
        """All that are left come back: whoever computes goes on, and whoever has a contribution brings it again."""
        before, here = self._coordinator.state, [worker for worker in self._workers if worker.left]
        state = State(hosts=before.hosts, version=before.version)
        self._coordinator = PolicyRunner(self._sync, len(here), lambda: self._timeline.now_s, state)
        self._data.begin()
        for worker in here:
            member = before.members.get(worker.rank)
            least = before.past.get(worker.rank, 0) if member is None else member.step
            self._coordinator.join(worker.rank, least=least)
        self._data.enrol(here, together=self._sync.bound == 0)
        for worker in self._workers:
            if not worker.left:
                self._data.lose(worker.rank)
        self._carry_out(self._coordinator.start_if_all_are_here())
        for worker in here:
            worker.may_push = not self._sync.gated
            if worker.holds:
                worker.is_announced, worker.brought, worker.update, worker.flow = False, 0, None, None
                worker.alone, worker.entry = max(worker.alone, 1), worker.entry + 1
                self._later(worker, self._links.to_server_s, lambda one=worker: self._bring(one))  # type: ignore[misc]
