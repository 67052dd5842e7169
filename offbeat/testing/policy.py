"""What every synchronization policy promises.

`check_policy` plays a server and its workers in virtual time, thousands of times, each time with other luck: unequal
and equal times, workers that come, go, crash and hang in every phase, another policy in between, memory that is lost.
It keeps books of its own, from the events and actions alone, and compares.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from offbeat.sync import (
    ASP,
    BSP,
    SSP,
    Action,
    Adopted,
    Apply,
    Deadline,
    Drop,
    Ending,
    Evict,
    Grant,
    Joined,
    KSync,
    Left,
    Paced,
    PolicyMisstep,
    Pulled,
    Pushed,
    Ready,
    Release,
    Remember,
    State,
    Wake,
    adoption,
)
from offbeat.sync.policy import settle
from offbeat.sync.state import changed, observe
from offbeat.testing.purity import impurity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.sync import Event, Policy, Push

_OTHERS: tuple[Policy, ...] = (BSP(), ASP(), SSP(bound=1), KSync(k=2))
_PHASES = ("computing", "held", "pushing", "pushed", "pulling")
_MOST_EVENTS = 20_000
_MOST_WAKES = 100  # in a row, without anything decided
_LAST, _LAST_STEPS = 1000, 3  # the last worker of all, and its steps
_STEPS = range(1000)  # of which a policy is asked what they contribute
_CONTRIBUTES = ("gradient", "change", None)
_A_LITTLE_MORE = 1 + 1e-9  # than what is allowed, for rates are rounded


def check_policy(
    policy: Policy,
    *,
    world: int = 4,
    interleavings: int = 1000,
    seed: int = 0,
    evicts: bool = False,
    others: Sequence[Policy] = _OTHERS,
) -> Mapping[str, int]:
    """Check that `policy` keeps the rules of its room.

    1. It decides from the state alone: the same state, the same answer, whatever the order of what it maps, and the
       state is left as it is. It reads no clock and keeps nothing to itself. Its memory may be lost at any moment.
    2. What it decides is possible, and comes to an end. No rate is below 0 or above one for each contribution.
    3. Each contribution is applied at most once, and in the end exactly one of applied, dropped, or lost with its
       worker; dropped only if the policy says that it `drops`. What is pending of workers that are gone goes into an
       update of those that come after them. Where the policy is `replicated`, an update holds all of a round.
    4. Its `bound` holds at every release, where a worker that takes part in every m-th round only counts as one that
       takes part in those between. It lets everyone push at once, unless it is `gated`.
    5. Nobody waits for ever while nothing is under way. A worker that hangs may make others wait until somebody notices
       and it is gone; a policy that `evicts` notices by itself. Whoever is evicted keeps others waiting: it computes,
       pushes or pulls, and does not only wait itself.
    6. What it says about itself is of the right kind; its workers contribute something.

    Args:
        policy: any; in some of the interleavings others take over from it and give back.
        world: workers at the beginning.
        interleavings: how many to play.
        seed: of the first; the others count on from it, so that a failure can be played alone.
        evicts: whether it must evict a worker that others wait for in vain.
        others: that take over from it and give back.

    Returns:
        What was played: how often workers crashed or hung ("crash while pushing"), joined, and so on, so that a test
        can assert that its faults fired.

    Raises:
        AssertionError: with the rule that is broken, and the story of the worker it was broken for.

    >>> from offbeat.sync import SSP
    >>> played = check_policy(SSP(bound=2), interleavings=20)
    >>> played["interleavings"]
    20
    """
    if wrong := _what_it_says_wrong(policy):
        raise AssertionError(f"{policy!r}: {wrong}.")
    fresh = deepcopy(policy)
    played: Counter[str] = Counter()
    for number in range(seed, seed + interleavings):
        play = _Play(policy, fresh, world, number, evicts, others)
        play.run()
        if number % 64 == 0:
            again = _Play(policy, fresh, world, number, evicts, others)
            again.run()
            if play.log != again.log:
                again.fail("it decided otherwise when the same was played again: it knows more than the state")
        played.update(play.played)
        played["interleavings"] += 1
    return played


def _what_it_says_wrong(policy: Policy) -> str:
    """What is wrong with what the policy says about itself; "" if nothing is."""
    for name in ("replicated", "drops", "gated"):
        if not isinstance(value := getattr(policy, name), bool):
            return f"`{name}` is {value!r}, and has to be True or False"
    bound = policy.bound
    if bound is not None and (type(bound) is not int or bound < 0):
        return f"`bound` is {bound!r}, and has to be a whole number from 0, or None if nothing is promised"
    if policy.replicated and (bound != 0 or policy.drops):
        return (
            f"it is `replicated`, where every update holds one contribution of every worker, but its bound is {bound} "
            f"and `drops` is {policy.drops}: that has to be 0 and False"
        )
    said = [policy.contributes(step) for step in _STEPS]
    if strange := [(step, what) for step, what in zip(_STEPS, said, strict=True) if what not in _CONTRIBUTES]:
        step, what = strange[0]
        return f"after step {step} it has a worker contribute {what!r}, which is none of {_CONTRIBUTES}"
    if not any(said):
        return f"it never has a worker contribute anything in its first {len(_STEPS)} steps"
    if said != [policy.contributes(step) for step in _STEPS]:
        return "asked twice what a worker contributes after a step, it says something else"
    return ""


@dataclass(eq=False)
class _Update:
    """An `Apply` on its way.

    Args:
        waits: contributions in it that have not arrived.
    """

    index: int
    in_order: bool
    waits: set[Push]


@dataclass(eq=False)
class _Worker:
    """One life of a worker, as the books have it.

    Args:
        number: of the contribution it computes or brings.
        pace, brought: steps begun and contributions arrived, counted here; what it leaves out counts as well.
        every: it takes part in every such round.
        steps: how many it takes before it leaves.
        fault: "crash" or "hang", the phase and the step in which that happens to it.
        push: its last contribution that was announced.
        held: whether it has a contribution and is not released.
        granted: whether it may push that.
        arrived: whether that is there, or was dropped.
        update: that it is in.
        needs: updates it waits for while it pulls.
        pull_s: how long it pulls, from then on; None if it does not.
    """

    rank: int
    number: int
    pace: int
    brought: int
    steps: int
    speed: float
    every: int = 1
    fault: tuple[str, str, int] | None = None
    hung: bool = False
    push: Push = (-1, -1)
    held: bool = False
    granted: bool = False
    arrived: bool = True
    unwanted: bool = False
    update: _Update | None = None
    needs: set[_Update] = field(default_factory=set)
    pull_s: float | None = None


class _Play:
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
        self._workers: dict[int, _Worker] = {}
        self._fates: dict[Push, str] = {}
        self._open: list[_Update] = []
        self._updates = 0
        self._idle = 0
        self._over = False  # all but the last worker have come and gone
        self.log: list[tuple[Event, tuple[Action, ...]]] = []
        self.played: Counter[str] = Counter()

    def run(self) -> None:
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
        self.fail(f"no end after {_MOST_EVENTS} events")

    # -- what happens --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        rng = self._rng
        if rng.random() < 0.8:  # as a server does: it begins when all are there
            for rank in rng.sample(range(self._world), self._world):
                self._state = observe(self._state, Joined(rank, 0.0))
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
            if about not in self._workers:
                self._tell(Joined(about, self._now_s))
        elif what == "blackout":
            self.played["blackouts"] += 1
            for rank in self._rng.sample(sorted(self._workers), len(self._workers)):
                if rank in self._workers:  # it may have been evicted since
                    self._happens_to(self._workers[rank], "crash", None)
        elif what == "swap":
            policy, level = about
            event = adoption(self._policy, policy, self._now_s)
            self._policy = policy
            self.played["swaps"] += 1
            self._tell(Adopted(self._now_s, level or event.level))
        elif what == "paced":
            if about[0] in self._workers:
                self.played["paced"] += 1
                self._tell(Paced(about[0], about[1], self._now_s))
        else:
            one: _Worker
            one, push = about
            if self._workers.get(one.rank) is one and not (one.unwanted and what == "pushed"):
                self._happens_to(one, what, push)

    def _happens_to(self, worker: _Worker, what: str, push: Push | None) -> None:
        rank, now_s = worker.rank, self._now_s
        if what == "ready":
            weight = 32.0 if self._rng.random() < 0.8 else float(self._rng.randrange(3) * 16)
            self._tell(Ready(rank, worker.number, now_s, weight))
        elif what == "pushed" and push is not None:
            if self._rng.random() < 0.5:
                self.played["ending"] += 1
                self._tell(Ending(rank, push[1], now_s))
            if self._workers.get(rank) is worker and not worker.unwanted:  # it may have been evicted
                self._tell(Pushed(rank, push[1], now_s))
        elif what == "pulled":
            self._tell(Pulled(rank, now_s))
        else:
            self.played[f"{what} while {self._state.members[rank].phase}"] += 1
            self._tell(Left(rank, now_s))
            self._may_return(rank)

    def _goes_on(self) -> bool:
        """At a standstill: whether somebody hangs, and is now noticed to."""
        waiting = [w.rank for w in self._workers.values() if not w.hung and self._state.members[w.rank].held]
        waiting += [w.rank for w in self._workers.values() if not w.hung and w.needs]
        hung = [worker for worker in self._workers.values() if worker.hung]
        if not waiting:
            return False
        if not hung:
            self.fail(f"worker {waiting[0]} waits for ever: nothing is under way, and nothing is decided", waiting[0])
        if self._policy is self._checked and self._evicts:
            names = ", ".join(str(worker.rank) for worker in hung)
            self.fail(f"worker {waiting[0]} waits for ever for {names}, which hangs and is not evicted", waiting[0])
        for worker in hung:
            self._soon("noticed", (worker, None), self._draw())
        return True

    def _last_joins(self) -> None:
        """One more worker, which finds what those have left behind that are gone."""
        self.played["pending"] += len(self._state.pending)
        self._over = True
        if self._policy is not self._checked:
            self._happens("swap", (self._checked, False))
        self._tell(Joined(_LAST, self._now_s))

    def _end(self) -> None:
        pending = {push for push, fate in self._fates.items() if fate == "pending"}
        if pending != set(self._state.pending):
            self.fail(f"conservation: {sorted(pending)} should be pending, the state has {self._state.pending}")
        if orphans := self._state.orphans:
            self.fail(
                f"contribution {orphans[0]} arrived whole before its worker left, but is still pending: no update in "
                f"the {_LAST_STEPS} steps of worker {_LAST}, which came after it, holds it",
                orphans[0][0],
            )
        for fate in self._fates.values():
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
            self.fail(f"it woke {_MOST_WAKES} times in a row and decided nothing")
        if isinstance(event, Ready) and not self._policy.gated and event.worker in self._workers:
            member = self._state.members[event.worker]
            if member.held and member.granted_s is None:
                self.fail(f"worker {event.worker} may not push at once, but the policy is not gated", event.worker)

    def _check_pure(self, state: State, event: Event) -> None:
        self.played["asked twice"] += 1
        try:
            wrong = impurity(self._checked, self._fresh, state)
        except Exception as error:
            self._fail_because(error, event)
        if wrong:
            self.log.append((event, ()))
            self.fail(wrong, getattr(event, "worker", None))

    def _fail_because(self, error: Exception, event: Event) -> NoReturn:
        """What the policy raised, or decided although it is not possible."""
        self.log.append((event, ()))
        what = f"it raised {error!r}"
        if isinstance(error, PolicyMisstep):
            what = str(error).partition("\n")[0].rstrip(".")
        raise AssertionError(self._story(what, getattr(event, "worker", None))) from error

    def _note(self, event: Event, state: State) -> None:
        """What the event means for the books."""
        match event:
            case Ready(worker=rank, clock=clock):
                worker, push = self._workers[rank], (rank, clock)
                assert push not in self._fates, f"{push} was announced before"
                worker.push, worker.held, worker.granted = push, True, False
                worker.arrived, worker.update, worker.unwanted = False, None, False
                self._fates[push] = "pending"
                self._phase(worker, "held", self._draw())
            case Pushed(worker=rank, clock=clock):
                worker = self._workers[rank]
                if not worker.arrived and worker.push == (rank, clock):
                    worker.arrived = True
                    worker.brought += 1
                self._phase(worker, "pushed", self._draw())
                self._arrived((rank, clock))
            case Pulled(worker=rank):
                self._compute(self._workers[rank])
            case Left(worker=rank):
                self._lose(rank)
            case Joined(worker=rank):
                self._state = state
                self._enter(rank)
            case Paced(worker=rank, every=every):
                self._workers[rank].every = every
            case Adopted(level=True) if self._workers:
                low = min(worker.pace for worker in self._workers.values())
                for worker in self._workers.values():
                    worker.brought -= worker.pace - low
                    worker.pace = low

    def _carry_out(self, action: Action) -> None:
        match action:
            case Grant(worker=rank):
                worker, push_s = self._workers[rank], self._draw(worker=self._workers[rank]) / 3
                worker.granted = True
                if self._phase(worker, "pushing", push_s):
                    self._soon("pushed", (worker, worker.push), push_s)
            case Apply():
                self._apply(action)
            case Drop(pushes=pushes):
                for push in pushes:
                    self._drop(push)
            case Release(worker=rank):
                self._release(self._workers[rank])
            case Evict(worker=rank):
                self._evict(self._workers[rank])
                self.played["evictions"] += 1
                self._lose(rank)
                self._may_return(rank)
            case Wake(at_s=at_s):
                if not self._now_s < at_s < math.inf:
                    self.fail(f"at {self._now_s} it wants to be asked again at {at_s}")
            case Remember():
                pass

    def _apply(self, apply: Apply) -> None:
        if not 0 <= apply.rate <= len(apply.pushes) * _A_LITTLE_MORE:
            self.fail(f"{apply} has no sensible rate: each contribution is at most a whole round, which is 1")
        waits: set[Push] = set()
        self._updates += 1
        update = _Update(self._updates, apply.in_order, waits)
        if self._policy.replicated and (missing := self._missing(apply)) is not None:
            self.fail(f"it is `replicated`, but {apply} is made without worker {missing}, which is no further", missing)
        for push in apply.pushes:
            if self._fates[push] != "pending":
                self.fail(f"contribution {push} is applied, but it was {self._fates[push]}", push[0])
            self._fates[push] = "applied"
            worker = self._workers.get(push[0])
            if worker is not None and worker.push == push:
                worker.update = update
                if not worker.arrived:
                    waits.add(push)
        self._open.append(update)
        self._make_updates()

    def _missing(self, apply: Apply) -> int | None:
        """One of the slowest workers whose contribution is in neither this update nor an earlier one."""
        low = min((worker.pace for worker in self._workers.values()), default=0)
        for worker in self._workers.values():
            brings = not worker.held or self._fates[worker.push] == "pending"
            if worker.pace == low and brings and worker.push not in apply.pushes:
                return worker.rank
        return None

    def _drop(self, push: Push) -> None:
        if not self._policy.drops:
            self.fail(f"contribution {push} is dropped, but the policy does not say that it drops any", push[0])
        if self._fates[push] != "pending":
            self.fail(f"contribution {push} is dropped, but it was {self._fates[push]}", push[0])
        self._fates[push] = "dropped"
        worker = self._workers.get(push[0])
        if worker is not None and worker.push == push and not worker.arrived:
            worker.arrived = True
            worker.brought += 1
            # A worker may stop sending what is not used, or not.
            worker.unwanted = self._rng.random() < 0.5

    def _evict(self, worker: _Worker) -> None:
        if waits := self._why_it_waits(worker):
            self.fail(f"worker {worker.rank} is evicted, but has done all it was asked for: {waits}", worker.rank)
        if not any(other.held or other.pull_s is not None for other in self._workers.values() if other is not worker):
            self.fail(f"worker {worker.rank} is evicted, but nobody waits for it", worker.rank)

    def _why_it_waits(self, worker: _Worker) -> str:
        """What a worker that is not at work, and need not be, waits for; "" if something is expected from it."""
        if worker.held and worker.arrived:
            return f"contribution {worker.push} was {self._fates[worker.push]}, and it waits to be released"
        if worker.held and not worker.granted:
            return f"it waits until it may push contribution {worker.push}"
        missing = sorted(push for update in worker.needs for push in update.waits if push != worker.push)
        if worker.arrived and missing:
            return f"it pulls, and the update it waits for waits for contribution {missing[0]}"
        return ""

    def _release(self, worker: _Worker) -> None:
        bound = self._policy.bound
        if bound is not None:
            for other in self._workers.values():
                brought = other.brought + (other.update is not None and not other.arrived and _sees(worker, other))
                if other is not worker and brought < worker.pace + 1 - bound:
                    self.fail(
                        f"worker {worker.rank} is released for step {worker.pace + 1}, but worker {other.rank} has "
                        f"brought {brought}: that breaks the bound of {bound}",
                        worker.rank,
                    )
        worker.pace += worker.every
        worker.brought += worker.every - 1
        worker.number += 1
        worker.held = False
        worker.pull_s = self._draw(worker=worker) / 3
        if not self._phase(worker, "pulling", worker.pull_s):
            return
        worker.needs = {u for u in self._open if worker.update is None or u is worker.update}
        if not worker.needs:
            self._soon("pulled", (worker, None), worker.pull_s)

    # -- the books -----------------------------------------------------------------------------------------------

    def _enter(self, rank: int) -> None:
        member, rng = self._state.members[rank], self._rng
        paces = [worker.pace for worker in self._workers.values()]
        assert not paces or min(paces) <= member.pace <= max(paces), f"{rank} joins at {member.pace}, others: {paces}"
        steps = rng.randint(1, 4) if rng.random() < 0.85 else rng.randint(5, 20)
        worker = _Worker(rank, member.step, member.pace, member.pace, steps, rng.choice((0.5, 1.0, 1.0, 3.0)))
        if self._over:
            worker.steps = _LAST_STEPS
        elif self._hangs and rng.random() < 0.3:
            worker.fault = ("hang", rng.choice(("computing", "pushing", "pulling")), rng.randint(0, steps))
        elif self._churn and rng.random() < 0.4:
            worker.fault = ("crash", rng.choice(_PHASES), rng.randint(0, steps))
        self._workers[rank] = worker
        self.played["joins"] += 1
        self._compute(worker)

    def _compute(self, worker: _Worker) -> None:
        worker.steps -= 1
        worker.pull_s = None
        computing_s = self._draw(worker=worker)
        if worker.steps < 0:
            self._soon("leave", (worker, None), computing_s)
        elif self._phase(worker, "computing", computing_s):
            self._soon("ready", (worker, None), computing_s)

    def _phase(self, worker: _Worker, phase: str, lasts_s: float) -> bool:
        """Whether the worker gets through a phase that begins now, unless it crashes."""
        if worker.fault is None or worker.fault[1] != phase or worker.steps > worker.fault[2]:
            return True
        kind, worker.fault = worker.fault[0], None
        if kind == "crash":
            self._soon("crash", (worker, None), lasts_s * self._rng.random())
            return True
        worker.hung = True
        self.played[f"hang while {phase}"] += 1
        return False

    def _lose(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        if not worker.arrived:
            if self._fates[worker.push] == "pending":
                self._fates[worker.push] = "lost"
            self._arrived(worker.push)

    def _may_return(self, rank: int) -> None:
        if self._churn and self._rng.random() < 0.4:
            self._soon("join", rank, 2 * self._draw())

    def _arrived(self, push: Push) -> None:
        """The contribution is there, or never will be."""
        for update in self._open:
            update.waits.discard(push)
        self._make_updates()

    def _make_updates(self) -> None:
        left: list[_Update] = []
        made: set[_Update] = set()
        for update in self._open:
            if update.waits or (update.in_order and left):
                left.append(update)
            else:
                made.add(update)
        self._open = left
        for worker in self._workers.values():
            if worker.needs & made:
                worker.needs -= made
                if not worker.needs and worker.pull_s is not None:
                    self._soon("pulled", (worker, None), worker.pull_s * self._rng.random())

    def _soon(self, what: str, about: Any, in_s: float) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self._now_s + in_s, self._rng.random(), self._count, what, about))

    def _draw(self, worker: _Worker | None = None) -> float:
        speed = 1.0 if worker is None else worker.speed
        match self._mood:
            case "equal":
                return 1.0
            case "ties":
                return float(self._rng.randint(1, 3))
            case "uniform":
                return speed * (0.1 + 2 * self._rng.random())
            case _:
                return speed * min(50.0, 0.3 * self._rng.paretovariate(1.2))

    def fail(self, what: str, rank: int | None = None) -> NoReturn:
        raise AssertionError(self._story(what, rank))

    def _story(self, what: str, rank: int | None = None) -> str:
        """What went wrong, and the last events and actions about one worker."""
        told = [
            f"  {event}: {', '.join(map(_said, actions)) or 'nothing'}"
            for event, actions in self.log
            if rank is None or _names(event, rank) or any(_names(action, rank) for action in actions)
        ]
        play = f"check_policy({self._checked!r}, world={self._world}, interleavings=1, seed={self._seed})"
        by = "" if self._policy is self._checked else f" (while {self._policy!r} decides)"
        return "\n".join([f"{self._checked!r}{by}: {what}.", f"Played by {play}; the last events:", *told[-12:]])


def _sees(worker: _Worker, other: _Worker) -> bool:
    """Whether `worker` is given no block before the last contribution of `other` is in it."""
    mine, theirs = worker.update, other.update
    assert theirs is not None
    return mine is None or theirs is mine or (mine.in_order and theirs.index < mine.index)


def _said(action: Action) -> str:
    return "Remember(...)" if isinstance(action, Remember) else str(action)


def _names(thing: Any, rank: int) -> bool:
    pushes = getattr(thing, "pushes", ())
    return getattr(thing, "worker", None) == rank or any(push[0] == rank for push in pushes)
