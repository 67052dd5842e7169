"""A sentinel lives as long as its worker, and not longer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from offbeat.diagnosis.sentinel import STACK_SIGNAL
from offbeat.diagnosis.sentinel_client import SentinelClient
from offbeat.errors import NetworkError
from tests.cli.commands import alive, descendants

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER = """
import os, sys, time
from offbeat.diagnosis.sentinel_client import SentinelClient
watch = SentinelClient.start(rank=0, world=2, token=b"x" * 32, hub=None)
watch.say("computing", step=3)
print("ready", flush=True)
sys.stdin.read()
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    ["os.kill(os.getpid(), 9)", "os._exit(0)", "watch.close()", "os.fork() or time.sleep(30); os._exit(1)"],
    ids=["killed", "exits", "closes", "leaves a child behind that holds its sockets"],
)
def test_it_ends_with_its_worker(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER.format(end=end)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert worker.stdout.readline() == "ready\n"
        sentinels = {pid for pid in descendants(worker.pid) if "offbeat.diagnosis" in command_of(pid)}
        assert len(sentinels) == 1
        worker.stdin.close()
        deadline_s = time.monotonic() + 5
        while alive(sentinels) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not alive(sentinels)


def test_the_hub_stays_until_the_others_have_gone_if_they_go_on() -> None:
    text = WORKER.format(end="began_s = time.monotonic(); watch.close(); print(time.monotonic() - began_s, flush=True)")
    text = text.replace("hub=None)", "hub=None, stays_without_worker=True)")
    text = text.replace('"ready"', "watch.hub, watch._process.pid")
    command, pipe = [sys.executable, "-c", text], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        hub, pid = worker.stdout.readline().split()
        other = SentinelClient.start(rank=1, world=2, token=b"x" * 32, hub=hub)
        try:
            until(lambda: other.ask_all(timedelta(seconds=5)).hub_lost_s is None)
            worker.stdin.close()
            assert float(worker.stdout.readline()) < 2, "nobody waits for the others to go"
            assert worker.wait(5) == 0
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # as `offbeat run` does when it ends
            cluster = other.ask_all(timedelta(seconds=5))
            assert cluster.hub_lost_s is None
            assert cluster.words[0].phase == "finished"
            assert alive({int(pid)})
        finally:
            other.close()
    until(lambda: not alive({int(pid)}))


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


BUSY = """
import asyncio, threading
from offbeat.diagnosis.sentinel_client import SentinelClient

def go_deep(levels):
    return [go_deep(levels - 1) for _ in range(2)] if levels else [0]

async def take_turns():
    go_deep(6)
    await asyncio.sleep(0)

async def serve():
    while True:
        await asyncio.gather(*(take_turns() for _ in range(5)))

watch = SentinelClient.start(rank=0, world=2, token=b"x" * 32, hub=None)
threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
print("ready", flush=True)
while True:
    go_deep(8)
"""


def test_to_show_its_stack_does_not_end_a_worker_with_busy_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        for _ in range(500):
            os.kill(worker.pid, STACK_SIGNAL)
            time.sleep(0.001)
        assert worker.poll() is None
        worker.kill()


def command_of(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().replace("\0", " ")


def test_a_dead_sentinel_is_no_hang() -> None:
    watch = SentinelClient.start(rank=0, world=2, token=b"x" * 32, hub=None)
    try:
        assert len(watch.ask_all(timedelta(seconds=5)).words) == 2
        watch._process.kill()
        watch._process.wait()
        began_s = time.monotonic()
        with pytest.raises(NetworkError, match="sentinel"):
            watch.ask_all(timedelta(seconds=5))
        assert time.monotonic() - began_s < 1
        watch.say("computing", step=1)  # training goes on without
    finally:
        watch.close()


def test_a_hub_that_is_not_there() -> None:
    """The worker's own sentinel answers for itself."""
    watch = SentinelClient.start(rank=1, world=2, token=b"x" * 32, hub="127.0.0.1:9")
    try:
        cluster = watch.ask_all(timedelta(seconds=5))
        assert cluster.hub_lost_s is not None
        assert [words.rank for words in cluster.words] == [1]
    finally:
        watch.close()


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(NetworkError, match=r"control connection on 192\.0\.2\.1"):
        SentinelClient.start(rank=0, world=2, token=b"x" * 32, hub=None, bind="192.0.2.1")


def test_a_forked_child_is_not_the_worker() -> None:
    watch = SentinelClient.start(rank=0, world=2, token=b"x" * 32, hub=None)
    try:
        if (child := os.fork()) == 0:
            watch.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(watch.ask_all(timedelta(seconds=5)).words) == 2
    finally:
        watch.close()
