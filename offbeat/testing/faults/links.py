"""Faults of links: every shard is dialled through a proxy beside this worker, which does to the bytes what is asked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fault_spec import Fault

_PROGRAM = str(Path(__file__).resolve().parent.parent / "chaos_proxy.py")
_SERVERS = "OFFBEAT_SERVERS"
_FIRED = b"fired\n"


class Proxies:
    """One for each shard; they end with this process.

    Args:
        folder: for their sockets, which those of all workers share.
        rank: this worker's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)
        self._processes = []
        addresses = []
        for shard, target in enumerate(os.environ[_SERVERS].split(",")):
            process = subprocess.Popen(
                [sys.executable, "-S", "-I", _PROGRAM, str(self._socket(rank, shard)), target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdout is not None
            addresses.append(process.stdout.readline().decode().strip())
            self._processes.append(process)
        os.environ[_SERVERS] = ",".join(addresses)

    def strike(self, fault: Fault, note: Callable[[], None]) -> None:
        """Have it done: to this worker's links, or to those of all workers to one shard.

        Args:
            note: called when it has happened; on another thread, if nothing that it could happen to has passed yet.
        """
        last = len(self._processes) - 1
        if fault.target == "worker":
            sockets = [self._socket(self._rank, shard) for shard in range(last + 1)]
        else:
            shard = 0 if fault.target == "coordinator" else last
            sockets = sorted(self._folder.glob(f"*-{shard}"))
        order = json.dumps({"kind": fault.kind, "seconds": fault.seconds, "factor": fault.factor}).encode() + b"\n"
        told = [_send(path, order) for path in sockets]
        if any(answer.readline() == _FIRED for answer in told):
            note()
            return

        def wait() -> None:
            if any(answer.readline() == _FIRED for answer in told):
                note()

        threading.Thread(target=wait, name="offbeat-faults", daemon=True).start()

    def _socket(self, rank: int, shard: int) -> Path:
        return self._folder / f"{rank}-{shard}"


def _send(path: Path, order: bytes) -> IO[bytes]:
    """Give a proxy an order; where it answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(order)
        return connection.makefile("rb")
