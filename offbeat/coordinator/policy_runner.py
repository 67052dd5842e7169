"""The runner of the policy, which also counts what the policy promised: one per model, on the first shard.

It turns what happens to workers into events, and hands the policy's decisions to the shards. It waits for all workers
of the beginning before it asks for the first time; from then on whoever is there takes part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from offbeat.control import EventMetrics
from offbeat.history import WorkerReturned, policy_step
from offbeat.protocol.status import ModelStatus, WorkerStatus
from offbeat.sync import Adopted, Apply, Drop, Joined, Left, Release, State, adoption
from offbeat.sync.state import observe
from offbeat.sync.transition import decide, with_past, with_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from offbeat.control import Controller, Metrics
    from offbeat.history import Record as HistoryRecord
    from offbeat.protocol.worker_status import TrainingStatus
    from offbeat.sync import Action, Event, Member, Policy, Push, Ready


@dataclass
class ContributionCounts:
    """The counts of one worker's contributions.

    Args:
        applied, dropped, lost: how many.
        samples: in those that were applied.
        staleness, worst: sum and maximum, over those applied, of the updates between the parameters a contribution was
            computed on and its own update.
        lead: the most steps it was ahead of another worker when it was released.
        waited_s: time from having a contribution to being released.
        joined_s: when it first joined.
        step: how many steps its script had made when it brought the last one, as it says; -1 before the first.
        end: how it ended when it was here last, as `WorkerStatus.phase` has it.
    """

    applied: int = 0
    dropped: int = 0
    lost: int = 0
    samples: float = 0.0
    staleness: int = 0
    worst: int = 0
    lead: int = 0
    waited_s: float = 0.0
    joined_s: float = 0.0
    step: int = -1
    end: str = "gone"


@runtime_checkable
class Explains(Protocol):
    """A policy that can tell who paces the rounds."""

    def explain(self, state: State) -> str: ...


@dataclass
class PolicyRunner:
    """One model's policy at work.

    Args:
        policy: decides.
        world: how many workers the job begins with.
        now_s: monotonic seconds.
        model: which of several.
        record: writes the history.
        validators: ranks of those that came as one; None if contributions are judged beside nobody's.
        least: with fewer workers nothing is decided; those that are done count as if they were there.
    """

    policy: Policy
    world: int
    now_s: Callable[[], float]
    state: State = field(default_factory=State)
    model: int = 0
    record: Callable[[HistoryRecord], None] = lambda record: None
    validators: Set[int] | None = None
    least: int = 0
    started: bool = False
    records: dict[int, ContributionCounts] = field(default_factory=dict)
    last_staleness: dict[int, int] = field(default_factory=dict)
    void: dict[int, int] = field(default_factory=dict)  # worker: its last contribution that weighs nothing
    event_metrics: EventMetrics = field(default_factory=EventMetrics)
    since_s: float = field(init=False)
    _explained: str = ""  # when all were there last
    _left_early: set[int] = field(default_factory=set)  # before the start; if one comes back, it is waited for

    def __post_init__(self) -> None:
        self.since_s = self.now_s()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is decided, because no validator takes part, or too few workers do."""
        return self._is_paused_in(self.state)

    @property
    def lacks_validator(self) -> bool:
        """Whether no validator takes part, whose contributions the others are judged by."""
        return self._lacks_validator(self.state)

    @property
    def left_to_train(self) -> int:
        """The number of workers that take part, and of those that are done: nobody is to come in their place."""
        return self._left_to_train(self.state)

    @property
    def trainers(self) -> Set[int]:
        """The workers that take part, without validators."""
        return self.state.members.keys() - (self.validators or ())

    def _lacks_validator(self, state: State) -> bool:
        return self.validators is not None and self.validators.isdisjoint(state.members)

    def _is_paused_in(self, state: State) -> bool:
        return self._lacks_validator(state) or (self.least > 0 and self._left_to_train(state) < self.least)

    def _left_to_train(self, state: State) -> int:
        here = {*state.members, *state.away}  # who has stepped out, as for a question to all, is there
        done = {worker for worker, one in self.records.items() if one.end == "done"}
        return len((here | done) - (self.validators or set()))

    def join(self, worker: int, *, least: int = 0, weight: float | None = None) -> tuple[Action, ...]:
        """The worker takes part; what is decided now.

        Args:
            least: the number of its next contribution is no lower.
            weight: samples of its last contribution, if it comes back; a round then keeps its size.
        """
        validates = worker in (self.validators or ())
        if validates:
            weight = 0.0  # a round is as large as what the workers bring
        if least or weight is not None:
            self.record(WorkerReturned(self.model, worker, least, weight, validates))
        self.state = with_past(self.state, worker, least)
        if worker in self._left_early:
            self._left_early.discard(worker)
            self.world += not self.started
        self.records.setdefault(worker, ContributionCounts(joined_s=self.now_s()))
        actions = self.tell(Joined(worker, self.now_s()))
        if weight is not None:
            self.state = with_weight(self.state, worker, weight)
        return actions

    def leave_out(self, workers: Set[int]) -> None:
        """Leave out workers that took part before; if one comes back before the start, it is waited for."""
        self._left_early |= workers

    def miss(self, worker: int) -> tuple[Action, ...]:
        """The worker was to take part from the beginning, and is gone before it did; what is decided now."""
        if self.started or worker in self._left_early:
            return ()
        self.world -= 1
        self._left_early.add(worker)
        return self.start_if_all_are_here()

    def leave(self, worker: int, *, returns: bool = False) -> tuple[Action, ...]:
        """The worker is gone, or `returns`; what is decided now."""
        if worker not in self.state.members and worker not in self.state.away:
            return ()
        if not self.started and worker not in (self.validators or ()):
            self.world -= 1
            self._left_early.add(worker)
        self._explained = self._explain()
        return self.tell(Left(worker, self.now_s(), returns))

    def note_end(self, worker: int, end: str) -> None:
        """The worker is gone, and how; "gone" is the least that is known."""
        record = self.records.get(worker)
        if record is not None and (end != "gone" or worker in self.state.members):
            record.end = end

    def lose(self, worker: int, samples: float) -> None:
        """Count that a contribution which was applied is withdrawn."""
        record = self.records.setdefault(worker, ContributionCounts())
        record.applied -= 1
        record.samples -= samples
        record.lost += 1

    def take_back(self, push: Push, samples: float) -> None:
        """Count no longer that a contribution was applied: it is withdrawn, and comes again."""
        record = self.records.setdefault(push[0], ContributionCounts())
        if self.void.get(push[0]) == push[1]:
            record.dropped -= 1
        else:
            record.applied -= 1
            record.samples -= samples

    def start_if_all_are_here(self) -> tuple[Action, ...]:
        """Begin to decide, if everyone who was to come is here."""
        if self.started or self.is_paused or len(self.trainers) < max(1, self.world):
            return ()
        self.started = True
        return self.tell(Adopted(self.now_s()))

    def metrics(self, controller: Controller) -> Metrics | None:
        """The metrics for the controller; None if nothing is decided yet."""
        if not self.started or self.is_paused:
            return None
        stale = {worker: one.staleness / one.applied for worker, one in self.records.items() if one.applied}
        return self.event_metrics.metrics(self.now_s(), self.state, self.policy, controller.looks_back_s, stale)

    def swap(self, policy: Policy, *, by_controller: bool = False) -> tuple[Action, ...]:
        """Another policy decides from now on; what it decides now."""
        self.event_metrics.swapped(self.policy, self.now_s(), by_controller=by_controller)
        event = adoption(self.policy, policy, self.now_s())
        before, self.policy, self._explained = self.policy, policy, ""
        if not self.started:
            return ()
        return self.tell(event) if self.is_paused else self._decide(event, former=before)

    def bring(self, event: Ready, *, change: bool, ends: bool = False) -> tuple[Action, ...]:
        """A worker has computed a contribution; what is decided.

        Args:
            change: it is a change of the worker's own, not a gradient.
            ends: it is the last change of the worker's own, which has heard of a swap.
        """
        is_asked = self.started and not self.is_paused
        return self._decide(event, change=change, ends=ends) if is_asked else self.tell(event)

    def tell(self, event: Event) -> tuple[Action, ...]:
        """Run the policy on `event`; not before the start, nor while there is no validator, or too few workers."""
        never_pauses = self.validators is None and not self.least
        if self.started and (never_pauses or not self._is_paused_in(observe(self.state, event))):
            return self._decide(event)
        self.state = observe(self.state, event)
        self.record(policy_step(self.model, event, (), asked=False))
        self.event_metrics.hear(event, (), self.state)
        return self.start_if_all_are_here() if isinstance(event, Left) and not self.started else ()

    def _decide(
        self, event: Event, *, former: Policy | None = None, change: bool = False, ends: bool = False
    ) -> tuple[Action, ...]:
        """Ask the policy after `event`, and note what it decides."""
        self.state, stages = decide(self.policy, self.state, event, former=former, change=change, ends=ends)
        for stage in stages:
            self._count(stage.before, stage.actions)
        actions = tuple(action for stage in stages for action in stage.actions)
        apart = len(stages[0].actions) if len(stages) > 1 else 0
        self.record(policy_step(self.model, event, actions, asked=True, change=change, ends=ends, apart=apart))
        self.event_metrics.hear(event, actions, self.state)
        return actions

    def status(
        self,
        model: int,
        now_s: float,
        *,
        world: int = 0,
        note: str = "",
        pace: str = "",
        plan: str = "",
        statuses: Mapping[int, TrainingStatus] | None = None,
    ) -> ModelStatus:
        """The status of the model, for people.

        Args:
            now_s: monotonic seconds.
            world: with how many workers the job was to begin.
            note: what happened to the server.
            pace: who paces the rounds and why, if it is not the policy that knows.
            plan: that holds, as TOML.
            statuses: what workers say of themselves.
        """
        said = statuses or {}
        seen = tuple(
            self._seen(worker, record, now_s, said.get(worker)) for worker, record in sorted(self.records.items())
        )
        return ModelStatus(
            model=model,
            policy=repr(self.policy),
            version=self.state.version,
            started=self.started,
            running_s=now_s - self.since_s,
            workers=seen,
            note=note,
            pace=pace or self._explain(),
            world=world,
            plan=plan,
        )

    def _explain(self) -> str:
        """Say which worker paces the rounds and why, if the policy can; while some have stepped out, what it was
        before.
        """
        if not isinstance(self.policy, Explains):
            return ""
        now = "" if self.state.away else self.policy.explain(self.state)
        return now or self._explained

    def _seen(
        self, worker: int, record: ContributionCounts, now_s: float, status: TrainingStatus | None
    ) -> WorkerStatus:
        member = self.state.members.get(worker)
        counts: dict[str, Any] = {
            "applied": record.applied,
            "dropped": record.dropped,
            "lost": record.lost,
            "staleness": record.staleness / record.applied if record.applied else 0.0,
            "worst": record.worst,
            "lead": record.lead,
            "waited_s": record.waited_s,
            "here_s": now_s - record.joined_s,
            "status": status,
            "validates": worker in (self.validators or ()),
        }
        if member is None:
            phase = "waiting" if worker in self.state.away else record.end
            return WorkerStatus(worker=worker, phase=phase, made=record.step + 1, **counts)
        return WorkerStatus(
            worker=worker,
            phase=member.phase,
            step=member.step,
            made=max(0, record.step + (member.ready_s is None)),
            clock=member.clock,
            since_s=now_s - member.since_s,
            samples=member.weight or 0.0,
            computing_s=member.computing_s or 0.0,
            turn_s=member.turn_s or 0.0,
            **counts,
        )

    def _count(self, state: State, actions: tuple[Action, ...]) -> None:
        version, bases = state.version, dict[int, int]()  # of those that are released here
        for action in actions:
            if isinstance(action, Apply):
                for worker, clock in action.pushes:
                    record = self.records.setdefault(worker, ContributionCounts())
                    if self.void.get(worker) == clock:
                        record.dropped += 1
                        continue
                    member = state.members.get(worker)
                    stale = version - bases.get(worker, version if member is None else member.base)
                    record.applied += 1
                    record.samples += state.pending.get((worker, clock), 0.0)
                    record.staleness += stale
                    record.worst = max(record.worst, stale)
                    self.last_staleness[worker] = stale
                version += 1
            elif isinstance(action, Drop):
                for worker, _ in action.pushes:
                    self.records.setdefault(worker, ContributionCounts()).dropped += 1
            elif isinstance(action, Release):
                member = self.state.members.get(action.worker)
                bases[action.worker] = version
                if member is not None and action.worker in state.members:
                    record = self.records[action.worker]
                    ready_s = state.members[action.worker].ready_s
                    record.waited_s += 0.0 if ready_s is None else self.state.now_s - ready_s
                    lead = member.pace - member.rests - self.state.slowest_but(action.worker)
                    record.lead = max(record.lead, lead)


def times_s(member: Member, arrived_s: float | None, now_s: float) -> tuple[float, float]:
    """Seconds that a worker which has just pulled had pushed and pulled, and seconds that it had waited for others.

    Args:
        arrived_s: when its contribution was there.
    """
    ready_s = member.last_ready_s if member.last_ready_s is not None else now_s
    released_s = member.released_s if member.released_s is not None else now_s
    granted_s = member.granted_s if member.granted_s is not None else released_s
    pushed_s = max(0.0, min(released_s, released_s if arrived_s is None else arrived_s) - granted_s)
    transfer_s = pushed_s + now_s - released_s
    return transfer_s, max(0.0, now_s - ready_s - transfer_s)
