"""The memory that a host's processes may use: a cgroup with the name of the host's network namespace.

A process that enters the namespace (`netns_exec`) enters the cgroup as well, with all that it starts. When the
processes of a host use more, the kernel kills one of them, as it would on a machine of that size. Files in the page
cache count, too, but leave it before anything is killed. Nothing is swapped, where the kernel counts that.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from offbeat.errors import NetworkError
from offbeat.lab.netns_exec import CGROUPS

_V1, _V2 = map(Path, CGROUPS)
_ENDING_S, _LOOK_S = 2.0, 0.02


def check() -> None:
    """Make a cgroup and remove it, to see whether this machine limits memory.

    Raises:
        NetworkError: if it does not.
    """
    name = f"offbeat-{os.getpid()}-trial"
    make(name, 1000)
    remove(name)


def make(name: str, memory_mb: int) -> None:
    """Make the cgroup of a host.

    Args:
        name: of its network namespace.
        memory_mb: in 10^6 bytes.

    Raises:
        NetworkError: if the kernel has no memory controller, or it cannot be used from here.
    """
    folder, size = _hierarchy() / name, str(memory_mb * 10**6)
    try:
        if folder.parent == _V2:
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        limit, swap = ("max", "swap.max") if folder.parent == _V2 else ("limit_in_bytes", "memsw.limit_in_bytes")
        (folder / f"memory.{limit}").write_text(size)
        if (folder / f"memory.{swap}").exists():  # v1 counts memory and swap together
            (folder / f"memory.{swap}").write_text("0" if folder.parent == _V2 else size)
    except OSError as error:
        remove(name)
        raise NetworkError(
            f"Cannot limit the memory of a host: {folder.parent} cannot be changed ({error.strerror}). Run where it "
            "can, as on the machine itself and not in a container, or leave out memory_mb (host.memory_mb)."
        ) from error


def remove(name: str) -> None:
    """Remove the cgroup of a host, if there is one, once its processes have ended."""
    deadline_s = time.monotonic() + _ENDING_S
    for folder in (_V1 / name, _V2 / name):
        while folder.is_dir() and time.monotonic() < deadline_s:
            with suppress(OSError):  # a process that was killed a moment ago is still in it
                folder.rmdir()
                break
            time.sleep(_LOOK_S)


def has_killed(name: str | None) -> bool:
    """Return whether the kernel has killed a process in this namespace for want of memory."""
    for path in (_V1 / str(name) / "memory.oom_control", _V2 / str(name) / "memory.events"):
        with suppress(OSError):
            return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in path.read_text().splitlines())
    return False


def _hierarchy() -> Path:
    """Return the folder in which the kernel limits memory."""
    if (_V1 / "memory.limit_in_bytes").exists():
        return _V1
    with suppress(OSError):
        if "memory" in (_V2 / "cgroup.controllers").read_text().split():
            return _V2
    raise NetworkError(
        f"Cannot limit the memory of a host: there is no memory controller of cgroups, neither in {_V1} (version 1) "
        f"nor in {_V2} (version 2). Mount one, or leave out memory_mb (host.memory_mb)."
    )
