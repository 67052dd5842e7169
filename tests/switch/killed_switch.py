"""A switch as a process of its own, which a test kills and starts again at the same address."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType


class KilledSwitch:
    """`offbeat switch serve` on loopback. Use it as a context manager.

    Args:
        interfaces: of the kernel's switch; none for one in software.
        timeout_s: for which a link may be silent.
    """

    def __init__(self, interfaces: Sequence[str] = (), timeout_s: float = 5.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "offbeat", "switch", "serve", "--port", str(port)]
        self._command += ["--timeout", str(timeout_s)]
        if interfaces:
            self._command += ["--target", "ebpf", "--interfaces", ",".join(interfaces)]

    def start(self) -> None:
        """Start it, and wait until it takes links."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert "summing at" in said, said

    def kill(self) -> None:
        """Kill it as the kernel does when memory is short."""
        self._end(signal.SIGKILL)

    def stand_still(self, seconds: float) -> None:
        """Stop it for some time."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill it, and start it again."""
        self.kill()
        self.start()

    def renew(self) -> None:
        """End it as an operator does, and start it again."""
        self._end(signal.SIGTERM)
        self.start()

    @contextlib.contextmanager
    def struck_at(self, mark: Path, strike: Callable[[], None]) -> Iterator[None]:
        """Strike when a file comes to be there, which has to happen meanwhile."""
        is_over, has_struck = threading.Event(), threading.Event()

        def watch() -> None:
            while not mark.exists():
                if is_over.wait(0.005):
                    return
            strike()
            has_struck.set()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        assert has_struck.is_set(), f"nobody came to {mark}"

    def __enter__(self) -> KilledSwitch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
            self.process.communicate()
