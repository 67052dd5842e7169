"""Workers and a parameter server.

The coordinator is the server's own: it hears the events of the play, and its instructions are played. Workers, links
and shards are models:

* A worker computes, announces its contribution, pushes it as soon as it may, and has its next parameters when the last
  of them has arrived.
* A contribution is cut into `PARTS`, which stand for its blocks: a part of an update is made when that part of all its
  contributions is there, and of all earlier updates where those go in order; then it travels back.
* All servers are one, with the sum of their links: parameters are spread over them evenly.
* TCP shares a link unevenly. Which stream of several gets more changes from step to step (`transfers`); an update that
  needs all of them waits for the one that gets least. With even shares `BSP` came out 16 % too fast on ps_uniform;
  these weights make it right there, and on the scenarios that they were not chosen by.
* What the plan's controller decides is proposed to all workers; word of it goes there and back, but for those that are
  stopped. Who computes hears of a swap behind that.
* A message waits behind the data on its way: half a queue where several streams share the link. One alone, which is
  sent as fast as it arrives, leaves none.
* What goes wrong is done to it from outside (`faults`): workers are given up, come back, end and join; the server
  begins a new life, in which whoever has a contribution brings it again (`offbeat.coordinator.reconnect`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.events import (
    ModelBegun,
    ModelRestored,
    ShardSaid,
    TimePassed,
    WorkerGone,
    WorkerOpened,
    WorkerSaid,
)
from offbeat.coordinator.instructions import (
    ControllerTimer,
    RejectPeer,
    SendToAll,
    SendToShards,
    SendToWorker,
    SetTimer,
)
from offbeat.coordinator.progress import TrainingProgress
from offbeat.protocol.optimizer_spec import OptimizerSpec
from offbeat.protocol.plan_swap import AdoptPlan, PlanAgreement, PlanProposed
from offbeat.protocol.shards import (
    ApplyContributions,
    DropContribution,
    ModelFilled,
    PushDone,
    PushNearlyDone,
    ReleaseFromShard,
)
from offbeat.protocol.training import (
    Announce,
    ContributionInfo,
    Evicted,
    Granted,
    ModelInfo,
    PullDone,
    Reconnect,
    ReleaseWorker,
)
from offbeat.sim.disturbances import SERVER, Disturbances
from offbeat.sim.faults import Faults
from offbeat.sim.leased_data import LeasedData
from offbeat.sim.result import SimResult
from offbeat.sim.sim_plan import SimPlan
from offbeat.sim.transfers import SimulatedTransfers
from offbeat.sim.worker import SimWorker
from offbeat.sync import Apply, Pushed, PushEnding, StepsLocally
from offbeat.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.coordinator.events import CoordinatorEvent, WorkerMessage
    from offbeat.coordinator.instructions import Timer
    from offbeat.plan import Plan
    from offbeat.protocol.messages import Decision, ToWorker
    from offbeat.sim.compute_time import ComputeTimes
    from offbeat.sim.links import Links
    from offbeat.sim.worker import PendingUpdate
    from offbeat.sync import Member, Policy

STEP_S = 0.002  # of a worker, beyond computing and waiting: packing, the end of the step, Python


class SimulatedServer:
    """A row whose plan has a server, in virtual time. A `Cluster`, and a `TransferOwner`.

    Args:
        plan: of the row.
        compute_times: of the workers.
        links: of the scenario.
        size_bytes: of a contribution on the wire; `pull_bytes` of the parameters.
        steps: of each worker.
        batch: samples of a worker's step, if batches are not tuned.
        troubles: what goes wrong meanwhile, at its time; `faults`, at a worker's step.
        places: as of `SimulatedTransfers`.
    """

    def __init__(
        self,
        plan: Plan,
        compute_times: Sequence[ComputeTimes],
        links: Links,
        *,
        size_bytes: float,
        pull_bytes: float,
        steps: int,
        batch: int,
        troubles: Disturbances | None = None,
        faults: Faults | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        self._plan, self._links = SimPlan.of(plan), links
        self._troubles, self._faults = troubles or Disturbances(), faults or Faults()
        self._timeline = timeline = Timeline()
        self._transfers = SimulatedTransfers(
            self, timeline, links, self._troubles, push_bytes=size_bytes, pull_bytes=pull_bytes, places=places
        )
        self._workers = [SimWorker(rank, rank, own, plan.sync, steps) for rank, own in enumerate(compute_times)]
        self._steps, self._world = steps, len(compute_times)
        self._life = 0
        self._coordinator = self._new_coordinator()
        self._timers: dict[Timer, int] = {}  # how often each was set in this life
        samples = 2 * steps * batch * len(compute_times)
        self._data = LeasedData(plan.tuning is not None, world=len(compute_times), batch=batch, samples=samples)
        self.played = SimResult.of(len(compute_times))

    def play(self) -> SimResult:
        """All steps of all workers.

        Raises:
            AssertionError: if a worker waits for ever; `check_policy` says why the policy lets it.
        """
        self._handle(ModelBegun(0.0, 0, self._details(range(self._world))))
        for worker in self._workers:
            self._open(worker)
        self._handle(ShardSaid(0.0, ModelFilled(0)))
        for worker in list(self._workers):
            self._begin(worker)
        self._timeline.run()
        waiting = [worker.rank for worker in self._workers if worker.left]
        assert not waiting, f"workers {waiting} wait for ever with {self._policy!r}"
        return self.played

    # -- a worker's way through a step ---------------------------------------------------------------------------

    def _compute(self, worker: SimWorker) -> None:
        if not worker.left:
            self._to_server(lambda: self._leave(worker))
            return
        self._strike(worker, computed=False)
        if not worker.left:
            return
        if (ask := self._data.ask(worker)) is not None:
            self._say(worker, ask)
        tuned = self._data.samples(worker)
        worker.begun_s, worker.samples = self._timeline.now_s, self._data.batch if tuned is None else tuned
        computing_s, lost_s = worker.compute_times.next_s(tuned)
        worker.computed_s = computing_s + lost_s
        self._pass(worker, computing_s, lost_s)

    def _pass(self, worker: SimWorker, computing_s: float, lost_s: float) -> None:
        """Go through the step's forward pass and backward."""
        done_s = self._troubles.done_s(worker.rank, self._timeline.now_s, worker.computed_s)
        self._timeline.at(done_s, lambda: self._computed(worker))

    def _computed(self, worker: SimWorker) -> None:
        self._strike(worker, computed=True)
        if not worker.left:
            return
        before, policy = worker.policy, self._policy
        if before != policy and not isinstance(before, StepsLocally):
            self._goes_over(worker, policy)
        what = worker.policy.contributes(worker.own_step)
        worker.own_step, worker.alone = worker.own_step + 1, worker.alone + 1
        if before != policy and isinstance(before, StepsLocally):
            what = what or "change"  # it brings what it has
            self._goes_over(worker, policy, brings=1)
        if what is None:
            self._stepped(worker)
            return
        worker.is_change = what == "change"
        worker.ends = worker.is_change and before != policy
        worker.holds = True
        self._has_computed(worker)

    def _has_computed(self, worker: SimWorker) -> None:
        """Bring what was computed."""
        self._forget_push(worker)
        self._later(worker, STEP_S / 2, lambda: self._bring(worker))

    def _forget_push(self, worker: SimWorker) -> None:
        """Begin to push the contribution at hand anew."""
        worker.is_announced, worker.brought, worker.update, worker.flow = False, 0, None, None

    def _goes_over(self, worker: SimWorker, policy: Policy, brings: int = 0) -> None:
        """Go over as `offbeat.engine.switchable_sync` does at a server."""
        member = self._members.get(worker.rank)
        number = brings if member is None else member.step + brings
        worker.policy = policy
        worker.own_step = policy.step_of(number) if isinstance(policy, StepsLocally) else number

    def _bring(self, worker: SimWorker) -> None:
        back_s = max(self._troubles.back_s(rank, self.now_s) for rank in (worker.rank, SERVER))
        if back_s > self.now_s:
            self._later(worker, back_s - self.now_s, lambda: self._bring(worker))
            return
        member = self._members.get(worker.rank)
        if member is None:  # it was evicted while it computed
            self._come_back(worker)
            return
        worker.push = (worker.rank, member.step)
        if worker.may_push:
            # Word of it goes ahead of it on the same link.
            self._ready(worker)
            self._transfers.send(worker)
        else:
            self._to_server(lambda: self._ready(worker))

    def _ready(self, worker: SimWorker) -> None:
        if worker.rank not in self._members:
            self._come_back(worker)
            return
        worker.is_announced = True
        self._say(worker, self._announcement(worker))

    def _announcement(self, worker: SimWorker) -> Announce:
        weight, worker.alone = float(worker.samples * worker.alone), 0
        self.played.read[worker.push] = worker.read
        about = ContributionInfo(
            weight,
            ({},) if worker.is_change else (),
            used=self._data.take(worker),
            change=worker.is_change,
            ends=worker.ends,
        )
        return Announce(0, worker.push[1], about)

    def arriving(self, event: PushEnding | Pushed) -> None:
        """A contribution is nearly there, or whole."""
        kind = PushDone if isinstance(event, Pushed) else PushNearlyDone
        self._handle(ShardSaid(self.now_s, kind(0, event.worker, event.clock)))

    def made(self, update: PendingUpdate) -> None:
        """An update is made everywhere."""
        self.played.updates.append((self.now_s, update.pushes, update.rate))

    def given(self, worker: SimWorker) -> None:
        """A worker has all of its next parameters."""
        self._later(worker, self._links.to_server_s + STEP_S / 2, lambda: self._pulled(worker))

    def given_part(self, worker: SimWorker, part: int) -> None:
        """Do nothing: a step begins when all parts are there."""

    def pushed_all(self, worker: SimWorker) -> None:
        """Do nothing: a contribution is announced before it is pushed."""

    def _pulled(self, worker: SimWorker) -> None:
        if worker.rank in self._members:
            self._say(worker, PullDone(0, worker.clock))
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
        self._handle(WorkerGone(self.now_s, worker.rank))

    def _come_back(self, worker: SimWorker) -> None:
        """Begin again with the newest parameters: it was evicted, and what it computed is outdated."""
        worker.update = None
        self._open(worker)

    def _open(self, worker: SimWorker, back: Reconnect | None = None) -> None:
        """Let a worker take part, or take part again."""
        worker.is_joining = True
        self._handle(WorkerOpened(self.now_s, worker.rank, 0, self._details(range(self._world), back)))
        if (about := self._data.register(worker)) is not None:
            self._say(worker, about)

    def _begin(self, worker: SimWorker) -> None:
        """Begin to compute: it has its first parameters."""
        worker.is_new = False
        self._say(worker, PullDone(0, worker.clock))
        self._compute(worker)

    # -- the coordinator -----------------------------------------------------------------------------------------

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(lambda _: self._plan, self._life, check_hyper=lambda spec, hyper, worker: None)

    def _details(self, ranks: Sequence[int], back: Reconnect | None = None) -> ModelInfo:
        return ModelInfo(
            world=self._world,
            shards=1,
            holders=1,
            plan="",
            layout="",
            names=(),
            blocks=(),
            optimizer=OptimizerSpec("", (), ()),
            back=back,
            hosts=self._links.shards,
            ranks=tuple(ranks),
        )

    @property
    def _policy(self) -> Policy:
        """The policy that decides."""
        return self._coordinator.models[0].runner.policy

    @property
    def _members(self) -> Mapping[int, Member]:
        """Workers that take part."""
        return self._coordinator.models[0].runner.state.members

    def _say(self, worker: SimWorker, message: WorkerMessage) -> None:
        self._handle(WorkerSaid(self.now_s, worker.rank, message))

    def _handle(self, event: CoordinatorEvent) -> None:
        """Have the coordinator hear of an event, and play what it says."""
        for instruction in self._coordinator.handle(event):
            match instruction:
                case SendToWorker(worker=rank, message=message):
                    self._hear(self._workers[rank], message)
                case SendToShards(decision=decision):
                    self._carry_out(decision)
                case SendToAll(message=AdoptPlan(text=text)):
                    self.played.swaps.append((self.now_s, self._policy, text))
                case SetTimer(timer=timer, at_s=at_s):
                    self._set_timer(timer, at_s)
                case RejectPeer(error=error):
                    raise error

    def _carry_out(self, decision: Decision) -> None:
        """Carry out a decision as the shards do."""
        match decision:
            case ApplyContributions(pushes=pushes, rate=rate, in_order=in_order):
                self._transfers.apply(Apply(pushes, rate, in_order), self._workers)
            case DropContribution(worker=rank, clock=clock):
                worker = self._workers[rank]
                if worker.push == (rank, clock):
                    self._transfers.stop(worker)
            case ReleaseFromShard(worker=rank):
                worker = self._workers[rank]
                if not worker.is_new:
                    self._transfers.pull(worker)
                elif self.now_s:  # at the beginning all have them
                    self._transfers.give_all(worker, lambda: self._begin(worker))

    def _hear(self, worker: SimWorker, message: ToWorker) -> None:
        """A worker is told something; what it has to answer to is on its way for a while."""
        match message:
            case Granted():
                self._to_worker(lambda: self._granted(worker))
            case ReleaseWorker(step=step, staleness=staleness, waits=waits):
                worker.clock, worker.may_push = step, not waits
                if not worker.is_joining and worker.rank < self._world:
                    self.played.staleness[worker.rank].append(staleness)
                worker.is_joining = False
            case Evicted():
                self._transfers.stop(worker)
                if worker.holds and worker.is_announced and not worker.is_pulling:
                    self._to_worker(lambda: self._come_back(worker))
            case PlanProposed(number=number, plan=plan):
                if self._troubles.back_s(worker.rank, self.now_s) <= self.now_s:
                    agrees, life = PlanAgreement(number, plan), self._life
                    agree = lambda: self._say(worker, agrees) if life == self._life else None  # noqa: E731
                    self._timeline.after(2 * self._links.to_server_s, agree)
            case _:
                self._data.hear(worker, message)

    def _granted(self, worker: SimWorker) -> None:
        if worker.is_announced and not worker.brought and worker.flow is None:
            self._transfers.send(worker)

    def _set_timer(self, timer: Timer, at_s: float | None) -> None:
        life = self._life
        self._timers[timer] = number = self._timers.get(timer, 0) + 1

        def due() -> None:
            if (life, number) == (self._life, self._timers[timer]):
                self._handle(TimePassed(self.now_s, timer))

        # A controller looks on as long as there is somebody to decide about.
        is_idle = isinstance(timer, ControllerTimer) and not any(worker.left for worker in self._workers)
        if at_s is not None and not is_idle:
            self._timeline.at(at_s, lambda: self._when_up(due))

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
        """Let something happen now, or when the server is there again."""
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
        """Give up a worker so much later, which comes back at `until_s`; all of them if it is `SERVER`."""
        for worker in self._workers if rank == SERVER else [self._workers[rank]]:
            self._timeline.after(after_s, lambda one=worker: self._give_up(one))  # type: ignore[misc]
            self._timeline.at(until_s, lambda one=worker: self._return(one))  # type: ignore[misc]

    def _give_up(self, worker: SimWorker) -> None:
        """The server goes on without it."""
        self._transfers.tear_out(worker)
        self._leave(worker)

    def _return(self, worker: SimWorker) -> None:
        """Let a worker that was given up come back; what one that computes then pushes is outdated."""
        if worker.left and worker.holds:
            worker.entry += 1
            self._to_server(lambda: self._come_back(worker))

    def join(self, host: int, after_s: float) -> None:
        """Let another worker join so much later, beside this one."""

        def come() -> None:
            rank = len(self._workers)
            compute_times = self._workers[host].compute_times.of_another(rank)
            self._workers.append(SimWorker(rank, host, compute_times, self._policy, self._steps))
            self._open(self._workers[rank])

        self._timeline.after(after_s, lambda: self._when_up(come))

    def throttle(self, at_s: float) -> None:
        """The troubles of the server change then, and with them what passes it."""

        self._timeline.at(at_s, self._transfers.throttle)

    def restart(self, after_s: float) -> None:
        """The server is gone; its next life begins so much later."""
        self._life += 1
        for worker in self._workers:
            self._transfers.tear_out(worker)
        self._transfers.forget()
        life = self._life
        self._timeline.after(after_s, lambda: self._begin_again() if life == self._life else None)

    def _begin_again(self) -> None:
        """Let all that are left come back: those that compute go on, and those with a contribution bring it again."""
        here = [worker for worker in self._workers if worker.left]
        before, self._timers = self._coordinator.models[0].runner.state, {}
        self._plan = self._plan.controlled(self._policy)
        self._coordinator = self._new_coordinator()
        ranks = [worker.rank for worker in here]
        progress = TrainingProgress({}, tuple(ranks))
        self._handle(ModelRestored(self.now_s, 0, self._details(ranks), before.version, progress))
        for worker in here:
            member = before.members.get(worker.rank)
            clock = before.past.get(worker.rank, 0) if member is None else member.step
            back = Reconnect(life=-1, clock=clock, version=before.version, holds=worker.holds, waits=worker.holds)
            self._open(worker, back)
        for worker in here:
            if worker.holds:
                self._forget_push(worker)
                worker.alone, worker.entry = max(worker.alone, 1), worker.entry + 1
                self._later(worker, self._links.to_server_s, lambda one=worker: self._bring(one))  # type: ignore[misc]
