"""A worker's handle on its sentinel."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.diagnosis.sentinel import STACK_SIGNAL
from offbeat.diagnosis.status_page import StatusPage
from offbeat.errors import NetworkError
from offbeat.wire.frame import Reader
from offbeat.wire.messages import AskRoster, Bye, ClusterReport, Config, Message, SentinelReady, pack, unpack

if TYPE_CHECKING:
    from datetime import timedelta

_TICK_S = 0.2
_START_S = 20.0
_END_S = 4.0
_LEFT_S = 0.25  # for the sentinel that others may still ask, to end because nobody is there
_MAX_PATIENCE_S = 60.0
_MAX_ROSTER_BYTES = 64 << 20
# The worker's own offbeat, wherever it was found, but nothing else from there ahead of Python's own modules: a script's
# folder may well hold a secrets.py.
PROGRAM = """
import runpy, sys
root = sys.argv.pop(1)
sys.path.insert(0, root)
import offbeat
sys.path.remove(root)
sys.path.append(root)
runpy.run_module("offbeat.diagnosis", run_name="__main__")
"""


class SentinelClient:
    """The worker's end of its sentinel: says where this worker is, and asks where the others are. Made by
    `SentinelClient.start`.
    """

    def __init__(
        self, page: StatusPage, link: socket.socket, process: subprocess.Popen[bytes], stack_fd: int, *, stays: bool
    ) -> None:
        self._page, self._link, self._process, self._stack_fd = page, link, process, stack_fd
        self._stays = stays  # the sentinel, with the hub, when this worker is gone
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._frames = Reader(max_metadata_bytes=_MAX_ROSTER_BYTES)
        self._heard: list[Message] = []
        self._number = 0
        self._closed = threading.Event()
        self.hub, self.token = "", b""
        self.say, self.say_status = page.say, page.say_status

    @classmethod
    def start(
        cls,
        *,
        rank: int,
        world: int,
        token: bytes,
        hub: str | None,
        bind: str = "127.0.0.1",
        host: str | None = None,
        stays_without_worker: bool = False,
    ) -> SentinelClient:
        """Start this worker's sentinel.

        Args:
            rank, world: worker `rank` of `world`.
            token: shared secret of the run.
            hub: "address:port" of rank 0's, or None to open it here (see `SentinelClient.hub` for where).
            bind: address to open it on.
            host: this machine's name, for people.
            stays_without_worker: the hub stays when this worker is lost, as long as another is connected.

        Raises:
            NetworkError: if the sentinel or the hub cannot be started.
        """
        ours, theirs = socket.socketpair()
        page = StatusPage()
        page.tick()
        stack_fd = _append_only_file()
        root = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-P", "-c", PROGRAM, *map(str, (root, theirs.fileno(), page.fd, stack_fd))]
        stays = hub is None and stays_without_worker
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), page.fd, stack_fd),
            env=_light_environment(),
            start_new_session=stays,  # else `offbeat run` ends it with its workers, and others may have joined these
        )
        theirs.close()
        watch = cls(page, ours, process, stack_fd, stays=stays)
        # A forked child is not the worker: what it says, no sentinel hears.
        os.register_at_fork(after_in_child=page.detach)
        # The kernel prefers the main thread, which shows itself. To walk the frames of another one while that runs is a
        # crash sooner or later: with two busy threads it came within ten signals.
        faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=False, chain=False)
        name = (host or socket.gethostname())[:256]
        config = Config(rank, world, os.getpid(), name, token, hub, bind, stays_without_worker)
        watch._begin(config)
        return watch

    def _begin(self, config: Config) -> None:
        self._link.sendall(pack(config))
        ready = self._hear(time.monotonic() + _START_S)
        if not isinstance(ready, SentinelReady) or ready.error:
            self.close()
            reason = ready.error if isinstance(ready, SentinelReady) else "it did not start"
            raise NetworkError(f"Cannot start the sentinel of rank {config.rank}: {reason}")
        self.hub, self.token = ready.hub, config.token
        threading.Thread(target=self._tick, name="offbeat-heartbeat", daemon=True).start()

    def ask_all(self, timeout: timedelta, stacks: tuple[int, ...] = ()) -> ClusterReport:
        """The last words of all workers; this worker's own sentinel answers for itself if the hub is out of reach.

        Args:
            timeout: how long to wait for the answer.
            stacks: ranks whose Python stack is wanted as well.

        Raises:
            NetworkError: if this worker's own sentinel is gone or does not answer in time, or this is a forked child.
        """
        if not self._owns():
            raise NetworkError("A forked child of a worker cannot ask about the others; let the worker itself ask.")
        with self._lock:
            self._number += 1
            patience_s = timeout.total_seconds()
            self._send(AskRoster(self._number, stacks, min(patience_s, _MAX_PATIENCE_S)))
            deadline_s = time.monotonic() + patience_s
            while True:
                message = self._hear(deadline_s)
                if message is None:
                    raise NetworkError("This worker's sentinel does not answer.")
                if isinstance(message, ClusterReport) and message.number == self._number:
                    return message

    def last_words(self, phase: str, text: str) -> None:
        """Write down the exception that ends this worker.

        Args:
            phase: "raised", or "lost" if it only ends because of another worker.
            text: the traceback.
        """
        if self._owns():
            self._page.last_words(phase, text)

    def close(self, *, well: bool = True) -> None:
        """Let the sentinel go; `well` if the worker is done, else its last words say why. Again does nothing.

        One with the hub in it stays until the others have gone, if they go on without this worker.
        """
        if self._closed.is_set() or not self._owns():
            return
        self._closed.set()
        with contextlib.suppress(NetworkError):
            self._send(Bye(well))
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        if self._stays:
            self._leave_behind()
            return
        # With the hub in it, it stays for a moment, so that the others can ask what happened.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()
        # Not before the sentinel has ended: without a handler its signal would end the worker.
        faulthandler.unregister(STACK_SIGNAL)
        self._link.close()
        self._page.close()
        os.close(self._stack_fd)

    def _leave_behind(self) -> None:
        """Let the sentinel be until all others have gone: without its hub nobody would know who else is lost."""
        # It may be about to signal this worker: the handler stays, and what that writes to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEFT_S)
        if self._process.returncode is None:
            threading.Thread(target=self._process.wait, name="offbeat-sentinel", daemon=True).start()
        self._link.close()
        self._page.close()

    def _owns(self) -> bool:
        return os.getpid() == self._pid  # a forked child of the worker is not the worker

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            self._page.tick()

    def _send(self, message: Message) -> None:
        try:
            self._link.settimeout(None)
            self._link.sendall(pack(message))
        except OSError as error:
            raise NetworkError("This worker's sentinel is gone.") from error

    def _hear(self, deadline_s: float) -> Message | None:
        while not self._heard:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            self._link.settimeout(left_s)
            try:
                size = self._link.recv_into(self._frames.get_buffer())
            except TimeoutError:
                return None
            except OSError:
                size = 0
            if not size:
                return None
            if self._frames.buffer_updated(size):
                while (frame := self._frames.next_frame()) is not None:
                    self._heard.append(unpack(frame))
        return self._heard.pop(0)


def _append_only_file() -> int:
    """Memory like a file; every write goes to its end, so that it can be cut to nothing from the other side."""
    fd = os.memfd_create("offbeat-stack")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _light_environment() -> dict[str, str]:
    """The sentinel's environment: nothing that makes its start slower or its memory larger."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
