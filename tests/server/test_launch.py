"""A server that is looked after, where there can be no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from offbeat.cli import shard_main
from offbeat.clock import VirtualClock
from offbeat.errors import NetworkError
from offbeat.server import launch
from tests.workers import listen


class Refusing:
    """In place of `subprocess.Popen`: only so many processes can be started, and each ends well as soon as it serves.

    Args:
        room: how many.
    """

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        if not self.room:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.room -= 1
        program = f"echo '{ANNOUNCEMENT}' >&{pass_fds[0]}; cat > {os.devnull}"
        return POPEN(["bash", "-c", program], pass_fds=pass_fds, stdin=subprocess.PIPE)


POPEN = subprocess.Popen
ANNOUNCEMENT = launch.ShardAnnouncement("127.0.0.1:7070").to_json()


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # they are this process's


def test_a_server_that_cannot_be_started_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Refusing(0))
    with pytest.raises(NetworkError, match=r"Cannot start a parameter server: .*Resource temporarily unavailable"):
        launch.start_shard(launch.ShardSettings(job="j"))


def test_a_server_goes_on_if_there_can_be_no_spare_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said, there = listen(), list[str]()
    popen = Refusing(1)
    monkeypatch.setattr(subprocess, "Popen", popen)
    shard_main.look_after(launch.ShardSettings(job="j", restarts=5), there.append)
    assert there == ["127.0.0.1:7070"]
    assert any("None stands by in case that the parameter server is lost. Cannot start" in text for text in said)
    assert popen.room == 0


class Dying:
    """In place of `subprocess.Popen`: each process that serves dies at once, as where memory is short."""

    def __init__(self) -> None:
        self.started = 0

    def __call__(self, command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        self.started += 1
        program = f"echo '{ANNOUNCEMENT}' >&{pass_fds[0]}; cat > {os.devnull}; exit 3"
        return POPEN(["bash", "-c", program], pass_fds=pass_fds, stdin=subprocess.PIPE)


def test_a_server_that_dies_at_once_is_not_started_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, clock = listen(), VirtualClock()
    monkeypatch.setattr(subprocess, "Popen", popen := Dying())
    shard_main.look_after(launch.ShardSettings(job="j", restarts=5), lambda address: None, clock)
    assert sum("it is started again" in text for text in said) == 5
    assert "for the last time: it is not started again." in said[-1]
    assert popen.started >= 6
    # At most 0, 0.5, 1, 2 and 4 s; jitter leaves half of each, and a pause is looked up from 20 times a second.
    assert 3.75 <= clock.now_s() <= 7.5 + 5 * 0.06


class Silent:
    """In place of `subprocess.Popen`: a process that never answers."""

    def __call__(self, command: list[str], *, pass_fds: tuple[int, ...], **how: Any) -> subprocess.Popen[bytes]:
        self.process = POPEN(["sleep", "60"], pass_fds=pass_fds, stdin=subprocess.PIPE)
        return self.process


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(5.0, 60), (30.0, 360)])
def test_a_server_may_take_as_long_to_start_as_the_timeout_allows(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, limit_s: int
) -> None:
    popen = Silent()
    monkeypatch.setattr(subprocess, "Popen", popen)
    started = launch.ShardProcess()
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    started.tell(launch.ShardSettings(job="j", timeout_s=timeout_s))
    now_s += limit_s - 1
    assert started.answer(0.0) is None
    popen.process.send_signal(signal.SIGSTOP)
    os.waitpid(popen.process.pid, os.WUNTRACED)
    now_s += 2
    says = f"it has not said within {limit_s} s where it serves, and is paused .SIGSTOP.. A longer --timeout"
    with pytest.raises(NetworkError, match=says):
        started.answer(0.0)
