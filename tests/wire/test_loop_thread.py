"""The loop of a training process, and links between processes that are stopped, killed and forked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import NetworkError
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.session import Limits
from tests.wire.peers import SOON, Taker, dial, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

# Another process with a link to the listener at the address given; it says when it has one.
WORKER = """
import asyncio, sys
from tests.wire.peers import dial
async def main():
    link = await dial(sys.argv[1])
    print("ready", flush=True)
    await link.ended
asyncio.run(main())
"""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


def test_coroutines_and_calls(loop: LoopThread) -> None:
    seen: list[int] = []
    for number in range(100):
        loop.call(seen.append, number)
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    assert seen == list(range(100)), "calls of one thread stay in order"
    with pytest.raises(ZeroDivisionError):
        loop.run(raising())


async def raising() -> None:
    raise ZeroDivisionError


def test_it_does_not_wait_for_itself(loop: LoopThread) -> None:
    async def inner() -> None:
        loop.run(asyncio.sleep(0))

    with pytest.raises(NetworkError, match="await the coroutine"):
        loop.run(inner())


def test_closing() -> None:
    loop = LoopThread("one that is closed")
    waited: list[NetworkError] = []

    def wait() -> None:
        with pytest.raises(NetworkError, match="the event loop was closed") as error:
            loop.run(asyncio.sleep(1000))
        waited.append(error.value)

    endless = threading.Thread(target=wait)
    endless.start()
    time.sleep(0.05)
    loop.close()
    endless.join(5)
    assert waited, "who waits is not left waiting"
    assert "one that is closed" not in {thread.name for thread in threading.enumerate()}
    loop.close()
    with pytest.raises(NetworkError, match="was closed"):
        loop.call(print)
    with pytest.raises(NetworkError, match="was closed"):
        loop.run(asyncio.sleep(0))


def test_links_of_a_training_process(loop: LoopThread) -> None:
    """Two loops in two threads, as a worker and its server would have."""

    async def serve() -> None:
        async with serving() as server:
            address.append(server.address)
            ready.set()
            while not (server.takers and server.one.losses):
                await asyncio.sleep(0.01)
            frames.extend(server.one.frames)

    address: list[str] = []
    frames: list[tuple[bytes, bytes]] = []
    ready = threading.Event()
    with LoopThread() as far:
        thread = threading.Thread(target=lambda: far.run(serve()))
        thread.start()
        assert ready.wait(5)
        link = loop.run(dial(address[0]))
        for number in range(50):
            loop.call(link.send, b"%d" % number, bytes(1000))
        loop.run(link.close())
        thread.join(5)
    assert [metadata for metadata, _ in frames] == [b"%d" % number for number in range(50)]


def test_a_forked_child_is_refused(loop: LoopThread) -> None:
    if (child := os.fork()) == 0:
        code = 1
        try:
            loop.run(asyncio.sleep(0))
        except NetworkError as error:
            code = 7 if "Open links of its own" in str(error) else 2
        loop.close()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert loop.run(asyncio.sleep(0, "still alive")) == "still alive"


def lost_after(fault: signal.Signals) -> tuple[float, Taker]:
    """Seconds from `fault`, which happens to a worker in a process of its own, until its link is lost."""

    async def story() -> tuple[float, Taker]:
        async with serving() as server:
            command = [sys.executable, "-c", WORKER, server.address]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
                assert worker.stdout is not None
                try:
                    ready = await asyncio.get_running_loop().run_in_executor(None, worker.stdout.readline)
                    assert ready == b"ready\n"
                    worker.send_signal(fault)
                    began_s = time.monotonic()
                    while not server.one.losses and time.monotonic() < began_s + 10:
                        await asyncio.sleep(0.01)
                    return time.monotonic() - began_s, server.one
                finally:
                    worker.kill()

    return asyncio.run(story())


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_worker_is_lost_in_time(fault: signal.Signals) -> None:
    took_s, taker = lost_after(fault)
    assert isinstance(taker.losses[0], NetworkError)
    if fault is signal.SIGSTOP:
        assert took_s < SOON.timeout.total_seconds() + 0.1
        assert "silent for 2 s; the connection was lost: nothing came over it" in str(taker.losses[0])
    else:
        assert took_s < 2 * SOON.grace.total_seconds()
        assert "it hung up, and was not back within 0.4 s" in str(taker.losses[0])


def test_time_in_which_this_process_was_stopped_is_no_silence() -> None:
    """The other side is as alive as ever; what it said waits in the kernel."""
    script = """
import asyncio, os, sys
from tests.wire.peers import Taker, dial
async def main():
    taker = Taker()
    link = await dial(sys.argv[1], taker)
    print("ready", flush=True)
    while not taker.losses and not taker.frames:
        await asyncio.sleep(0.01)
    print(taker.losses, taker.frames, flush=True)
    link.abort()
asyncio.run(main())
"""

    async def story() -> bytes:
        patient = Limits(timeout=timedelta(seconds=20))
        async with serving(limits=patient) as server:
            command = [sys.executable, "-c", script, server.address]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
                assert worker.stdout is not None
                executor = asyncio.get_running_loop().run_in_executor
                try:
                    assert await executor(None, worker.stdout.readline) == b"ready\n"
                    worker.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(SOON.timeout.total_seconds() + 0.3)
                    assert server.one.link is not None
                    server.one.link.send(b"welcome back")
                    worker.send_signal(signal.SIGCONT)
                    return await executor(None, worker.stdout.readline)
                finally:
                    worker.kill()

    assert asyncio.run(story()) == b"[] [(b'welcome back', b'')]\n"
