"""Schedulers, a coordinator and workers in random orders, against a model that knows whole contributions only."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.server.blocks import Block
from offbeat.server.client.model_state import ModelState
from offbeat.server.shard import update_scheduler
from offbeat.server.shard.update_scheduler import (
    ApplyUpdate,
    CaptureBlock,
    MeasureUpdate,
    UndoUpdate,
    UpdateScheduler,
)
from offbeat.sync import Apply

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.sync import Push

Value = tuple[tuple[int, tuple["Push", ...]], ...]  # a block: its updates as they were made, with what is in each


class Shard:
    """A scheduler that hears decisions late, and carries out what is due on blocks that remember all that was done.

    Args:
        give: called with a worker, its entry, step, block, number and value.
        tell: tells the coordinator that a contribution is whole here, that nothing more is taken of a worker, or that
            an update is to be judged.
        judges: updates are.
    """

    def __init__(
        self, blocks: list[int], give: Callable[..., None], tell: Callable[..., None], *, judges: bool = False
    ) -> None:
        self.scheduler, self._give, self._tell = UpdateScheduler(blocks, judges=judges), give, tell
        self.judges = judges
        self.measured: dict[int, list[Push]] = {}
        self.values: dict[int, Value] = dict.fromkeys(blocks, ())
        self.decided: deque[tuple[Any, ...]] = deque()
        self.entries: dict[int, int] = {}
        self.kept: dict[int, Value] | None = {}
        self.whole: list[Push] = []

    def hear(self) -> None:
        """The next decision."""
        kind, *what = self.decided.popleft()
        if kind == "part":
            worker, number = what
            self.scheduler.lose(worker)
            if number:
                self._tell("parted", number)
        elif kind == "admit":
            worker, step, self.entries[worker] = what
            self.scheduler.admit(worker, step)
        elif kind == "mark":
            self.scheduler.mark()
            self.kept = {}
        elif kind == "withdraw":
            if self.scheduler.withdraw(*what):
                self.kept = None
        elif kind == "drop":
            self.scheduler.drop(what[0], coming=what[1])
        elif kind == "judge":
            assert self.scheduler.judge(*what)
            assert not self.scheduler.judge(*what) or not self.values, "once"
        else:
            getattr(self.scheduler, kind)(*what)
        self.carry_out(None)

    def arrive(self, push: Push, block: int) -> None:
        """A block of a contribution."""
        missing = self.scheduler.arrive(push, block, (push, block))
        self.carry_out(block)
        if not missing:
            self.whole.append(push)
            self._tell("whole", push)

    def carry_out(self, block: int | None) -> None:
        for action in self.scheduler.due(block):
            if isinstance(action, MeasureUpdate):
                self.measure(action)
                continue
            value = self.values[action.block]
            if isinstance(action, ApplyUpdate):
                if self.judges:
                    assert (action.entry, action.judgement) == (None, ("judged", action.version))
                    assert self.measured[action.version] == [push for push, _ in action.parts]
                if action.entry is not None:
                    action.entry.before = value
                assert all(part == (push, action.block) for push, part in action.parts)
                self.values[action.block] = (*value, (action.version, tuple(push for push, _ in action.parts)))
            elif isinstance(action, UndoUpdate):
                assert not self.judges, "what is judged is never undone"
                assert value[: len(action.before)] == action.before, "it goes back, not elsewhere"
                self.values[action.block] = action.before
            elif isinstance(action, CaptureBlock):
                if self.kept is not None:
                    assert action.block not in self.kept
                    self.kept[action.block] = value if action.before is None else action.before
            else:
                entry = self.entries[action.worker]
                self._give(action.worker, entry, action.step, action.block, action.number, value)
        most = update_scheduler._MOST_ENTRIES * max(1, len(self.scheduler._next))
        if not self.scheduler._unkept:
            assert all(len(self.scheduler._undo_log.of(one)) <= most for one in self.values)

    def measure(self, action: MeasureUpdate) -> None:
        """Tell the coordinator what there is, and what was made before."""
        assert action.blocks.keys() == self.values.keys()
        pushes = [[push for push, _ in parts] for parts in action.blocks.values()]
        before = [[version for version, _ in value] for value in self.values.values()]
        assert all(one == pushes[0] for one in pushes)
        assert all(one == before[0] for one in before)
        self.measured[action.version] = pushes[0]
        self._tell("measured", (action.version, pushes[0], before[0]))


@dataclass
class Worker:
    """One worker's end; what it has been given lies in `values`, and `ModelState` says when it goes on."""

    place: ModelState
    entry: int
    step: int = 0
    is_computing: bool = True
    is_released: bool = False
    after: int = 0  # the update with its own contribution, when it was released; 0 if there was none
    left: set[int] = field(default_factory=set)  # blocks that it has not pushed
    values: dict[int, Value] = field(default_factory=dict)
    inbox: deque[tuple[int, int, int, Value]] = field(default_factory=deque)


class Job:
    """A coordinator that decides at random, with the books of `offbeat.coordinator`."""

    def __init__(self, chance: random.Random, *, judges: bool = False) -> None:
        self.chance = chance
        self.measured: dict[int, list[tuple[Any, ...]]] = {}
        self.judged: list[int] = []
        self.reports: list[tuple[Any, ...]] = []  # of shards, on their way
        self.in_order, self.together = chance.random() < 0.6, chance.random() < 0.5
        self.count, holders = chance.randint(1, 5), chance.randint(1, 3)
        self.holder = [chance.randrange(holders) for _ in range(self.count)]
        self.said: list[deque[tuple[Any, ...]]] = [deque() for _ in range(holders)]
        self.shards = [
            Shard([b for b in range(self.count) if self.holder[b] == s], self.give, self.tells(s), judges=judges)
            for s in range(holders)
        ]
        self.workers: dict[int, Worker] = {}
        self.announced: set[Push] = set()
        self.open: set[Push] = set()
        self.here: set[Push] = set()
        self.wholes: dict[Push, int] = {}
        self.partings: dict[int, tuple[list[Push], int]] = {}
        self.parted = self.entry = 0
        self.updates: list[tuple[Push, ...]] = []
        self.withdrawn: set[Push] = set()
        self.dropped: set[Push] = set()
        self.next: dict[int, int] = {}
        self.mark: int | None = None
        self.went_on: list[tuple[int, dict[int, Value]]] = []  # after which update, and with what
        for worker in range(chance.randint(2, 4)):
            self.join(worker)

    def tells(self, shard: int) -> Callable[..., None]:
        def tell(*said: Any) -> None:
            if said[0] == "measured":  # also the coordinator's own come later
                self.reports.append(said[1])
                return
            if shard or said[0] == "whole":
                self.said[shard].append(said)
            if not shard and self.said[shard]:  # it is the coordinator
                self.hear(shard)

        return tell

    def give(self, worker: int, entry: int, step: int, block: int, number: int, value: Value) -> None:
        if worker in self.workers and self.workers[worker].entry == entry:
            self.workers[worker].inbox.append((step, block, number, value))

    def decide(self, *decision: Any) -> None:
        for shard in self.shards:
            shard.decided.append(decision)
        while self.shards[0].decided:
            self.shards[0].hear()

    # -- what may happen -----------------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        step = self.next.get(worker, 0)
        blocks = [Block(b, 0, 1, "float32", 4, ()) for b in range(self.count)]
        place = ModelState(0, blocks, self.holder, [])
        place.await_all()
        self.entry += 1
        self.workers[worker] = Worker(place, self.entry, step, is_computing=not step, is_released=bool(step))
        self.decide("admit", worker, step, self.entry)
        if step:
            self.workers[worker].after = self.version_of((worker, step - 1))
            self.decide("release", worker, step)

    def announce(self, worker: int) -> None:
        it = self.workers[worker]
        it.is_computing, it.left = False, set(range(self.count))
        it.place.await_all()
        self.announced.add((worker, it.step))
        self.next[worker] = it.step + 1

    def push(self, worker: int, block: int) -> None:
        it, shard = self.workers[worker], self.shards[self.holder[block]]
        push = (worker, it.step - it.is_released)
        if shard.entries.get(worker) == it.entry and shard.scheduler.expects(push, block):
            it.left.discard(block)
            shard.arrive(push, block)

    def apply(self) -> None:
        pushes = tuple(sorted(self.announced))
        present = {(worker, it.step) for worker, it in self.workers.items()}
        if self.together and not present <= self.announced:
            return
        if not self.together:
            pushes = tuple(self.chance.sample(pushes, self.chance.randint(1, len(pushes))))
        for some in [pushes] if self.in_order or self.chance.random() < 0.2 else [(push,) for push in pushes]:
            self.announced.difference_update(some)
            self.open.update(push for push in some if push not in self.here)
            self.updates.append(some)
            self.decide("apply", Apply(some, in_order=self.in_order), dict(zip(some, some, strict=True)))
        self.release(pushes)

    def drop(self, push: Push) -> None:
        self.announced.discard(push)
        self.dropped.add(push)
        self.decide("drop", push, True)
        self.release((push,))

    def release(self, pushes: tuple[Push, ...]) -> None:
        for worker, clock in pushes:
            it = self.workers.get(worker)
            if it is not None and it.step == clock:
                it.step, it.is_released, it.after = clock + 1, True, self.version_of((worker, clock))
                self.decide("release", worker, clock + 1)

    def lose(self, worker: int) -> None:
        it = self.workers.pop(worker)
        pushes = [push for push in self.open if push[0] == worker]
        asks = bool(pushes) and len(self.shards) > 1
        self.parted += asks
        self.decide("part", worker, self.parted if asks else 0)
        if asks:
            self.partings[self.parted] = (pushes, len(self.shards) - 1)
        else:
            self.withdraw(pushes)
        push = (worker, it.step)
        if push in self.announced and push not in self.here:
            self.announced.discard(push)
            self.dropped.add(push)
            self.decide("drop", push, False)

    def withdraw(self, pushes: list[Push]) -> None:
        for push in pushes:
            if push in self.open:
                holders = set(self.holder)
                assert any(push not in self.shards[s].whole for s in holders), "it was whole everywhere"
                self.open.discard(push)
                self.withdrawn.add(push)
                self.decide("withdraw", push)

    def hear(self, shard: int) -> None:
        kind, what = self.said[shard].popleft()
        if kind == "whole":
            self.wholes[what] = self.wholes.get(what, 0) + 1
            if self.wholes[what] == len(set(self.holder)):
                self.commit(what)
            return
        pushes, missing = self.partings[what]
        self.partings[what] = (pushes, missing - 1)
        if missing == 1:
            self.withdraw(pushes)

    def judge(self, report: tuple[Any, ...]) -> None:
        """Hear what a shard has measured: the same as all others, beside the same updates that were made before."""
        version = report[0]
        first, *others = measured = [*self.measured.get(version, []), report]
        self.measured[version] = measured
        if len(measured) < len(set(self.holder)):
            return
        assert all(other == first for other in others)
        assert first[1] == sorted(push for push in self.updates[version - 1] if push not in self.withdrawn)
        assert not self.open.intersection(first[1])
        self.judged.append(version)
        self.decide("judge", version, ("judged", version))

    def commit(self, push: Push) -> None:
        if push in self.announced:
            self.here.add(push)
        elif push not in self.open:
            return
        self.open.discard(push)
        self.decide("commit", push)

    def take(self, worker: int) -> None:
        """The next block that a worker is given."""
        it = self.workers[worker]
        step, block, number, value = it.inbox.popleft()
        assert (step, it.is_released) == (it.step, True), "nobody is given anything while it computes"
        assert it.place.expects(block, number)
        it.values[block] = value
        it.place.take(block, number)
        if it.place.missing:
            return
        it.is_released, it.is_computing = False, True
        own = (worker, it.step - 1)
        assert not it.left or own in self.dropped, "it was given its own before it had pushed that"
        if it.after:
            self.commit(own)
            if self.in_order:
                self.went_on.append((it.after, dict(it.values)))

    def outlive(self) -> list[Push]:
        """The life ends here: nothing more arrives, and shards settle what is open; what is withdrawn for that."""
        for shard in self.shards:
            while shard.decided:  # the coordinator sends again what a shard had not heard
                shard.hear()
        whole = set.intersection(*(shard.scheduler.whole() for shard in self.shards if shard.values))
        kept, withdrawn = self.shards[0].scheduler.settle(whole)
        for shard in self.shards:
            shard.scheduler.give_up_mark()
        for push in kept:
            self.commit(push)
        for push in withdrawn:
            self.open.discard(push)
            self.withdrawn.add(push)
            self.decide("withdraw", push)
        for shard in self.shards:
            while shard.decided:
                shard.hear()
            shard.carry_out(None)
        return list(withdrawn)

    def set_mark(self) -> None:
        self.mark = len(self.updates)
        self.decide("mark")

    def see_kept(self) -> None:
        """Whether the last mark is reached or given up at all shards."""
        if self.mark is None or any(shard.decided for shard in self.shards):
            return
        given_up = [shard.kept is None for shard in self.shards if shard.values]
        if any(given_up):
            assert all(given_up), "shards disagree about a snapshot"
            self.mark = None
        elif all(len(shard.kept or {}) == len(shard.values) for shard in self.shards):
            for shard in self.shards:
                for value in (shard.kept or {}).values():
                    assert dict(value) == self.expected(self.mark), "one version, of whole contributions"
                    assert not self.open & {push for _, pushes in value for push in pushes}
            self.mark = None

    # -- the model -----------------------------------------------------------------------------------------------

    def version_of(self, push: Push) -> int:
        """The update that a contribution is in; 0 if it is in none."""
        return next((version for version, pushes in enumerate(self.updates, 1) if push in pushes), 0)

    def expected(self, version: int) -> dict[int, tuple[Push, ...]]:
        """What is in each update up to this one."""
        return {
            number: tuple(sorted(push for push in pushes if push not in self.withdrawn))
            for number, pushes in enumerate(self.updates[:version], 1)
        }

    # -- chance --------------------------------------------------------------------------------------------------

    def happen(self) -> None:
        """One thing that can."""
        chance, deed = self.chance, self.chance.random()
        computing = [w for w, it in self.workers.items() if it.is_computing and not it.left]
        pushing = [(w, b) for w, it in self.workers.items() for b in it.left]
        late = [shard for shard in self.shards if shard.decided]
        talking = [s for s, said in enumerate(self.said) if said]
        taking = [w for w, it in self.workers.items() if it.inbox]
        if self.reports and chance.random() < 0.3:
            self.judge(self.reports.pop(chance.randrange(len(self.reports))))
        elif deed < 0.15 and computing:
            self.announce(chance.choice(computing))
        elif deed < 0.45 and pushing:
            self.push(*chance.choice(pushing))
        elif deed < 0.55 and self.announced:
            self.apply()
        elif deed < 0.68 and late:
            chance.choice(late).hear()
        elif deed < 0.78 and talking:
            self.hear(chance.choice(talking))
        elif deed < 0.93 and taking:
            self.take(chance.choice(taking))
        elif deed < 0.95 and self.announced and not self.together:
            push = chance.choice(sorted(self.announced))
            if push[0] in self.workers:
                self.drop(push)
        elif deed < 0.97 and len(self.workers) > 1:
            self.lose(chance.choice(sorted(self.workers)))
        elif deed < 0.985 and len(self.workers) < 4:
            gone = [worker for worker in range(4) if worker not in self.workers]
            self.join(chance.choice(gone))
        elif self.mark is None:
            self.set_mark()
        self.see_kept()

    def end(self) -> None:
        """Let all come to an end that can."""
        for _ in range(10_000):
            busy = False
            for shard in self.shards:
                while shard.decided:
                    shard.hear()
                    busy = True
            for s, said in enumerate(self.said):
                while said:
                    self.hear(s)
                    busy = True
            while self.reports:
                self.judge(self.reports.pop())
                busy = True
            for worker, it in self.workers.items():
                for block in tuple(it.left):
                    self.push(worker, block)
                while it.inbox:
                    self.take(worker)
                    busy = True
            if self.announced and not (self.together and any(it.is_computing for it in self.workers.values())):
                self.apply()
                busy = True
            elif self.announced:
                for worker, it in self.workers.items():
                    if it.is_computing:
                        self.announce(worker)
                        busy = True
            self.see_kept()
            if not busy and not self.reports:
                return
        raise AssertionError("it does not come to an end")


def play(chance: random.Random, *, judges: bool = False) -> Job:
    job = Job(chance, judges=judges)
    for _ in range(150):
        job.happen()
    job.end()
    assert not job.open, "all are committed or withdrawn"
    assert job.mark is None, "every mark is reached or given up"
    assert all(not it.is_released for it in job.workers.values()), "nobody waits for ever"
    final = job.expected(len(job.updates))
    for shard in job.shards:
        assert not shard.scheduler._updates
        for block, value in shard.values.items():
            assert not shard.scheduler._undo_log.of(block)
            assert len(value) == len(final)
            assert dict(value) == final, "whole contributions, each once"
            if job.in_order:
                assert list(dict(value)) == sorted(final)
    for version, values in job.went_on:
        for value in values.values():
            seen = {number: pushes for number, pushes in value if number <= version}
            assert seen == job.expected(version), "what it goes on from is what stays"
    return job


@pytest.mark.parametrize("most", [1, 4])
@settings(max_examples=100)
@given(chance=st.randoms(use_true_random=True))
def test_no_half_of_a_contribution_is_anywhere(most: int, chance: random.Random) -> None:
    before, update_scheduler._MOST_ENTRIES = update_scheduler._MOST_ENTRIES, most
    try:
        play(chance)
    finally:
        update_scheduler._MOST_ENTRIES = before


@settings(max_examples=200)
@given(chance=st.randoms(use_true_random=True))
def test_what_is_judged_is_whole_everywhere_and_is_made_once(chance: random.Random) -> None:
    job = play(chance, judges=True)
    assert sorted(job.judged) == list(range(1, len(job.updates) + 1))


def test_what_is_judged_meets_lost_workers_and_marks() -> None:
    jobs = [play(random.Random(seed), judges=True) for seed in range(100)]
    assert sum(len(job.withdrawn) for job in jobs) > 20
    assert sum(len(job.judged) for job in jobs) > 300
    assert sum(job.judged != sorted(job.judged) for job in jobs) > 3, "without order some overtake others"
    assert sum(any(job.updates[v - 1] and not job.expected(v)[v] for v in job.judged) for job in jobs) > 3
    assert sum(len(job.went_on) for job in jobs) > 200


def test_what_is_played_has_what_it_is_about() -> None:
    jobs = [play(random.Random(seed)) for seed in range(100)]
    assert sum(len(job.withdrawn) for job in jobs) > 20
    assert sum(any(push in pushes for pushes in job.updates) for job in jobs for push in job.withdrawn) > 20
    assert sum(len(job.went_on) for job in jobs) > 200


def end_a_life(chance: random.Random) -> tuple[Job, list[Push]]:
    """A job up to some moment, at which all shards lose everybody, and keep their memory."""
    job = Job(chance)
    for _ in range(chance.randint(0, 150)):
        job.happen()
    withdrawn = job.outlive()
    assert not job.open
    final = job.expected(len(job.updates))
    for shard in job.shards:
        assert shard.scheduler.is_settled
        for block, value in shard.values.items():
            assert not shard.scheduler._undo_log.of(block)
            assert dict(value) == final, "all shards have one version, of whole contributions"
    for worker, clock in withdrawn:
        it = job.workers.get(worker)
        newest = max(number for other, number in withdrawn if other == worker)  # two, if it has come back since
        assert it is None or (it.step, it.is_released) == (newest + 1, True), "its worker still holds it"
        later = [push for pushes in job.updates for push in pushes if push[0] == worker and push[1] > clock]
        assert set(later) <= job.withdrawn, "nothing that it brought since is kept"
    for pushes in job.updates:
        gone = [push for push in pushes if push in withdrawn]
        assert not gone or all(push in job.withdrawn for push in pushes), "an update is finished, or changes nothing"
    return job, withdrawn


@pytest.mark.parametrize("most", [1, 4])
@settings(max_examples=100)
@given(chance=st.randoms(use_true_random=True))
def test_a_life_that_ends_leaves_one_version_in_memory(most: int, chance: random.Random) -> None:
    before, update_scheduler._MOST_ENTRIES = update_scheduler._MOST_ENTRIES, most
    try:
        end_a_life(chance)
    finally:
        update_scheduler._MOST_ENTRIES = before


def test_lives_end_with_updates_to_finish_and_to_withdraw() -> None:
    ends = [end_a_life(random.Random(seed)) for seed in range(100)]
    assert sum(bool(withdrawn) for _, withdrawn in ends) > 10
    assert sum(len(job.updates) for job, _ in ends) > 150
