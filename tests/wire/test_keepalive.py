"""Whether the machine of a silent peer still answers: of a process that is stopped, killed, or cut off."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from offbeat.wire.keepalive import KeepaliveProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LISTENS = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(60)
"""
# Two that have met in a network of their own, which is then cut.
_CUT = """
import asyncio, subprocess, sys, time
from tests.wire.meshes import meshes

async def story():
    async with meshes(2, timeout_s=2.0) as (made, _):
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        began_s = time.monotonic()
        while not all(one.lost for one in made):
            await asyncio.sleep(0.02)
        print(time.monotonic() - began_s)

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
asyncio.run(asyncio.wait_for(story(), 15))
"""


@contextmanager
def listening() -> Iterator[tuple[subprocess.Popen[str], KeepaliveProbe]]:
    with subprocess.Popen([sys.executable, "-c", _LISTENS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        probe = KeepaliveProbe(f"127.0.0.1:{process.stdout.readline().strip()}")
        try:
            yield process, probe
        finally:
            probe.close()
            process.kill()


def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_machine_of_a_stopped_process_answers() -> None:
    with listening() as (process, probe):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: math.isfinite(probe.look()))
        end_s = time.monotonic() + 3.0
        while time.monotonic() < end_s:
            assert probe.look() < 1.8
            assert not probe.has_ended
            time.sleep(0.05)


def test_the_end_of_a_stopped_process_is_noticed() -> None:
    with listening() as (process, probe):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: math.isfinite(probe.look()))
        process.kill()
        until(lambda: math.isinf(probe.look()), 1.0)
        assert probe.has_ended


def test_where_nobody_listens_nobody_answers() -> None:
    """It proves nothing either: a firewall may refuse as well."""
    with listening() as (process, probe):
        process.kill()
        process.wait()
        for _ in range(20):
            assert math.isinf(probe.look())
            assert not probe.has_ended
            time.sleep(0.01)


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: builds a network namespace")
def test_a_cut_link_is_noticed_within_the_timeout() -> None:
    command = ["unshare", "--net", sys.executable, "-c", _CUT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 0, ended.stderr
    assert 1.0 < float(ended.stdout) < 4.0
