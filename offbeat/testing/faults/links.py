"""Faults of links: whoever dials does so through a proxy beside it, which does to the bytes what is asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from offbeat.wire.mesh import PeerMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

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
        targets = os.environ[_SERVERS].split(",")
        self._last = len(targets) - 1
        started = [_start(folder / f"{rank}-{shard}", target) for shard, target in enumerate(targets)]
        self._processes = [process for process, _ in started]
        os.environ[_SERVERS] = ",".join(address for _, address in started)

    def strike(self, fault: Fault, note: Callable[[], None]) -> None:
        """Have it done: to this worker's links, or to those of all workers to one shard.

        Args:
            note: called when it has happened; on another thread, if nothing that it could happen to has passed yet.
        """
        if fault.target == "worker":
            sockets = [self._folder / f"{self._rank}-{shard}" for shard in range(self._last + 1)]
        else:
            shard = 0 if fault.target == "coordinator" else self._last
            sockets = sorted(self._folder.glob(f"*-{shard}"))
        _strike(fault, sockets, note)


class PeerProxies:
    """One for each link between workers that this one dials (`PeerMesh`); they end with this process.

    Args:
        folder, rank: as of `Proxies`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._numbers = folder, rank, itertools.count()
        self._processes: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)
        dial = PeerMesh._dial

        async def dial_proxy(mesh: PeerMesh, other: int, address: str, patience: timedelta) -> None:
            path = folder / f"{rank}-to-{other}-{next(self._numbers)}"
            process, proxy = await asyncio.to_thread(_start, path, address)
            self._processes.append(process)
            await dial(mesh, other, proxy, patience)

        PeerMesh._dial = dial_proxy  # type: ignore[method-assign, assignment]

    def strike(self, fault: Fault, note: Callable[[], None]) -> None:
        """Have it done to all links of this worker; see `Proxies.strike`."""
        mine = (*self._folder.glob(f"{self._rank}-to-*"), *self._folder.glob(f"*-to-{self._rank}-*"))
        _strike(fault, sorted(mine), note)


def _start(path: Path, target: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a proxy that takes orders at a socket; returns where it is dialled, too."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-I", _PROGRAM, str(path), target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().decode().strip()


def _strike(fault: Fault, sockets: Iterable[Path], note: Callable[[], None]) -> None:
    """Give all of these proxies the order; see `Proxies.strike`."""
    order = json.dumps({"kind": fault.kind, "seconds": fault.seconds, "factor": fault.factor}).encode() + b"\n"
    told = []
    for path in sockets:
        with suppress(ConnectionRefusedError):  # its worker is gone
            told.append(_send(path, order))
    if _FIRED in [answer.readline() for answer in told]:
        note()
        return

    def wait() -> None:
        if any(answer.readline() == _FIRED for answer in told):
            note()

    threading.Thread(target=wait, name="offbeat-faults", daemon=True).start()


def _send(path: Path, order: bytes) -> IO[bytes]:
    """Give a proxy an order; where it answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(order)
        return connection.makefile("rb")
