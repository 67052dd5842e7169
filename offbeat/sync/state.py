"""The `State` that every synchronization policy decides from, and the events that change it.

A worker's way through one step, seen from where the parameters are kept:

    computing --Ready--> held --Grant--> pushing --Pushed--> pushed
                           |                                    |
                           +------------- Release --------------+--> pulling --Pulled--> computing the next step

`Ready`, `Pushed` and `Pulled` happen to it; `Grant` and `Release` are decided by the policy. `Release` may come before
`Pushed`: then blocks of the parameters travel back while later blocks of the contribution still arrive. `Grant` may
come before `Ready`, to a worker that pushes early: then blocks travel while it computes the others.

Facts are kept here once, for every policy: `observe` takes in an event, `enact` what a policy decided. A policy is only
a rule over them, so exchanging one for another loses nothing.

Counting: `step` is the step a worker computes or exchanges (it grows with `Release`); `clock` counts its contributions
that have arrived whole or were dropped. `version` counts updates of the parameters, one per `Apply`. Policies compare
workers by `pace` and `brought`, which are `step` and `clock` less the lead that was forgiven (`Adopted.level`, or
`Joined` when nobody else is that far). A worker that takes part in every m-th round only (`TakesEveryNth`) is counted m
- 1 steps ahead when it is released, which are those that it leaves out: nobody waits for it until they are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.float_sum import add_up
from offbeat.sync.actions import Action, Apply, Drop, Evict, Grant, Push, Release, Remember, Wake
from offbeat.sync.events import Adopted, Deadline, Event, Joined, Left, Pulled, Pushed, PushEnding, Ready, TakesEveryNth

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALPHA = 0.1  # of the moving averages
# The first steps of a worker, which pay for what later ones do not, count in no average.
UNCOUNTED_STEPS = 2

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One worker.

    Args:
        step: the step it computes or exchanges.
        clock: its contributions that have arrived whole, or were dropped.
        ahead: steps that are not counted when workers are compared; below 0 if some are counted that it leaves out.
        every: it takes part in every such round.
        rests: rounds before `step` that it leaves out.
        base: `version` of the parameters it computes on.
        weight: of its last contribution, in samples; None before the first.
        ready_s: since when it has a contribution for `step`; None while it computes.
        granted_s: since when it may push it, until it has pulled; None if it may not. Of one that was granted while it
            computed, since when it was ready.
        ending: whether nearly all of the contribution that was granted last is there.
        arrived: whether the contribution for `step` is there.
        released_s: since when it may pull the parameters of `step`; None once it has.
        computing_s: moving average of the time from having parameters to having a contribution.
        turn_s: moving average of the time from `Release` to `Pulled`, under the present policy.
        push_s: moving average of the time from `Grant` to `PushEnding`, under the present policy.
        interval_s: between its last two `Ready`.
        since_s: when its phase last changed.
        pushes_early: it pushes what it has of a contribution while it computes, once it is granted.
        joined: the number that it joined with, before it was raised to the others'.
    """

    step: int = 0
    clock: int = 0
    ahead: int = 0
    every: int = 1
    rests: int = 0
    base: int = 0
    weight: float | None = None
    ready_s: float | None = None
    granted_s: float | None = None
    ending: bool = False
    arrived: bool = False
    released_s: float | None = None
    computing_s: float | None = None
    turn_s: float | None = None
    push_s: float | None = None
    interval_s: float | None = None
    since_s: float = 0.0
    last_ready_s: float | None = field(default=None, repr=False)
    steps_here: int = field(default=0, repr=False)
    pushes_early: bool = field(default=False, repr=False)
    joined: int = field(default=0, repr=False)

    @property
    def held(self) -> bool:
        """Whether it waits for a decision of the policy, or for its own contribution to arrive."""
        return self.ready_s is not None

    def first_undecided(self, *, is_decided: bool) -> int:
        """The number of its first contribution of which nothing was decided.

        Where it has brought nothing since it joined, that is the one that it holds from before.

        Args:
            is_decided: whether something was decided of the contribution for `step`.
        """
        return self.step + is_decided if self.steps_here else self.joined

    @property
    def pace(self) -> int:
        """The step it is at, as workers are compared."""
        return self.step - self.ahead

    @property
    def brought(self) -> int:
        """The number of contributions it has pushed, as workers are compared."""
        return self.clock - self.ahead

    def is_off(self, low: int) -> bool:
        """Whether the round in which the slowest is, at pace `low`, is one that it leaves out."""
        return self.rests > 0 and self.pace - self.rests <= low < self.pace

    def released(self, at_s: float, version: int) -> Member:
        """The member after its release."""
        rests = self.every - 1
        return changed(
            self, step=self.step + 1, ahead=self.ahead - rests, rests=rests, ready_s=None, arrived=False,
            released_s=at_s, since_s=at_s, base=version,
        )  # fmt: skip

    @property
    def owes(self) -> bool:
        """Whether it may push, or has begun to, and its contribution is not there; others may wait for it."""
        due = self.step + (self.released_s is None)
        return self.clock < due and (self.granted_s is not None or self.released_s is not None)

    @property
    def is_pushing(self) -> bool:
        """Whether its contribution is on its way, and more than the end of it is to come."""
        return self.owes and self.granted_s is not None and not self.ending

    @property
    def may_begin(self) -> bool:
        """Whether it would push what it has so far, if it were granted."""
        return self.pushes_early and self.granted_s is None and self.phase == "computing"

    @property
    def phase(self) -> str:
        """The activity of the worker, in one word, for people."""
        if self.released_s is not None:
            return "pulling"
        if self.ready_s is None:
            return "computing"
        if self.granted_s is None:
            return "held"
        return "pushed" if self.arrived else "pushing"


@dataclass(frozen=True)
class State:
    """The state of a job as policies see it; immutable.

    Args:
        members: the workers that take part, by rank.
        pending: contributions that were announced and are neither applied nor dropped, with their weight in samples.
        version: updates so far.
        now_s: time of the last event.
        wake_s: when a `Deadline` is due, or None.
        memory: the policy's own; None for a policy that has just been adopted.
        past: of workers that are gone: the number of the contribution they would bring next.
        away: of those that have stepped out and will return: their weight.
        hosts: over how many the parameters are spread.
    """

    members: Mapping[int, Member] = field(default_factory=dict)
    pending: Mapping[Push, float] = field(default_factory=dict)
    version: int = 0
    now_s: float = 0.0
    wake_s: float | None = None
    memory: Any = None
    past: Mapping[int, int] = field(default_factory=dict)
    away: Mapping[int, float] = field(default_factory=dict)
    hosts: int = 1

    @property
    def held(self) -> tuple[int, ...]:
        """Workers that are held, those that have waited longest first."""
        waiting = [(m.ready_s, worker) for worker, m in self.members.items() if m.ready_s is not None]
        return tuple([worker for _, worker in sorted(waiting)])

    @property
    def low(self) -> int:
        """The lowest pace of a member; 0 if there is none."""
        return min([m.step - m.ahead for m in self.members.values()], default=0)

    @property
    def weight(self) -> float:
        """Samples of this round: the weights of those in it. Who has brought nothing yet counts as the others do."""
        low = self.low
        here = [m for m in self.members.values() if not m.is_off(low)]
        known = [m.weight for m in here if m.weight is not None]
        return add_up(self.away.values()) + (add_up(known) / len(known) * len(here) if known else 0.0)

    @property
    def orphans(self) -> tuple[Push, ...]:
        """Pending contributions whose workers are gone, or have come back since; they arrived whole."""
        return tuple(sorted(push for push in self.pending if not self._has(push)))

    def share(self, *pushes: Push) -> float:
        """The part of a round's samples that these pending contributions are made from; what is left from larger rounds
        than this one is no more than a whole round.
        """
        weight = self.weight
        return min(1.0, add_up([self.pending[push] for push in pushes]) / weight) if weight else 0.0

    def slowest_but(self, worker: int) -> int:
        """The fewest contributions that any other worker has pushed; its own number if it is alone."""
        others = [m.clock - m.ahead for other, m in self.members.items() if other != worker]
        return min(others, default=self.members[worker].pace + 1)

    def _has(self, push: Push) -> bool:
        return push[0] in self.members and self.members[push[0]].step == push[1]


class InvalidDecision(AssertionError):
    """A policy decided what is not possible; the text tells the story."""


def observe(state: State, event: Event) -> State:
    """The state after `event`; what is said about a worker that takes no part any more changes nothing."""
    state = changed(state, now_s=event.at_s)
    match event:
        case Ready(worker=worker):
            return _ready(state, event) if worker in state.members else state
        case PushEnding(worker=worker, clock=clock):
            return _ending(state, worker, clock) if worker in state.members else state
        case Pushed(worker=worker, clock=clock):
            return _pushed(state, worker, clock) if worker in state.members else state
        case Pulled(worker=worker, pushes_early=pushes_early):
            return _pulled(state, worker, pushes_early) if worker in state.members else state
        case Joined(worker=worker):
            return _joined(_left(state, worker), worker)
        case Left(worker=worker, returns=returns):
            return _left(state, worker, returns)
        case TakesEveryNth(worker=worker, every=every):
            return _with(state, worker, every=every) if worker in state.members else state
        case Deadline():
            return changed(state, wake_s=None)
        case Adopted(level=level):
            return _adopted(state, level)


def enact(state: State, action: Action) -> State:
    """The state after `action`.

    Raises:
        InvalidDecision: if the action is not possible in this state.
    """
    match action:
        case Grant(worker=worker):
            member = _member(state, action, worker)
            if member.granted_s is not None:
                raise _misstep(state, action, "it may push already")
            if member.may_begin:
                return _with(state, worker, granted_s=state.now_s, ending=False)
            if not member.held:
                raise _misstep(state, action, "it has nothing to push")
            return _with(state, worker, granted_s=state.now_s, ending=False, since_s=state.now_s)
        case Release(worker=worker):
            member = _member(state, action, worker)
            if not member.held:
                raise _misstep(state, action, "it is not held")
            if (worker, member.step) in state.pending:
                raise _misstep(state, action, "its contribution is still pending")
            return changed(state, members={**state.members, worker: member.released(state.now_s, state.version)})
        case Apply(pushes=pushes):
            if not pushes:
                raise _misstep(state, action, "there is nothing in it")
            for push in pushes:
                member_ = state.members.get(push[0])
                if member_ is not None and member_.step == push[1] and member_.granted_s is None:
                    raise _misstep(state, action, f"worker {push[0]} may not push")
            return changed(state, pending=_without(state, action, pushes), version=state.version + 1)
        case Drop(pushes=pushes):
            state = changed(state, pending=_without(state, action, pushes))
            for worker, clock in pushes:
                if worker in state.members:
                    state = _with(state, worker, clock=max(state.members[worker].clock, clock + 1))
            return state
        case Evict(worker=worker):
            _member(state, action, worker)
            return _left(state, worker)
        case Wake(at_s=at_s):
            return changed(state, wake_s=at_s)
        case Remember(memory=memory):
            return changed(state, memory=memory)
        case _:
            raise InvalidDecision(f"{action!r} is no action.")


def changed(thing: T, **changes: Any) -> T:
    """Do what `dataclasses.replace` does, seven times as fast; copying is most of the cost of a decision."""
    copy = object.__new__(type(thing))
    copy.__dict__.update(thing.__dict__)
    copy.__dict__.update(changes)
    return copy


def _ready(state: State, event: Ready) -> State:
    member = state.members[event.worker]
    assert (event.clock, member.phase) == (member.step, "computing"), f"{event} does not follow on {member}"
    interval_s = None if member.last_ready_s is None else event.at_s - member.last_ready_s
    computing_s = member.computing_s
    if member.steps_here >= UNCOUNTED_STEPS:
        computing_s = _moved(computing_s, event.at_s - member.since_s)
    # What was pushed while it computed took no time of its turn.
    granted_s = None if member.granted_s is None else event.at_s
    state = _with(
        state, event.worker, weight=event.weight, ready_s=event.at_s, granted_s=granted_s, arrived=False,
        computing_s=computing_s, interval_s=interval_s, last_ready_s=event.at_s, since_s=event.at_s,
        steps_here=member.steps_here + 1,
    )  # fmt: skip
    return changed(state, pending={**state.pending, (event.worker, event.clock): event.weight})


def _ending(state: State, worker: int, clock: int) -> State:
    member = state.members[worker]
    if clock != member.step - (member.released_s is not None):  # word of it came later than what followed
        return state
    push_s = member.push_s
    if member.is_pushing and member.granted_s is not None and member.steps_here >= UNCOUNTED_STEPS:
        push_s = _moved(push_s, state.now_s - member.granted_s)
    return _with(state, worker, ending=True, push_s=push_s)


def _pushed(state: State, worker: int, clock: int) -> State:
    state = _ending(state, worker, clock)
    member = state.members[worker]
    # It may have been released, for its next step, before the last block was here.
    if member.held and clock == member.step:
        return _with(state, worker, clock=clock + 1, arrived=True, since_s=state.now_s)
    return _with(state, worker, clock=max(member.clock, clock + 1))


def _pulled(state: State, worker: int, pushes_early: bool) -> State:
    member = state.members[worker]
    turn_s = member.turn_s
    if member.granted_s is not None and member.released_s is not None and member.steps_here >= UNCOUNTED_STEPS:
        turn_s = _moved(turn_s, state.now_s - member.released_s)
    return _with(
        state, worker, released_s=None, granted_s=None, turn_s=turn_s, since_s=state.now_s, pushes_early=pushes_early
    )


def _joined(state: State, worker: int) -> State:
    others = state.members.values()
    first = min([m.step for m in others], default=max(state.past.values(), default=0))
    joined = state.past.get(worker, 0)
    step = max(first, joined)
    paces = [m.pace for m in others] or [step]
    pace = min(max(step, min(paces)), max(paces))
    member = Member(step=step, clock=step, ahead=step - pace, base=state.version, since_s=state.now_s, joined=joined)
    past = {other: number for other, number in state.past.items() if other != worker}
    away = {other: weight for other, weight in state.away.items() if other != worker}
    return changed(state, members={**state.members, worker: member}, past=past, away=away)


def _left(state: State, worker: int, returns: bool = False) -> State:
    member = state.members.get(worker)
    away = {other: weight for other, weight in state.away.items() if other != worker}
    if member is None:
        return changed(state, away=away)
    if returns:
        away[worker] = member.weight or 0.0
    members = {other: m for other, m in state.members.items() if other != worker}
    pending = state.pending
    if not member.arrived:
        pending = {push: weight for push, weight in pending.items() if push != (worker, member.step)}
    past = {**state.past, worker: member.first_undecided(is_decided=member.held)}
    return changed(state, members=members, pending=pending, past=past, away=away)


def _adopted(state: State, level: bool) -> State:
    low, members = state.low, {}
    for worker, m in state.members.items():
        # How long a turn takes depends on how many have one at the same time; one under way is not measured.
        granted_s = None if m.released_s is not None else m.granted_s
        ahead, rests = (m.step - low, 0) if level else (m.ahead, m.rests)
        members[worker] = changed(m, turn_s=None, push_s=None, granted_s=granted_s, ahead=ahead, rests=rests)
    return changed(state, members=members, memory=None, wake_s=None)


def _with(state: State, worker: int, **changes: Any) -> State:
    return changed(state, members={**state.members, worker: changed(state.members[worker], **changes)})


def _without(state: State, action: Action, pushes: tuple[Push, ...]) -> Mapping[Push, float]:
    rest = dict(state.pending)
    for push in pushes:
        if rest.pop(push, None) is None:
            raise _misstep(state, action, f"{push} is {'not pending' if pushes.count(push) == 1 else 'in it twice'}")
    return rest


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _ALPHA * (value - average)


def _member(state: State, action: Action, worker: int) -> Member:
    if worker not in state.members:
        raise _misstep(state, action, "it is no member")
    return state.members[worker]


def _misstep(state: State, action: Action, why: str) -> InvalidDecision:
    told = "\n".join(f"  worker {w}: {m.phase}, {m}" for w, m in sorted(state.members.items()))
    return InvalidDecision(
        f"{action} is not possible: {why}. Version {state.version}; pending {state.pending}.\n{told}"
    )
