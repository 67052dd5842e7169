"""A small process beside each worker that can speak for it when it cannot.

    python -m offbeat.diagnosis SOCKET PAGE STACK      (three file descriptors, inherited from the worker)

The worker may be stopped, hold the GIL in C, or be dead: then no thread of it can answer. The sentinel loads no torch,
looks at the worker four times a second (its page of last words, and what the kernel says of the process), and tells the
hub. It ends with its worker: at once after a good-bye, else as soon as the others have had time to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from offbeat.diagnosis.hub import Hub, LocalHubClient
from offbeat.diagnosis.hub_client import HubClient
from offbeat.diagnosis.process_state import CpuShare, catches, glance
from offbeat.diagnosis.status_page import StatusPage
from offbeat.errors import NetworkError
from offbeat.protocol.worker_status import read_status
from offbeat.wire.message_stream import MessageStream
from offbeat.wire.messages import MAX_TEXT, AskRoster, Bye, ClusterReport, Config, SentinelReady, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from offbeat.protocol.worker_status import TrainingStatus

# Makes the worker write its stack, from C, whether or not it holds the GIL.
STACK_SIGNAL = signal.SIGRTMIN + 7

_LOOK_S = 0.25
_REPORT_S = 1.0
# Of the time its worker gives it for an answer; the rest is for the way back.
_PATIENCE = 0.8
_STACK_TRIES = 20


class HubAccess(Protocol):
    """The way a sentinel speaks to all: over the network, or to the hub in its own process."""

    def report(self, words: WorkerReport, status: TrainingStatus | None = None) -> None:
        """Say something about the worker, and perhaps how its training goes."""

    async def ask(self, stacks: tuple[int, ...]) -> tuple[WorkerReport, ...]:
        """The latest words of all ranks.

        Raises:
            NetworkError: if the hub is out of reach.
        """

    def last_heard(self) -> tuple[tuple[WorkerReport, ...], float]:
        """Last words that are known without the hub, and for how many seconds it has been lost."""

    async def leave(self, *, well: bool) -> None:
        """The worker is gone; `well` if that was to be expected."""


class Sentinel:
    """The watcher of one worker.

    Args:
        config: who it is.
        page: its last words.
        stack_fd: the file its stack is written to.
    """

    def __init__(self, config: Config, page: StatusPage, stack_fd: int) -> None:
        self._config, self._page, self._stack_fd = config, page, stack_fd
        self._busy = CpuShare()
        self._process, self._process_since_s = "running", time.monotonic()
        self.died = asyncio.Event()
        self.left = False  # said good-bye

    def look(self) -> WorkerReport:
        """Look at the worker now."""
        now_s = time.monotonic()
        seen = glance(self._config.pid)
        process = "dead" if self.died.is_set() else seen.state
        if process != self._process:
            self._process, self._process_since_s = process, now_s
        state = self._page.read()
        return WorkerReport(
            rank=self._config.rank,
            host=self._config.host,
            pid=self._config.pid,
            phase="finished" if self.left else state.phase,
            operation=state.operation,
            step=state.step,
            model=state.model,
            bucket=state.bucket,
            buckets=state.buckets,
            stamp=state.stamp,
            since_s=now_s - state.since_s if state.since_s else 0.0,
            process=process,
            state_since_s=now_s - self._process_since_s,
            heartbeat_age_s=now_s - self._page.heartbeat_s(),
            busy=self._busy.share(now_s, seen.cpu_s),
            traceback=self._page.text(),
        )

    def status(self) -> TrainingStatus | None:
        """The worker's training status, as it reports it; None if it has reported none that can be read."""
        data = self._page.status()
        return None if data is None else read_status(data)

    async def stack(self) -> str:
        """Make the worker write down where its threads are; "" if it is stopped, dead or ending."""
        pid = self._config.pid
        if self.died.is_set() or glance(pid).state != "running" or not catches(pid, STACK_SIGNAL):
            return ""
        os.ftruncate(self._stack_fd, 0)
        try:
            os.kill(pid, STACK_SIGNAL)
        except OSError:
            return ""
        size = -1
        for _ in range(_STACK_TRIES):
            await asyncio.sleep(0.02)
            before, size = size, os.fstat(self._stack_fd).st_size
            if size and size == before:
                break
        return os.pread(self._stack_fd, 4 * MAX_TEXT, 0).decode(errors="replace")[-MAX_TEXT:]


class Duty:
    """The work of a sentinel until its worker is gone: look and report, answer its questions, show its stack.

    Args:
        stream: to the worker.
        sentinel: looks at it.
        hub: to all sentinels.
    """

    def __init__(self, stream: MessageStream, sentinel: Sentinel, hub: HubAccess) -> None:
        self._stream, self._sentinel, self._hub = stream, sentinel, hub
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until the worker has died or said good-bye."""
        observer, listener = asyncio.create_task(self._observe()), asyncio.create_task(self._listen())
        await asyncio.wait({observer, listener}, return_when=asyncio.FIRST_COMPLETED)
        self._hub.report(self._sentinel.look(), self._sentinel.status())
        await self._hub.leave(well=self._sentinel.left)

    def show(self) -> None:
        """The worker's stack is wanted; it comes with the next report."""
        self._spawn(self._show())

    async def _show(self) -> None:
        stack = await self._sentinel.stack()
        self._hub.report(msgspec.structs.replace(self._sentinel.look(), stack=stack))

    async def _observe(self) -> None:
        told: tuple[object, ...] = ()
        told_s = status_s = 0.0
        died = self._sentinel.died
        while not died.is_set():
            words = self._sentinel.look()
            mark = (words.phase, words.operation, words.model, words.step, words.bucket, words.process)
            if mark != told or time.monotonic() - told_s > _REPORT_S:
                now_s = time.monotonic()
                is_due = now_s - status_s > _REPORT_S
                self._hub.report(words, self._sentinel.status() if is_due else None)
                told, told_s, status_s = mark, now_s, now_s if is_due else status_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(died.wait(), _LOOK_S)

    async def _listen(self) -> None:
        while (message := await self._stream.recv()) is not None:
            if isinstance(message, AskRoster):
                self._spawn(self._answer(message))
            elif isinstance(message, Bye):
                self._sentinel.left = message.well
                return
        # Closed without a good-bye: the worker is ending, or a child of it still holds the other end.
        await self._sentinel.died.wait()

    async def _answer(self, message: AskRoster) -> None:
        try:
            async with asyncio.timeout(_PATIENCE * message.patience_s):
                self._hub.report(self._sentinel.look())
                self._stream.send(ClusterReport(message.number, await self._hub.ask(message.stacks)))
        except (TimeoutError, NetworkError):
            heard, lost_s = self._hub.last_heard()
            self._stream.send(ClusterReport(message.number, (*heard, self._sentinel.look()), lost_s))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(stream: MessageStream, config: Config, page: StatusPage, stack_fd: int) -> None:
    """Be the sentinel of `config`'s worker until it is gone.

    Raises:
        NetworkError: if the hub cannot be opened.
    """
    sentinel = Sentinel(config, page, stack_fd)
    _watch_for_death(config.pid, sentinel.died)
    if config.hub is None:
        stays = config.stays_without_worker
        hub = Hub(token=config.token, world=config.world, grows=stays)
        stream.send(SentinelReady(hub=await hub.serve(config.bind)))
        host = Duty(stream, sentinel, LocalHubClient(hub, config.rank, stays_without_worker=stays))
        hub.on_show = host.show
        await host.run()
        return
    uplink = HubClient(config.hub, token=config.token, rank=config.rank)
    duty = Duty(stream, sentinel, uplink)
    uplink.on_show = duty.show
    stream.send(SentinelReady(hub=config.hub))
    connection = asyncio.create_task(uplink.run())
    try:
        await duty.run()
    finally:
        connection.cancel()


def _watch_for_death(pid: int, died: asyncio.Event) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        died.set()
        return
    loop = asyncio.get_running_loop()

    def on_death() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        died.set()

    loop.add_reader(pidfd, on_death)


async def main(socket_fd: int, page_fd: int, stack_fd: int) -> None:
    """Take the worker's `Config` from the socket and serve."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=socket_fd))
    stream = MessageStream(reader, writer, max_bytes=64 << 10)
    config = await stream.recv()
    if not isinstance(config, Config):
        return
    try:
        await serve(stream, config, StatusPage(page_fd), stack_fd)
    except NetworkError as error:
        stream.send(SentinelReady(error=str(error)))
    await stream.flush(0.2)
