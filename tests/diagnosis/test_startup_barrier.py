"""Who is not there before the first step: those that are known to be starting are waited for, others are named soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from torch._C._distributed_c10d import HashStore

from offbeat.clock import WallClock
from offbeat.diagnosis.startup_barrier import StartupBarrier
from offbeat.diagnosis.wait import BlockingWait, WaitContext
from offbeat.errors import WorkerLostError
from offbeat.run.environment import Environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 1.0
CALL = WaitContext("the others to call offbeat.init()")
BUSY, IDLE = "while True: pass", "import time; time.sleep(60)"


@pytest.fixture
def other(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The process of rank 1, which the launcher has started."""
    process = subprocess.Popen([sys.executable, "-c", request.param])
    (tmp_path / "workers.json").write_text(json.dumps({0: os.getpid(), 1: process.pid}))
    monkeypatch.setenv("OFFBEAT_WORKERS", str(tmp_path / "workers.json"))
    yield process
    process.kill()
    process.wait()


class Told:
    """What a waiter tells, and when."""

    def __init__(self, folder: Path) -> None:
        self.texts: list[tuple[float, str]] = []
        self._began_s = time.monotonic()
        self.waiter = BlockingWait(
            clock=WallClock(),
            timeout=timedelta(seconds=TIMEOUT_S),
            tell=lambda text: self.texts.append((time.monotonic() - self._began_s, text)),
            report_path=folder / "stall.json",
        )
        self.waiter.witness = self.roll = StartupBarrier(HashStore(), 0, 2, Environment().worker_pids)

    def wait(self, seconds: float) -> None:
        """For rank 1, which never comes."""

        class Soon:
            sent_bytes = 0

            def done(_) -> bool:
                return time.monotonic() - self._began_s > seconds

            def wait(soon, timeout: timedelta) -> bool:
                time.sleep(timeout.total_seconds())
                return soon.done()

            def result(_) -> list[Any]:
                return []

        self.waiter.wait(Soon(), CALL)


@pytest.mark.parametrize("other", [BUSY], indirect=True)
def test_who_computes_is_waited_for_and_then_named(other: subprocess.Popen[bytes], tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.wait(5 * TIMEOUT_S)
    ((when_s, text),) = told.texts
    assert when_s > 3 * TIMEOUT_S
    assert text.endswith("not here yet: rank 1. Rank 1 is still starting.")


@pytest.mark.parametrize("other", [BUSY], indirect=True)
def test_who_is_stopped_meanwhile_is_named_soon(other: subprocess.Popen[bytes], tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.wait(1.5 * TIMEOUT_S)
    assert not told.texts
    assert not (tmp_path / "stall.json").exists()
    other.send_signal(signal.SIGSTOP)
    told.wait(3.2 * TIMEOUT_S)
    assert told.texts[0][1].endswith("Rank 1 is paused (SIGSTOP).")
    assert json.loads((tmp_path / "stall.json").read_text())["culprits"][0]["reason"] == "paused"


@pytest.mark.slow
@pytest.mark.parametrize("other", [IDLE], indirect=True)
def test_who_sleeps_is_named_after_the_timeout(other: subprocess.Popen[bytes], tmp_path: Path) -> None:
    told = Told(tmp_path)
    time.sleep(1)  # it has started
    told.roll.investigate(CALL, 0.0, "")
    told.wait(3 * TIMEOUT_S)
    assert told.texts[0][1].endswith("Rank 1 runs, and uses no processor.")


@pytest.mark.parametrize("other", [BUSY], indirect=True)
def test_who_is_dead_is_not_waited_for(other: subprocess.Popen[bytes], tmp_path: Path) -> None:
    told = Told(tmp_path)
    other.kill()
    with pytest.raises(WorkerLostError, match="Rank 1 has ended"):
        told.wait(5 * TIMEOUT_S)


def test_of_whom_nothing_is_known_is_named_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFBEAT_WORKERS", raising=False)
    told = Told(tmp_path)
    told.wait(1.2 * TIMEOUT_S)
    ((_, text),) = told.texts
    assert text.endswith("not here yet: rank 1. They may still load, have died, or never reach that line.")
