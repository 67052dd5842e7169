"""One interleaving: a server and its workers in virtual time, with the luck that a seed gives."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from offbeat.audit.invariants import InvariantChecker, InvariantViolation
from offbeat.sync import (
    Action,
    Adopted,
    Deadline,
    Drop,
    Evict,
    Grant,
    InvalidDecision,
    Joined,
    Left,
    Pulled,
    Pushed,
    PushEnding,
    Ready,
    Release,
    Remember,
    State,
    TakesEveryNth,
    Wake,
    adoption,
)
from offbeat.sync.policy import settle
from offbeat.sync.state import changed, observe
from offbeat.testing.purity_check import impurity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.sync import Event, Policy, Push

_PHASES = ("computing", "held", "pushing", "pushed", "pulling")
_MOST_EVENTS = 20_000
_MOST_WAKES = 100  # in a row, without anything decided
_LAST, _LAST_STEPS = 1000, 3  # the last worker of all, and its steps


@dataclass(eq=False)
class Life:
    """The luck of one worker, from when it joins until it is gone.

    Args:
        steps: how many it takes before it leaves.
        fault: "crash" or "hang", the phase and the step in which that happens to it.
        hung: whether it does nothing any more.
        unwanted: whether it has stopped sending, since its contribution was dropped.
        pull_s: how long it pulls.
    """

    rank: int
    steps: int
    speed: float
    fault: tuple[str, str, int] | None = None
    hung: bool = False
    unwanted: bool = False
    pull_s: float = 0.0


class Interleaving:
    """One interleaving."""

    def __init__(
        self, policy: Policy, fresh: Policy, world: int, seed: int, evicts: bool, others: Sequence[Policy]
    ) -> None:
        self._checked, self._policy, self._fresh = policy, policy, fresh
        self._world, self._seed, self._evicts = world, seed, evicts
        self._others = others
        self._rng = rng = random.Random(seed)
        self._mood = rng.choice(("equal", "ties", "uniform", "heavy"))
        self._churn, self._hangs, self._forgets = rng.random() < 0.5, rng.random() < 0.2, rng.random() < 0.3
        self._state = State()
        self._now_s = 0.0
        self._queue: list[tuple[float, float, int, str, Any]] = []
        self._count = 0
        self._lives: dict[int, Life] = {}
        self._books = InvariantChecker()
        self._idle = 0
        self._over = False  # all but the last worker have come and gone
        self.log: list[tuple[Event, tuple[Action, ...]]] = []
        self.played: Counter[str] = Counter()

    def run(self) -> None:
        """Play it to its end.

        Raises:
            AssertionError: if a rule is broken, with the story.
        """
        try:
            self._play()
        except InvariantViolation as broken:
            raise AssertionError(self.story(str(broken), broken.rank)) from broken

    def _play(self) -> None:
        self._begin()
        for _ in range(_MOST_EVENTS):
            wake_s = self._state.wake_s
            if wake_s is not None and (not self._queue or wake_s <= self._queue[0][0]):
                self._now_s = max(self._now_s, wake_s)
                self._tell(Deadline(self._now_s))
            elif self._queue:
                self._now_s, _, _, what, about = heapq.heappop(self._queue)
                self._happens(what, about)
            elif self._goes_on():
                continue
            elif self._over:
                return self._end()
            else:
                self._last_joins()
        raise InvariantViolation(f"no end after {_MOST_EVENTS} events")

    # -- what happens --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        rng = self._rng
        if rng.random() < 0.8:  # as a server does: it begins when all are there
            for rank in rng.sample(range(self._world), self._world):
                joined = Joined(rank, 0.0)
                self._state = observe(self._state, joined)
                self._books.hear(joined, self._state)
                self._enter(rank)
            self._tell(Adopted(0.0))
        else:
            for rank in range(self._world):
                self._soon("join", rank, rng.choice((0.0, self._draw())))
        if self._churn and rng.random() < 0.5:
            self._soon("join", self._world + rng.randrange(3), 10 * rng.random())
        if self._churn and rng.random() < 0.2:
            self._soon("blackout", None, 6 * rng.random())
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 3)):
                other, begin_s = rng.choice(self._others), 12 * rng.random()
                self._soon("swap", (other, rng.random() < 0.3), begin_s)
                self._soon("swap", (self._checked, rng.random() < 0.3), begin_s + 4 * rng.random())
        if rng.random() < 0.2:
            for _ in range(rng.randint(1, 3)):
                self._soon("paced", (rng.randrange(self._world), rng.randint(1, 4)), 8 * rng.random())

    def _happens(self, what: str, about: Any) -> None:
        if what == "join":
            if about not in self._lives:
                self._tell(Joined(about, self._now_s))
        elif what == "blackout":
            self.played["blackouts"] += 1
            for rank in self._rng.sample(sorted(self._lives), len(self._lives)):
                if rank in self._lives:  # it may have been evicted since
                    self._happens_to(self._lives[rank], "crash", None)
        elif what == "swap":
            policy, level = about
            event = adoption(self._policy, policy, self._now_s)
            self._policy = policy
            self.played["swaps"] += 1
            self._tell(Adopted(self._now_s, level or event.level))
        elif what == "paced":
            if about[0] in self._lives:
                self.played["paced"] += 1
                self._tell(TakesEveryNth(about[0], about[1], self._now_s))
        else:
            life: Life
            life, push = about
            if self._lives.get(life.rank) is life and not (life.unwanted and what == "pushed"):
                self._happens_to(life, what, push)

    def _happens_to(self, life: Life, what: str, push: Push | None) -> None:
        rank, now_s = life.rank, self._now_s
        if what == "ready":
            weight = 32.0 if self._rng.random() < 0.8 else float(self._rng.randrange(3) * 16)
            self._tell(Ready(rank, self._books.accounts[rank].number, now_s, weight))
        elif what == "pushed" and push is not None:
            if self._rng.random() < 0.5:
                self.played["ending"] += 1
                self._tell(PushEnding(rank, push[1], now_s))
            if self._lives.get(rank) is life and not life.unwanted:  # it may have been evicted
                self._tell(Pushed(rank, push[1], now_s))
        elif what == "pulled":
            self._tell(Pulled(rank, now_s, pushes_early=rank % 2 == 1))
        else:
            self.played[f"{what} while {self._state.members[rank].phase}"] += 1
            self._tell(Left(rank, now_s))
            self._may_return(rank)

    def _goes_on(self) -> bool:
        """Whether, at a standstill, a worker hangs and is now noticed to."""
        well = [self._books.accounts[rank] for rank, life in self._lives.items() if not life.hung]
        waiting = [one.rank for one in well if one.held] + [one.rank for one in well if one.needs]
        hung = [life for life in self._lives.values() if life.hung]
        if not waiting:
            return False
        first = waiting[0]
        if not hung:
            raise InvariantViolation(
                f"worker {first} waits for ever: nothing is under way, and nothing is decided", first
            )
        if self._policy is self._checked and self._evicts:
            names = ", ".join(str(life.rank) for life in hung)
            raise InvariantViolation(
                f"worker {first} waits for ever for {names}, which hangs and is not evicted", first
            )
        for life in hung:
            self._soon("noticed", (life, None), self._draw())
        return True

    def _last_joins(self) -> None:
        """One more worker, which finds what those have left behind that are gone."""
        self.played["pending"] += len(self._state.pending)
        self._over = True
        if self._policy is not self._checked:
            self._happens("swap", (self._checked, False))
        self._tell(Joined(_LAST, self._now_s))

    def _end(self) -> None:
        pending = {push for push, fate in self._books.fates.items() if fate == "pending"}
        if pending != set(self._state.pending):
            raise InvariantViolation(
                f"conservation: {sorted(pending)} should be pending, the state has {self._state.pending}"
            )
        if orphans := self._state.orphans:
            raise InvariantViolation(
                f"contribution {orphans[0]} arrived whole before its worker left, but is still pending: no update in "
                f"the {_LAST_STEPS} steps of worker {_LAST}, which came after it, holds it",
                orphans[0][0],
            )
        for fate in self._books.fates.values():
            self.played[fate] += 1

    # -- one event and what is decided ---------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if self._forgets and self._rng.random() < 0.1:
            self._state = changed(self._state, memory=None)
            self.played["memory lost"] += 1
        state = observe(self._state, event)
        self._note(event, state)
        if self._rng.random() < 0.04 and self._policy is self._checked:
            self._check_pure(state, event)
        try:
            self._state, actions = settle(self._policy, state)
        except Exception as error:
            self._fail_because(error, event)
        self.log.append((event, actions))
        for action in actions:
            self._carry_out(action)
        decided = any(not isinstance(action, Wake | Remember) for action in actions)
        self._idle = self._idle + 1 if isinstance(event, Deadline) and not decided else 0
        if self._idle > _MOST_WAKES:
            raise InvariantViolation(f"it woke {_MOST_WAKES} times in a row and decided nothing")
        if isinstance(event, Ready) and not self._policy.gated and event.worker in self._lives:
            member = self._state.members[event.worker]
            if member.held and member.granted_s is None:
                raise InvariantViolation(
                    f"worker {event.worker} may not push at once, but the policy is not gated", event.worker
                )

    def _check_pure(self, state: State, event: Event) -> None:
        self.played["asked twice"] += 1
        try:
            wrong = impurity(self._checked, self._fresh, state)
        except Exception as error:
            self._fail_because(error, event)
        if wrong:
            self.log.append((event, ()))
            raise InvariantViolation(wrong, getattr(event, "worker", None))

    def _fail_because(self, error: Exception, event: Event) -> NoReturn:
        """Fail with what the policy raised, or decided although it is not possible."""
        self.log.append((event, ()))
        what = f"it raised {error!r}"
        if isinstance(error, InvalidDecision):
            what = str(error).partition("\n")[0].rstrip(".")
        raise InvariantViolation(what, getattr(event, "worker", None)) from error

    def _note(self, event: Event, state: State) -> None:
        """Enter the event in the accounts, and follow it up."""
        self._books.hear(event, state)
        match event:
            case Ready(worker=rank):
                self._lives[rank].unwanted = False
                self._goes_through("held", self._lives[rank], self._draw())
                if self._books.accounts[rank].may_push:  # since it was being computed
                    self._pushes(self._lives[rank])
            case Pushed(worker=rank):
                self._goes_through("pushed", self._lives[rank], self._draw())
            case Pulled(worker=rank):
                self._computes(self._lives[rank])
            case Left(worker=rank):
                del self._lives[rank]
            case Joined(worker=rank):
                self._enter(rank)
        self._make_updates()

    def _carry_out(self, action: Action) -> None:
        """Enter the action in the accounts, and follow it up."""
        books = self._books
        books.enter(action, self._policy)
        match action:
            case Grant(worker=rank) if books.accounts[rank].held:
                self._pushes(self._lives[rank])
            case Grant():
                self.played["granted early"] += 1
            case Drop(pushes=pushes):
                for push in pushes:
                    if push[0] in self._lives and books.accounts[push[0]].push == push:
                        # A worker may stop sending what is not used, or not.
                        self._lives[push[0]].unwanted = self._rng.random() < 0.5
            case Release(worker=rank):
                life = self._lives[rank]
                life.pull_s = self._draw(life) / 3
                if self._goes_through("pulling", life, life.pull_s) and not books.accounts[rank].needs:
                    self._soon("pulled", (life, None), life.pull_s)
            case Evict(worker=rank):
                del self._lives[rank]
                self.played["evictions"] += 1
                self._may_return(rank)
            case Wake(at_s=at_s):
                if not self._now_s < at_s < math.inf:
                    raise InvariantViolation(f"at {self._now_s} it wants to be asked again at {at_s}")
        self._make_updates()

    def _make_updates(self) -> None:
        for rank in self._books.make_updates():
            life = self._lives[rank]
            if not life.hung:
                self._soon("pulled", (life, None), life.pull_s * self._rng.random())

    # -- the lives of workers ------------------------------------------------------------------------------------

    def _enter(self, rank: int) -> None:
        rng = self._rng
        steps = rng.randint(1, 4) if rng.random() < 0.85 else rng.randint(5, 20)
        life = Life(rank, steps, rng.choice((0.5, 1.0, 1.0, 3.0)))
        if self._over:
            life.steps = _LAST_STEPS
        elif self._hangs and rng.random() < 0.3:
            life.fault = ("hang", rng.choice(("computing", "pushing", "pulling")), rng.randint(0, steps))
        elif self._churn and rng.random() < 0.4:
            life.fault = ("crash", rng.choice(_PHASES), rng.randint(0, steps))
        self._lives[rank] = life
        self.played["joins"] += 1
        self._computes(life)

    def _computes(self, life: Life) -> None:
        life.steps -= 1
        computing_s = self._draw(life)
        if life.steps < 0:
            self._soon("leave", (life, None), computing_s)
        elif self._goes_through("computing", life, computing_s):
            self._soon("ready", (life, None), computing_s)

    def _pushes(self, life: Life) -> None:
        push_s = self._draw(life) / 3
        if self._goes_through("pushing", life, push_s):
            self._soon("pushed", (life, self._books.accounts[life.rank].push), push_s)

    def _goes_through(self, phase: str, life: Life, lasts_s: float) -> bool:
        """Whether a worker gets through a phase that begins now, unless it crashes."""
        if life.fault is None or life.fault[1] != phase or life.steps > life.fault[2]:
            return True
        kind, life.fault = life.fault[0], None
        if kind == "crash":
            self._soon("crash", (life, None), lasts_s * self._rng.random())
            return True
        life.hung = True
        self.played[f"hang while {phase}"] += 1
        return False

    def _may_return(self, rank: int) -> None:
        if self._churn and self._rng.random() < 0.4:
            self._soon("join", rank, 2 * self._draw())

    def _soon(self, what: str, about: Any, in_s: float) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self._now_s + in_s, self._rng.random(), self._count, what, about))

    def _draw(self, life: Life | None = None) -> float:
        speed = 1.0 if life is None else life.speed
        match self._mood:
            case "equal":
                return 1.0
            case "ties":
                return float(self._rng.randint(1, 3))
            case "uniform":
                return speed * (0.1 + 2 * self._rng.random())
            case _:
                return speed * min(50.0, 0.3 * self._rng.paretovariate(1.2))

    def story(self, what: str, rank: int | None = None) -> str:
        """Say what went wrong, with the last events and actions about one worker."""
        told = [
            f"  {event}: {', '.join(map(_said, actions)) or 'nothing'}"
            for event, actions in self.log
            if rank is None or _names(event, rank) or any(_names(action, rank) for action in actions)
        ]
        play = f"check_policy({self._checked!r}, world={self._world}, interleavings=1, seed={self._seed})"
        by = "" if self._policy is self._checked else f" (while {self._policy!r} decides)"
        return "\n".join([f"{self._checked!r}{by}: {what}.", f"Played by {play}; the last events:", *told[-12:]])


def _said(action: Action) -> str:
    return "Remember(...)" if isinstance(action, Remember) else str(action)


def _names(thing: Any, rank: int) -> bool:
    pushes = getattr(thing, "pushes", ())
    return getattr(thing, "worker", None) == rank or any(push[0] == rank for push in pushes)
