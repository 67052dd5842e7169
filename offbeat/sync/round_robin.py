"""Round-robin synchronous parallel, R2SP (Chen, Wang, Li, "Round-robin synchronization: mitigating communication
bottlenecks in parameter servers", INFOCOM 2019).

The workers take turns, spaced evenly in time. In its turn a worker pushes, its contribution is applied by itself, and
it pulls; all of that block by block, so that a turn takes hardly longer than one copy of the model on the link. While
one worker has the link the others compute. The next turn may begin when the push is nearly through: it takes a moment
until the next one's first bytes are here, and links carry both directions at once. In strict order it begins when the
pull is through, so that nobody pulls parts of the next update:

    worker 0   turn |  compute ............ | turn | compute
    worker 1        | turn |  compute ............ | turn |
    worker 2  ....  |      | turn |  compute ............ | turn

With C the time to compute, d that of a turn and N workers, a round takes max(C + d, N d), where BSP takes C + N d.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.float_sum import add_up
from offbeat.number_range import RealNumbers, WholeNumbers
from offbeat.sync.actions import Apply, Evict, Grant, Release, Remember, Wake
from offbeat.sync.state import changed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.sync.actions import Action
    from offbeat.sync.policy import Contributes
    from offbeat.sync.state import Member, State

_LEASE = 4.0  # averages that a worker may take
_FIRST_LEASE_S = 60.0  # while it has no average: its first steps compile, connect and fill caches
_MOST_CHANGE = 0.1  # of the gap, from one round to the next


@dataclass(frozen=True)
class Rotation:
    """The order of turns, and who has been passed over.

    Args:
        order: the workers; the first is next. Who had a turn goes to the end.
        owed: who was passed over, and is served first once it is ready.
        gap_s: between the beginnings of two turns; None while warming up.
        next_open_s: when the next turn may begin.
        free_since_s: since when a slot has been free; None while there is none.
        turns: so far.
        evicted_s: when a worker was evicted last; others may have waited for it.
        weights: of what each worker in the order brought in its last turn, in samples; kept in strict order only.
    """

    order: tuple[int, ...] = ()
    owed: frozenset[int] = frozenset()
    gap_s: float | None = None
    next_open_s: float = 0.0
    free_since_s: float | None = None
    turns: int = 0
    evicted_s: float = 0.0
    weights: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRobin:
    """Turns on the server's link: workers push one after the other, evenly spaced, and nobody waits for all.

    Each gradient is N-1 updates old, hardly more or less.


    The right choice where the server's link is the bottleneck and the workers are about equally fast: up to twice the
    throughput of BSP and a flat load. It is at most a tenth faster than `ASP`; what it has over that is the constant
    age of gradients, and the order. It is of no use where the parameters are sharded over the workers' own links. For
    more than 16 workers use groups: `Hybrid(BSP(), RoundRobin(), groups=...)`.

    The gap between turns follows the measured times of all workers: a round is to take `gap_factor` of the median
    cycle (not counting time spent waiting), but never less than the transfers it is made of. It changes by at most 10 %
    from one round to the next, unless workers join or leave. Until every worker has taken `warmup` steps, turns follow
    each other in order without a gap. Who is late by less than a gap does not shift the timetable.

    If the next worker is not ready, the first one behind it that is may go ahead, and the one passed over is served as
    soon as it is ready; so one straggler does not hold up all. No gradient gets older than N - 1 + `lead` updates by
    that.
    `strict` never lets anybody pass: the order of turns is then a fixed permutation (by rank, whatever the timing), and
    with one slot (the default there) the job is deterministic to the bit. One slow worker then holds up all. So that
    nothing depends on when something happens between two turns, a worker that leaves counts until its turn has come,
    and contributions are weighed against what the others brought in their last turns, not against what they have
    meanwhile.

    Who takes far longer than usual while others wait for it is evicted, also in strict order, so that a worker that
    hangs never hangs the job. It may join again, at the end of the rotation or as far from other newcomers as can be.
    One that has not been measured yet is given a minute. What a worker does between two steps, such as an evaluation,
    counts as computing: allow for it in `compute_lease_s`.

    A worker that pushes early (`Plan(scheduling=...)`) may begin when its turn has come although it still computes: its
    blocks travel as they are complete, and the turn itself is over the sooner. The order of updates is the same.

    What takes part in every m-th round only (`TakesEveryNth`) is not waited for in the rounds between; its gradient is
    m times as old. Who joins pulls at once, not in its first turn: at worst a turn of the others takes twice as long
    then.

    Learning rate and momentum: as for `ASP`. A gradient's age of N-1 acts like momentum of about 1 - 1/N.

    Args:
        strict: never let a worker pass another.
        slots: pushes at the same time (in strict order, turns); best the sum of the servers' link rates over that of
            one worker. None for as many as there are hosts with shards, and for 1 in strict order.
        half_duplex: the server's link carries one direction at a time, as Wi-Fi does, so that a turn lasts until its
            pull is through.
        gap_factor: part of the median cycle that a round is to take; a little less than 1, so that a worker becomes
            ready just after its turn has come.
        grace: how long to wait for the next worker before another may go ahead, in gaps.
        lead: how many updates older than N-1 a gradient may get while its worker is passed over.
        warmup: steps of each worker before turns are spaced.
        turn_lease_s: a turn may take this long at least, or 4 of the worker's average turns if that is more.
        compute_lease_s: the same for computing, in average cycles.

    Raises:
        PlanError: if a value cannot be.

    >>> RoundRobin(strict=True).bound
    1
    """

    strict: bool = False
    slots: int | None = None
    half_duplex: bool = False
    gap_factor: float = 1 / 1.2
    grace: float = 0.5
    lead: int = 3
    warmup: int = 10
    turn_lease_s: float = 1.0
    compute_lease_s: float = 5.0

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("lead", 0), ("warmup", 0)):
            value = getattr(self, name)
            if name == "slots" and value is None:
                continue
            if value not in WholeNumbers(least):
                raise PlanError(
                    f"Cannot rotate with {name}={value!r}: choose a whole number from {least} - at `plan.sync.{name}`."
                )
        for name in ("strict", "half_duplex"):
            if type(value := getattr(self, name)) is not bool:
                raise PlanError(f"Cannot rotate with {name}={value!r}: choose True or False - at `plan.sync.{name}`.")
        if self.gap_factor not in RealNumbers(0, 1):
            raise PlanError(
                f"Cannot space turns over {self.gap_factor!r} of a cycle: choose from 0 to 1 "
                "- at `plan.sync.gap_factor`."
            )
        if self.grace not in RealNumbers(0, finite=False):
            raise PlanError(f"Cannot wait for {self.grace!r} gaps: choose from 0 - at `plan.sync.grace`.")
        for name in ("turn_lease_s", "compute_lease_s"):
            value = getattr(self, name)
            if value not in RealNumbers(above=0, finite=False):
                raise PlanError(f"Cannot wait for {value!r} s: choose more than 0 s - at `plan.sync.{name}`.")

    @property
    def replicated(self) -> bool:
        return False

    @property
    def bound(self) -> int | None:
        return 1 if self.strict else None

    def slots_over(self, hosts: int) -> int:
        """Count the slots where the parameters are spread over so many hosts."""
        return self.slots or (1 if self.strict else hosts)

    @property
    def _whole(self) -> bool:
        """Whether a turn lasts until its pull is through, not only its push."""
        return self.strict or self.half_duplex

    @property
    def drops(self) -> bool:
        return False

    @property
    def gated(self) -> bool:
        return True

    def contributes(self, step: int) -> Contributes:
        """The gradient of every step."""
        return "gradient"

    def decide(self, state: State) -> Sequence[Action]:
        """Give the next worker its turn, if it is ready and the time has come; evict whom others wait for in vain."""
        if orphans := state.orphans:
            return [Apply((push,), rate=state.share(push)) for push in orphans]
        before = state.memory if isinstance(state.memory, Rotation) else None
        rotation = self._watched(self._manned(before or Rotation(), state), state)
        worker = self._next(rotation, state)
        if worker is not None:
            rate = self._rate(rotation, state, worker)
            return [Remember(self._turned(rotation, state, worker)), *_turn(state, worker, rate)]
        leases_s = self._leases_s(rotation, state)
        if late := [(lease_s, worker) for worker, lease_s in leases_s.items() if state.now_s >= lease_s]:
            return [Remember(changed(rotation, evicted_s=state.now_s)), Evict(min(late)[1])]
        worker = self._beginner(rotation, state)
        if worker is not None and state.now_s >= self._open_s(rotation):
            return [Remember(rotation), Grant(worker)]
        actions: list[Action] = [] if rotation == before else [Remember(rotation)]
        wake_s = min([*leases_s.values(), self._opens_s(rotation, state)])
        # A wake that comes too early does no harm: it is set anew then.
        if wake_s < (float("inf") if state.wake_s is None else state.wake_s):
            actions.append(Wake(wake_s))
        return actions

    def explain(self, state: State) -> str:
        """Explain who paces the round, and why, in one sentence; "" as long as no worker has been measured.

        >>> from offbeat.sync import Member, State
        >>> quick, slow = Member(computing_s=0.8, turn_s=0.1), Member(computing_s=1.9, turn_s=0.1)
        >>> RoundRobin().explain(State({0: quick, 1: quick, 2: slow}))[:93]
        'Worker 2 paces the round: its cycle takes 2 s (1.9 s computing, 0.1 s in its turn), 2.2 times'
        """
        cycles_s = _cycles_s(state)
        if not cycles_s:
            return ""
        link_s = self._slot_s(state) * len(state.members)
        worker = max(cycles_s, key=lambda worker: (cycles_s[worker], worker))
        longest_s, middle_s = cycles_s[worker], median(cycles_s.values())
        if link_s >= longest_s:
            return (
                f"The link paces the round: the turns of all {len(state.members)} take {link_s:.3g} s, "
                f"the longest cycle, of worker {worker}, {longest_s:.3g} s."
            )
        member = state.members[worker]
        return (
            f"Worker {worker} paces the round: its cycle takes {longest_s:.3g} s "
            f"({member.computing_s:.3g} s computing, {member.turn_s:.3g} s in its turn), {longest_s / middle_s:.2g} "
            f"times the median of {middle_s:.3g} s; the turns of all {len(state.members)} take {link_s:.3g} s."
        )

    # -- whose turn it is ----------------------------------------------------------------------------------------

    def _next(self, rotation: Rotation, state: State) -> int | None:
        """The worker that has its turn now, if any."""
        if rotation.free_since_s is None or state.now_s < self._open_s(rotation):
            return None
        for worker in rotation.order:
            if worker in rotation.owed and self._is_ready(state, worker):
                return worker
        line = self._line(rotation, state)
        if not line or self._is_ready(state, line[0]):
            return line[0] if line and self._may_pass(rotation, state, line[0]) else None
        if self.strict or state.now_s < self._passing_s(rotation):
            return None
        ready = [worker for worker in line if self._is_ready(state, worker)]
        return ready[0] if ready and self._may_pass(rotation, state, ready[0]) else None

    def _line(self, rotation: Rotation, state: State) -> tuple[int, ...]:
        """List the workers in the order of their turns; in strict order without those that are ahead of another."""
        if self.strict:
            low = state.low
            members = state.members
            return tuple(worker for worker in rotation.order if worker in members and members[worker].pace == low)
        off = _off(state)
        return tuple(worker for worker in rotation.order if worker not in rotation.owed and worker not in off)

    def _beginner(self, rotation: Rotation, state: State) -> int | None:
        """The worker that computes, and may push what it has once turns are open: the next turn is its own."""
        members, slots = state.members, self.slots_over(state.hosts)
        if rotation.free_since_s is None or sum(member.is_pushing for member in members.values()) >= slots:
            return None
        due = [*(worker for worker in rotation.order if worker in rotation.owed), *self._line(rotation, state)]
        return next((worker for worker in due[:slots] if members[worker].may_begin), None)

    def _is_ready(self, state: State, worker: int) -> bool:
        member = state.members[worker]
        if not self.strict or (worker, member.step) in state.pending:
            return member.held
        # What it brought was applied by another policy; the others' contributions may still be on their way.
        return member.held and state.slowest_but(worker) >= member.pace

    def _may_pass(self, rotation: Rotation, state: State, worker: int) -> bool:
        """Whether all who would be passed over still get their turn before their gradients are too old."""
        if self.strict:
            return True
        before = set(rotation.order[: rotation.order.index(worker)]) - _off(state)
        passed = [state.members[other] for other in before if not state.members[other].held]
        if not passed:
            return True
        oldest = state.version + len(passed) - min(member.base for member in passed)
        return oldest <= len(rotation.order) - 1 + self.lead

    def _open_s(self, rotation: Rotation) -> float:
        return 0.0 if rotation.gap_s is None else rotation.next_open_s

    def _passing_s(self, rotation: Rotation) -> float:
        """The time from which another may go ahead of the next worker; never while warming up."""
        if rotation.gap_s is None or rotation.free_since_s is None:
            return float("inf")
        return max(rotation.free_since_s, rotation.next_open_s) + self.grace * rotation.gap_s

    def _opens_s(self, rotation: Rotation, state: State) -> float:
        """The time at which a turn begins although no event comes; infinite if there is none."""
        if rotation.free_since_s is None:
            return float("inf")
        line = self._line(rotation, state)
        first = any(self._is_ready(state, worker) for worker in (*rotation.owed, *line[:1]))
        opens_s = self._open_s(rotation) if first else self._passing_s(rotation)
        someone = first or any(self._is_ready(state, worker) for worker in line)
        due_s = [opens_s] if someone else []
        if self._beginner(rotation, state) is not None:
            due_s.append(self._open_s(rotation))
        return min((at_s for at_s in due_s if state.now_s < at_s), default=float("inf"))

    # -- what is remembered --------------------------------------------------------------------------------------

    def _manned(self, rotation: Rotation, state: State) -> Rotation:
        """Remove workers that left (in strict order, once their turn has come), and add those that joined."""
        members = state.members
        if rotation.order and not rotation.turns:
            rotation = changed(rotation, order=())  # the beginning: by rank, whoever came first
        order = [worker for worker in rotation.order if self.strict or worker in members]
        while order and order[0] not in members:
            del order[0]
        for worker in sorted(members.keys() - set(order)):
            order.insert(self._place(order, state) if rotation.order else len(order), worker)
        if tuple(order) == rotation.order:
            return rotation
        rotation = changed(rotation, order=tuple(order), owed=rotation.owed & members.keys())
        if rotation.gap_s is None or (gap_s := self._wanted_gap_s(state)) is None:
            return rotation
        next_open_s = min(rotation.next_open_s, state.now_s + gap_s)
        return changed(rotation, gap_s=gap_s, next_open_s=next_open_s)

    def _place(self, order: list[int], state: State) -> int:
        """Find the place furthest from other new workers, around the circle; the end if there are none."""
        members = state.members
        new = [i for i, worker in enumerate(order) if worker in members and members[worker].turn_s is None]
        if not new or len(new) == len(order):
            return len(order)

        def distance(place: int) -> int:
            steps = [(place - i) % len(order) for i in new]  # before `place` stands the one at place - 1
            return min(min(step, len(order) - step + 1) if step else 1 for step in steps)

        return max(range(1, len(order) + 1), key=lambda place: (distance(place), place))

    def _watched(self, rotation: Rotation, state: State) -> Rotation:
        """Note what happens between turns: a slot that has become free, the end of the warm-up."""
        turns = [member for member in state.members.values() if member.released_s is not None]
        # Links carry both directions at once, so the next one pushes while this one still pulls, but not one more:
        # where pulls take longer than pushes they would pile up. In strict order not even that, as it would pull
        # parts of the next update.
        slots, pushing = self.slots_over(state.hosts), sum(member.is_pushing for member in turns)
        free = pushing < slots and len(turns) < (slots if self._whole else 2 * slots)
        if not free:
            rotation = changed(rotation, free_since_s=None)
        elif rotation.free_since_s is None:
            rotation = changed(rotation, free_since_s=state.now_s)
        warm = all(m.steps_here >= self.warmup and m.turn_s is not None for m in state.members.values())
        if rotation.gap_s is None and warm and (gap_s := self._wanted_gap_s(state)) is not None:
            rotation = changed(rotation, gap_s=gap_s, next_open_s=state.now_s)
        return rotation

    def _turned(self, rotation: Rotation, state: State, worker: int) -> Rotation:
        """Begin the turn of `worker`."""
        index = rotation.order.index(worker)
        order = (*rotation.order[:index], *rotation.order[index + 1 :], worker)
        owed, weights = rotation.owed, rotation.weights
        if self.strict:
            weights = {other: weights[other] for other in order if other in weights}
            push = (worker, state.members[worker].step)
            if push in state.pending:  # else another policy has applied it, and nothing is known of its weight
                weights[worker] = state.pending[push]
        else:
            passed = {other for other in rotation.order[:index] if not state.members[other].held} - _off(state)
            owed = (owed | passed) - {worker}
        turns, gap_s, next_open_s = rotation.turns + 1, rotation.gap_s, rotation.next_open_s
        if gap_s is not None:
            if turns % len(order) == 0 and (wanted_s := self._wanted_gap_s(state)) is not None:
                gap_s = min(max(wanted_s, gap_s * (1 - _MOST_CHANGE)), gap_s * (1 + _MOST_CHANGE))
            late_s = state.now_s - next_open_s
            next_open_s = next_open_s + gap_s if late_s < gap_s else state.now_s + gap_s
        return Rotation(order, owed, gap_s, next_open_s, None, turns, rotation.evicted_s, weights)

    def _rate(self, rotation: Rotation, state: State, worker: int) -> float:
        """The part of a round's samples that the worker's contribution is made from."""
        push = (worker, state.members[worker].step)
        if not self.strict or push not in state.pending:
            return state.share(push) if push in state.pending else 1.0
        own = state.pending[push]
        others = [rotation.weights.get(other, own) for other in rotation.order if other not in {worker, *_off(state)}]
        return own / (own + add_up(others)) if own else 0.0

    def _wanted_gap_s(self, state: State) -> float | None:
        cycles_s = _cycles_s(state)
        if not cycles_s:
            return None
        # The gap is no shorter than a transfer takes, or transfers overlap and each takes longer still.
        return max(self.gap_factor * median(cycles_s.values()) / len(state.members), self._slot_s(state))

    def _slot_s(self, state: State) -> float:
        """Seconds from one free slot to the next if all of them are always taken.

        Whose transfers take far longer than the others' holds its own slot for so long, but does not space theirs:
        a mean would space all by a bad link, and for many rounds after that has healed.
        """
        members = state.members.values()
        if self._whole:
            times_s = [m.turn_s for m in members if m.turn_s is not None]
        else:  # links carry both directions at once: the slower one counts
            both_s = [(m.push_s, m.turn_s) for m in members if m.push_s is not None and m.turn_s is not None]
            times_s = [max(push_s, turn_s - push_s) for push_s, turn_s in both_s]
        return median(times_s) / self.slots_over(state.hosts) if times_s else 0.0

    # -- who takes too long --------------------------------------------------------------------------------------

    def _leases_s(self, rotation: Rotation, state: State) -> dict[int, float]:
        """The time at which each worker that others wait for is evicted."""
        members = state.members
        pulling = {worker: m for worker, m in members.items() if m.released_s is not None}
        held = [worker for worker, m in members.items() if m.held]
        leases_s = {}
        if held or len(pulling) > 1:
            for worker, m in pulling.items():
                if not m.owes and any(other.owes and _before(other, m) for other in pulling.values()):
                    continue  # it waits as well: updates are made in the order of turns
                begun_s = max(m.released_s or 0.0, rotation.evicted_s)
                leases_s[worker] = begun_s + _lease_s(m.turn_s, self.turn_lease_s)
        if held:
            off = _off(state)
            for worker, m in members.items():
                if not m.held and worker not in pulling and worker not in off:
                    leases_s[worker] = m.since_s + _lease_s(_cycle_s(m), self.compute_lease_s)
        return leases_s


def _turn(state: State, worker: int, rate: float) -> list[Action]:
    member = state.members[worker]
    push = (worker, member.step)
    actions: list[Action] = [] if member.granted_s is not None else [Grant(worker)]
    if push in state.pending:
        actions.append(Apply((push,), rate=rate))
    return [*actions, Release(worker)]


def _before(one: Member, other: Member) -> bool:
    """Whether a turn began no later than another."""
    return (one.released_s or 0.0) <= (other.released_s or 0.0)


def _off(state: State) -> set[int]:
    """Workers that leave this round out, and are not ready before it is over."""
    low = state.low
    return {worker for worker, m in state.members.items() if not m.held and m.is_off(low)}


def _cycle_s(member: Member) -> float | None:
    """Seconds that a step takes, not counting the time it is blocked."""
    if member.computing_s is None or member.turn_s is None:
        return None
    return member.computing_s + member.turn_s


def _cycles_s(state: State) -> dict[int, float]:
    return {worker: s for worker, m in state.members.items() if (s := _cycle_s(m)) is not None}


def _lease_s(average_s: float | None, least_s: float) -> float:
    return max(least_s, _FIRST_LEASE_S) if average_s is None else max(least_s, _LEASE * average_s)
