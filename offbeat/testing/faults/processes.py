"""Faults of a process: finds it, and has `process_faults_main.py` strike it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import ScenarioError

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.fault_spec import Fault

_PROGRAM = str(Path(__file__).resolve().with_name("process_faults_main.py"))
_LISTENS = "0A"


def strike(fault: Fault, pid: int, note: Callable[[int], None]) -> None:
    """Have a process struck.

    Args:
        note: writes down that it was; called with the process right before.
    """
    # A session of its own: who ends the worker's group shall not leave a process stopped for ever.
    helper = subprocess.Popen(
        [sys.executable, "-S", "-I", _PROGRAM, str(pid), fault.kind, str(fault.seconds), str(fault.factor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdout.readline()
    note(pid)
    helper.stdin.write(b"go\n")
    helper.stdin.close()
    helper.returncode = 0  # it may go on for long: nobody waits for it, and nobody is warned that nobody does
    if pid == os.getpid() and fault.kind in ("sigkill", "sigterm", "sigstop"):
        helper.stdout.read(1)  # not another step before it strikes; ends with the helper


def serves_at(address: str) -> int:
    """The process that listens at "host:port", in whichever network namespace.

    Raises:
        ScenarioError: if there is none that may be seen.
    """
    port = int(address.rpartition(":")[2])
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if b"offbeat.cli.shard_main" in (entry / "cmdline").read_bytes() and _holds(entry, _listening(entry, port)):
                return int(entry.name)
        except OSError:  # it has ended, or is somebody else's
            continue
    raise ScenarioError(
        f"Cannot strike the server at {address}: no shard that this user may see listens there. Run it on this "
        "machine, as this user (fault.target)."
    )


def _listening(process: Path, port: int) -> set[str]:
    """The sockets that listen at a port, where a process sees the network from."""
    found = set()
    for line in (process / "net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(f"socket:[{fields[9]}]")
    return found


def _holds(process: Path, sockets: set[str]) -> bool:
    return bool(sockets) and any(os.readlink(handle) in sockets for handle in (process / "fd").iterdir())
