"""The decisions of a coordinator about one model in one incarnation of the server, held against what its policy
promises.

Three times, each of which would notice another mistake:

* the checker of `offbeat.audit.invariants` follows events and decisions alone: each contribution is applied or dropped
  at most once, and no worker is released that is further ahead than the bound of the policy that decided it;
* policies are pure, so that what was decided can be decided again: the policy is asked anew after every event;
* every decision must have been possible, as `offbeat.sync.state` sees it.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat.audit.invariants import InvariantChecker, InvariantViolation
from offbeat.coordinator.reference_limit import ReferenceLimit
from offbeat.errors import PlanError
from offbeat.history import (
    ContributionsWithdrawn,
    LifeBegan,
    PlanAdopted,
    PolicyStep,
    UpdateJudged,
    WorkerReturned,
    actions_of,
    event_of,
)
from offbeat.plan import Plan
from offbeat.robust import LossRule, ReferenceRule
from offbeat.server.judge import Judge
from offbeat.sync import (
    ASP,
    Adopted,
    Apply,
    Drop,
    Evict,
    Grant,
    Joined,
    Left,
    Pushed,
    Ready,
    Release,
    Remember,
    State,
    adoption,
)
from offbeat.sync.state import enact, observe
from offbeat.sync.transition import decide, with_past, with_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat.audit.findings import AuditResult
    from offbeat.robust import Rule
    from offbeat.sync import Action, Event, Policy, Push

_STORY = 12  # events
# What a damaged history can make of a rule that expects whole ones.
_NONSENSE = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError)


class _Ahead(InvariantViolation):
    """Law 3 is broken."""


@contextmanager
def _about_pace() -> Iterator[None]:
    """Report what is broken here as law 3."""
    try:
        yield
    except InvariantViolation as broken:
        raise _Ahead(str(broken), broken.rank) from broken


@dataclass(frozen=True)
class DecidedUpdate:
    """An update that was decided.

    Args:
        version: counting from 1.
    """

    version: int
    pushes: tuple[Push, ...]
    rate: float


class PolicyReplay:
    """The replay of the decisions about one model in one incarnation. `hear` each record of it in order.

    Attributes:
        updates: that were decided, by version.
        judged: what a robust rule decided about them, by version.
        judges: whether it decides about each of them.
        has_validator: whether it does so beside a validator, than which no contribution weighs more.
        validators: ranks of those, whose contributions are references and move nothing.
        weights: of contributions that were announced, in samples.
        beyond_limit: those that weigh nothing, since their worker has pushed more than one for each reference.
        unarrived: contributions whose workers were gone before they had arrived, or that the life ended without.
        arrived: those that are known to have.
        fates: what became of each: "pending", "applied", "dropped" or "lost".
        is_broken: what follows makes no sense any more, because of what was found.
    """

    def __init__(self, began: LifeBegan, result: AuditResult) -> None:
        self.began, self.model, self.life = began, began.model, began.life
        self.updates: dict[int, DecidedUpdate] = {}
        self.judged: dict[int, UpdateJudged] = {}
        self.judges = self.has_validator = False
        self.validators: set[int] = set()
        self._rule: Rule | None = None
        self.weights: dict[Push, float] = {}
        self.beyond_limit: set[Push] = set()
        self._limit = ReferenceLimit()
        self.unarrived: set[Push] = set()
        self.arrived: set[Push] = set()
        self.is_broken = False
        self._result = result
        self._checker = InvariantChecker()
        self._state = State(version=began.version, past=dict(began.past), hosts=began.hosts)
        self._version = began.version
        self._knows_policy = True
        self._policy = self._read(began.plan)
        self._next_policy: str | None = None
        self._replays = True
        self._base: dict[int, int] = {}  # worker: version of the parameters it computes on
        self._bases: dict[Push, int] = {}
        self._returning: WorkerReturned | None = None
        self._stories: dict[int, deque[str]] = {}
        self._story: deque[str] = deque(maxlen=_STORY)
        self._origin_s: float | None = None
        self._began = False  # the policy is asked

    @property
    def fates(self) -> dict[Push, str]:
        """The fate of each contribution, as it was decided."""
        return self._checker.fates

    @property
    def version(self) -> int:
        """The version after the last update."""
        return self._version

    @property
    def members(self) -> tuple[int, ...]:
        """Workers that took part when the recording ended."""
        return tuple(sorted(self._checker.accounts))

    def hear(self, record: WorkerReturned | PolicyStep | PlanAdopted | UpdateJudged | ContributionsWithdrawn) -> None:
        """The next record."""
        if self.is_broken:
            return
        if isinstance(record, WorkerReturned):
            self._returning = record
            if record.validates:
                self.validators.add(record.worker)
        elif isinstance(record, PlanAdopted):
            self._next_policy = record.plan
        elif isinstance(record, UpdateJudged):
            self._judge(record)
        elif isinstance(record, ContributionsWithdrawn):
            self._withdraw(record)
        else:
            self._take(event_of(record), actions_of(record), record)

    def _withdraw(self, record: ContributionsWithdrawn) -> None:
        """Note what is in no block although it was applied; its worker pushes it again."""
        pushes = set(record.pushes)
        if strange := sorted(push for push in pushes if self._checker.fates.get(push) != "applied"):
            self._result.violated(2, f"Contribution {strange[0]} is withdrawn, but was never applied.", self.story())
        self.unarrived |= pushes
        self.arrived -= pushes

    def _judge(self, record: UpdateJudged) -> None:
        """Note what a rule decided about an update, once."""
        update, pushes = self.updates.get(record.version), {(worker, clock) for worker, clock, _ in record.scales}
        if update is None or not pushes <= set(update.pushes):
            of = "was never decided" if update is None else "is not of these contributions"
            self._result.violated(2, f"Update {record.version} is judged, but {of}.", self.story())
        elif record.version in self.judged:
            self._result.violated(2, f"Update {record.version} is judged a second time.", self.story())
        elif isinstance(self._rule, LossRule) and (wrong := _what_is_wrong_with_losses(self._rule, record)):
            self._result.violated(2, f"Update {record.version} {wrong}.", self.story())
        self.judged.setdefault(record.version, record)

    # -- one event and what was decided --------------------------------------------------------------------------

    def _take(self, event: Event, actions: tuple[Action, ...], record: PolicyStep) -> None:
        result, before = self._result, self._state
        result.events += 1
        self._tell(event, actions)
        if event.at_s < before.now_s:
            self._fail(3, f"at {event.at_s:.3f} s an event is recorded behind one of {before.now_s:.3f} s", event)
            return
        try:
            old = self._policy
            self._adopt(event)
            before = self._know(event)
            state = observe(before, event)
            after = self._ask_again(old, before, event, record) if record.asked else state
            self._note(event, state)
            self._began |= record.asked
            for place, action in enumerate(actions):
                self._enter(action, ASP() if place < record.apart else self._policy)
                self._checker.make_updates()
            self._state = self._follow(state, actions) if after is None else after
            self._forget(event)
        except _Ahead as broken:
            self._fail(3, str(broken), event, broken.rank)
        except InvariantViolation as broken:
            self._fail(2, str(broken), event, broken.rank)
        except _NONSENSE as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._fail(2, f"what is recorded cannot have been ({what})", event)

    def _adopt(self, event: Event) -> None:
        if self._next_policy is None or not isinstance(event, Adopted):
            return
        old, self._policy, self._next_policy = self._policy, self._read(self._next_policy), None
        if self._began:
            self._result.swaps += 1
            if self._knows_policy and adoption(old, self._policy, event.at_s) != event:
                raise InvariantViolation(
                    f"{self._policy!r} takes over from {old!r} by {event}, which is not how it does"
                )

    def _know(self, event: Event) -> State:
        """The state before an event, with what was known of a worker that comes back."""
        state, back = self._state, self._returning
        if back is None or not isinstance(event, Joined) or back.worker != event.worker:
            return state
        return with_past(state, back.worker, back.least)

    def _forget(self, event: Event) -> None:
        back = self._returning
        if not isinstance(event, Joined) or back is None or back.worker != event.worker:
            return
        self._returning = None
        if back.weight is not None:
            self._state = with_weight(self._state, back.worker, back.weight)

    def _note(self, event: Event, state: State) -> None:
        """Enter the event in the accounts."""
        checker, rank = self._checker, _rank_of(event)
        if isinstance(event, Joined | Left):
            self._leave(event.worker)
        if isinstance(event, Joined) or rank is None or rank in checker.accounts:
            if isinstance(event, Ready) and (event.worker, event.clock) in checker.fates:
                what = f"contribution {(event.worker, event.clock)} is announced a second time"
                raise InvariantViolation(what, event.worker)
            checker.hear(event, state)
            match event:
                case Joined(worker=worker):
                    self._base[worker] = state.version
                case Ready(worker=worker, clock=clock, weight=weight):
                    self.weights[(worker, clock)] = weight
                    self._bases[(worker, clock)] = self._base[worker]
                case Pushed(worker=worker, clock=clock):
                    self.arrived.add((worker, clock))
        checker.make_updates()

    def _leave(self, rank: int) -> None:
        account = self._checker.accounts.get(rank)
        if account is not None:
            self.unarrived |= account.unarrived
            self._checker.left(rank)

    def _enter(self, action: Action, policy: Policy) -> None:
        """Enter the decision in the accounts."""
        result = self._result
        for push in action.pushes if isinstance(action, Apply | Drop) else ():
            self._known(push, "applied" if isinstance(action, Apply) else "dropped")
        if isinstance(action, Grant | Release | Evict) and action.worker not in self._checker.accounts:
            raise InvariantViolation(
                f"{action} is decided, but worker {action.worker} does not take part", action.worker
            )
        if isinstance(action, Evict):
            self.unarrived |= self._checker.accounts[action.worker].unarrived
        with _about_pace() if isinstance(action, Release | Evict) else nullcontext():
            lead = self._checker.enter(action, policy)
        if isinstance(action, Apply):
            self._apply(action)
        elif isinstance(action, Release):
            result.releases += 1
            self._base[action.worker] = self._version
            if policy.bound is not None:
                result.lead = max(result.lead, lead)
                result.bound = max(result.bound or 0, policy.bound)

    def _apply(self, action: Apply) -> None:
        """Count an update, and how stale its contributions are."""
        for push in action.pushes:
            stale = max(0, self._version - self._bases.pop(push, self._version))
            if push[0] in self.validators:
                continue
            self._result.staleness += stale
            self._result.stalest = max(self._result.stalest, stale)
        self._version += 1
        self.updates[self._version] = DecidedUpdate(self._version, action.pushes, action.rate)
        if isinstance(self._rule, ReferenceRule):
            weights = {push: self.weights.get(push, 0.0) for push in action.pushes}
            self.beyond_limit |= self._limit.beyond(weights, self.validators)

    def _known(self, push: Push, fate: str) -> None:
        if push not in self._checker.fates:
            raise InvariantViolation(f"contribution {push} is {fate}, but was never announced", push[0])
        if self._checker.fates[push] == "applied" and fate == "applied":
            self._result.twice += 1

    # -- the policy, asked again ---------------------------------------------------------------------------------

    def _ask_again(self, old: Policy, before: State, event: Event, record: PolicyStep) -> State | None:
        """The state after what the policy decides; None if that is not what is recorded, or it cannot be asked."""
        if not (self._replays and self._knows_policy):
            return None
        former = old if self._began else None
        after, stages = decide(self._policy, before, event, former=former, change=record.change, ends=record.ends)
        decided = tuple(a for stage in stages for a in stage.actions if not isinstance(a, Remember))
        actions = actions_of(record)
        if decided == actions:
            self._result.replayed += 1
            return after
        self._replays = False  # from here on it would decide from something else that it remembers
        ours = ", ".join(map(str, decided)) or "nothing"
        theirs = ", ".join(map(str, actions)) or "nothing"
        what = f"after {event} {self._policy!r} decides {ours}, but what is recorded is {theirs}"
        self._report(_law_of(decided, actions), what, _rank_of(event))
        return None

    def _follow(self, state: State, actions: tuple[Action, ...]) -> State:
        """The state after what is recorded."""
        for action in actions:
            state = enact(state, action)
        return state

    def _read(self, plan: str) -> Policy:
        try:
            read = Plan.from_toml(plan)
            self.judges = read.judging_rule is not None and read.judging_rule.judges_model
            self.has_validator, self._rule = read.validator is not None, read.judging_rule
            return read.sync
        except PlanError as error:
            self._knows_policy = False
            self._result.notes.append(f"What was decided is not decided again, and no bound is checked: {error}")
            return ASP()

    # -- the story -----------------------------------------------------------------------------------------------

    def _tell(self, event: Event, actions: tuple[Action, ...]) -> None:
        if self._origin_s is None:
            self._origin_s = event.at_s
        at_s, what = event.at_s - self._origin_s, str(event)
        line = f"{at_s:10.3f} s  {what}: {', '.join(map(str, actions)) or 'nothing'}"
        ranks: set[int] = {thing.worker for thing in (event, *actions) if hasattr(thing, "worker")}
        ranks |= {push[0] for action in actions if isinstance(action, Apply | Drop) for push in action.pushes}
        for rank in ranks:
            self._stories.setdefault(rank, deque(maxlen=_STORY)).append(line)
        self._story.append(line)

    def story(self, rank: int | None = None) -> tuple[str, ...]:
        """The last events about a worker; of all, if it is None."""
        return tuple(self._story if rank is None else self._stories.get(rank, self._story))

    def _fail(self, law: int, what: str, event: Event, rank: int | None = None) -> None:
        self.is_broken = True
        self._report(law, f"{what} (at {event})", _rank_of(event) if rank is None else rank)

    def _report(self, law: int, what: str, rank: int | None) -> None:
        self._result.violated(law, f"{what[0].upper()}{what[1:]}.", self.story(rank))


def _rank_of(event: Event) -> int | None:
    return getattr(event, "worker", None)


def _law_of(decided: tuple[Action, ...], recorded: tuple[Action, ...]) -> int:
    """The law that a deviating decision concerns: on what is used, or else on who may go on."""
    used = [[action for action in actions if isinstance(action, Apply | Drop)] for actions in (decided, recorded)]
    return 2 if used[0] != used[1] else 3


def _what_is_wrong_with_losses(rule: LossRule, record: UpdateJudged) -> str:
    """Hold the scales of an update against the losses and norms that they were decided by."""
    squares, scales = torch.tensor(record.squares, dtype=torch.float64), [scale for *_, scale in record.scales]
    if not record.losses:
        return "is made of contributions, but no loss was found out" if any(scales) else ""
    if len(squares) != len(scales) or len(record.losses) != 1 + int(squares.isfinite().sum()):
        return f"has {len(scales)} contributions, but {len(squares)} norms and {len(record.losses)} losses"
    workers, weights = [worker for worker, *_ in record.scales], [1.0] * len(scales)
    ours = Judge(rule, lambda text: None).scales(torch.diag(squares), workers, weights, record.losses).tolist()
    return "" if ours == scales else f"is judged {scales}, but {rule!r} makes {ours} of its losses"
