"""Who goes on where newcomers come in: groups without fabrics, over one store, turn by turn."""

from __future__ import annotations

import functools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore

from offbeat.fabric import BindContext, Elastic, ElasticGroup
from offbeat.fabric.process_group import GlooCollectives
from offbeat.payload import Sum
from offbeat.protocol.group_progress import GroupProgress
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.fabric.generation import Generation, GroupCollectives

    Turn = Callable[[], bool]

AT_ONCE = timedelta()
NEWCOMER = 3


class NoFabric:
    """A fabric over which nothing was exchanged."""

    begun = 0

    def begin_at(self, number: int) -> None:
        pass

    def stop(self) -> GroupProgress:
        return GroupProgress(0)

    def connect(self, generation: Generation) -> GlooCollectives:
        return GlooCollectives(generation.group)

    def resume(self, collectives: GroupCollectives, progress: Mapping[int, GroupProgress]) -> None:
        pass

    def replay(self, timeout: timedelta) -> bool:
        return True


class Table:
    """Three members' groups, and one that comes to them.

    Args:
        gone: who is known to be gone.
    """

    def __init__(self, gone: dict[int, str]) -> None:
        store = HashStore()
        self.groups = [ElasticGroup(store, rank, NEWCOMER, timedelta(seconds=1)) for rank in range(NEWCOMER + 1)]
        for group in self.groups:
            group.gone = lambda: gone

    def comes(self) -> Turn:
        """The newcomer's turns, which is told that it may come in."""
        newcomer = self.groups[NEWCOMER]
        newcomer.join(self.groups[0].number, ())
        return lambda: newcomer.reconfigure(AT_ONCE)

    def admits(self, rank: int) -> Turn:
        """The turns of one that has come to where newcomers come in."""
        return lambda: self.groups[rank].admit([NEWCOMER], AT_ONCE)

    def parts(self, rank: int) -> Turn:
        """The turns of one that is done."""
        return lambda: self.groups[rank].finish(AT_ONCE)

    def play(self, *turns: Turn) -> None:
        """Give each its turn until all have come to their end."""
        deadline_s, going = time.monotonic() + 10, list(turns)
        while going:
            going = [turn for turn in going if not turn()]
            assert time.monotonic() < deadline_s, "they wait for ever"

    def members(self, *ranks: int) -> set[tuple[int, ...]]:
        """Who is in, as these have it."""
        return {self.groups[rank].members for rank in ranks}


def test_all_and_a_newcomer() -> None:
    table = Table({})
    table.play(table.comes(), *(table.admits(rank) for rank in range(3)))
    assert table.members(0, 1, 2, 3) == {(0, 1, 2, 3)}


@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_done_does_not_come_there_and_is_not_waited_for(rank: int) -> None:
    table = Table({})
    there = [other for other in range(3) if other != rank]
    table.play(table.comes(), table.parts(rank), *(table.admits(other) for other in there))
    assert table.members(*there, NEWCOMER) == {(*there, NEWCOMER)}


@pytest.mark.parametrize("lost", [0, 2, NEWCOMER])
def test_who_is_gone_does_not_come_there(lost: int) -> None:
    table = Table({lost: "died."})
    left = [rank for rank in range(NEWCOMER + 1) if rank != lost]
    turns = [table.admits(rank) for rank in left if rank != NEWCOMER]
    table.play(*turns, *([table.comes()] if lost != NEWCOMER else []))
    assert table.members(*left) == {tuple(left)}


def test_whoever_ends_the_generation_before_all_are_there_only_delays_it() -> None:
    """Rank 2 is lost while rank 1 is not there yet, and ends the generation from within an exchange."""
    gone: dict[int, str] = {}
    table = Table(gone)
    first, newcomer = table.admits(0), table.comes()
    assert not first()
    assert not newcomer()
    gone[2] = "died."
    second = table.groups[1]
    second.invalidate()
    table.play(lambda: (first(), newcomer(), second.reconfigure(AT_ONCE))[-1])
    assert table.members(0, 1) == {(0, 1)}
    assert not newcomer()
    table.play(first, newcomer, table.admits(1))
    assert table.members(0, 1, NEWCOMER) == {(0, 1, NEWCOMER)}


class SlowFabric(NoFabric):
    """A fabric that takes long to stop; it counts how often that is asked of it at a time."""

    def __init__(self) -> None:
        self.stops, self._second = 0, threading.Event()

    def stop(self) -> GroupProgress:
        self.stops += 1
        if self.stops == 2:
            self._second.set()
        self._second.wait(0.3)
        return super().stop()


def test_of_two_threads_that_find_a_generation_broken_one_ends_it() -> None:
    group, fabric = Table({}).groups[0], SlowFabric()
    group._clients.append(fabric)
    with ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(group.invalidate, 0) for _ in range(2)]:
            ended.result()
    assert fabric.stops == 1


def test_a_generation_that_has_ended_is_not_ended_again() -> None:
    table = Table({})
    for group in table.groups[:NEWCOMER]:
        group.invalidate(0)
    table.play(*(functools.partial(group.reconfigure, AT_ONCE) for group in table.groups[:NEWCOMER]))
    first = table.groups[0]
    first.invalidate(0)  # by a thread that learns only now what has happened to its exchange
    assert first.reconfigure(AT_ONCE)
    assert first.number == 1
    first.invalidate(1)
    assert not first.reconfigure(AT_ONCE)


class HeldFabric(NoFabric):
    """A fabric that has something to give or to take until it is let go."""

    may_go = was_asked = False

    def replay(self, timeout: timedelta) -> bool:
        self.was_asked = True
        return self.may_go


def test_what_one_thread_begins_while_another_leads_to_the_next_generation_is_issued() -> None:
    """Its fabric is connected already, and another is not yet."""
    group, held = ElasticGroup(HashStore(), 0, 1), HeldFabric()
    group.gone = dict
    fabric = Elastic().bind(BindContext(0, 1, group=group))
    group._clients.append(held)
    group.invalidate()
    deadline_s = time.monotonic() + 10
    while not held.was_asked:
        assert not group.reconfigure(AT_ONCE)
        assert time.monotonic() < deadline_s
    exchange = fabric.start(Sum(torch.ones(3)))
    held.may_go = True
    while not exchange.wait(timedelta(milliseconds=100)):
        assert time.monotonic() < deadline_s, "it was never begun"
    fabric.close()


def sum_on_two_fabrics() -> tuple[int, int]:
    """Two threads add up, each on its own fabric; now and then one ends the generation."""
    rank, steps = int(os.environ["RANK"]), 100
    group = ElasticGroup(FileStore(os.environ["OFFBEAT_STORE"], 2), rank, 2, timedelta(seconds=1))
    group.gone = dict
    fabrics = [Elastic().bind(BindContext(rank, 2, group=group)) for _ in range(2)]

    def sum_on(which: int) -> int:
        right = 0
        for step in range(steps):
            mine = torch.full((1000,), float(step + rank))
            pending = fabrics[which].start(Sum(mine))
            if step % 50 == 20 and which == rank:
                group.invalidate()
            deadline_s = time.monotonic() + 20
            while not pending.wait(timedelta(milliseconds=100)):
                assert time.monotonic() < deadline_s, f"fabric {which} waits for ever in step {step}"
            pending.result()
            right += bool((mine == 2 * step + 1).all())
        return right

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(sum_on, range(2))
    while not group.finish(timedelta(seconds=1)):
        pass
    return first, second


@pytest.mark.timeout(60)
def test_two_threads_of_a_worker_go_on_into_the_same_generations() -> None:
    assert run_workers(2, sum_on_two_fabrics) == [(100, 100)] * 2


def test_generations_that_do_not_hold_are_formed_again_after_ever_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is lost, and no connection can be made, as behind a firewall; then it can."""
    table, tried = Table({}), list[tuple[int, float]]()
    began_s = time.monotonic()

    def connect(group: ElasticGroup, number: int, index: int, members: Sequence[int]) -> None:
        if not tried or tried[-1][0] < number:
            tried.append((number, time.monotonic() - began_s))
        if time.monotonic() < began_s + 1.0:
            raise RuntimeError("Connection refused")

    monkeypatch.setattr(ElasticGroup, "_connect", connect)
    there = table.groups[:NEWCOMER]
    for group in there:
        group._clients.append(NoFabric())
        group.invalidate()
    table.play(*(functools.partial(group.reconfigure, AT_ONCE) for group in there))
    assert table.members(0, 1, 2) == {(0, 1, 2)}
    assert tried[0][1] < 0.1, "the first time at once"
    early = [number for number, at_s in tried if at_s < 1.0]
    assert 3 <= len(early) <= 6, tried
    assert len({group.number for group in there}) == 1
