"""Who goes on where newcomers come in: groups without fabrics, over one store, turn by turn."""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from torch._C._distributed_c10d import HashStore

from offbeat.fabric import ElasticGroup
from offbeat.protocol.group_progress import GroupProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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

    def resume(self, group: object, progress: Mapping[int, GroupProgress]) -> None:
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
