"""Looking before sleeping: where it pays, and only there."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
from typing import TYPE_CHECKING

import pytest

from offbeat.wire import busy_poll
from offbeat.wire.busy_poll import EagerSelector

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 0.002


class Calls:
    """Notes the timeouts that the kernel is asked with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timeouts: list[float | None] = []
        plain = selectors.EpollSelector.select

        def select(
            selector: selectors.EpollSelector, timeout: float | None = None
        ) -> list[tuple[selectors.SelectorKey, int]]:
            self.timeouts.append(timeout)
            return plain(selector, timeout)

        monkeypatch.setattr(selectors.EpollSelector, "select", select)

    def take(self) -> list[float | None]:
        taken, self.timeouts = self.timeouts, []
        return taken


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_what_is_there_is_found_without_going_to_sleep(calls: Calls, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.send(b"x")
    with EagerSelector() as selector:
        selector.register(near, selectors.EVENT_READ)
        for _ in range(3):
            assert [key.fileobj for key, _ in selector.select(TIMEOUT_S)] == [near]
    assert calls.take() == [0, 0, 0]


def test_looking_in_vain_is_given_up_for_longer_each_time(calls: Calls) -> None:
    looked = []
    with EagerSelector() as selector:
        for wait in range(20):
            assert selector.select(TIMEOUT_S) == []
            taken = calls.take()
            assert taken[-1] == TIMEOUT_S, "it goes to sleep then"
            if 0 in taken:
                looked.append(wait)
    assert looked == [0, 2, 6, 14]


def test_it_looks_again_once_it_has_been_worth_it(calls: Calls, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    with EagerSelector() as selector:
        selector.register(near, selectors.EVENT_READ)
        for _ in range(14):
            selector.select(TIMEOUT_S)
        far.send(b"x")
        calls.take()
        selector.select(TIMEOUT_S)
        selector.select(TIMEOUT_S)
        assert calls.take() == [0, 0]


@pytest.mark.parametrize("timeout", [0, -1.0, 50e-6])
def test_a_short_wait_is_left_to_the_kernel(calls: Calls, timeout: float) -> None:
    with EagerSelector() as selector:
        assert selector.select(timeout) == []
    assert calls.take() == [timeout]


def test_timers_and_other_threads_are_served() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.sleep(0.01)
        assert loop.time() - began_s >= 0.01
        return await loop.run_in_executor(None, lambda: "done")

    assert busy_poll.run(main()) == "done"


def test_with_one_processor_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    loop = busy_poll.new_event_loop()
    assert not isinstance(loop._selector, EagerSelector)  # type: ignore[attr-defined]
    loop.close()
