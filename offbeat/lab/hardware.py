"""The hardware and software that a result was measured on."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from offbeat.lab.link_shaping import CONGESTION_CONTROL

_PACKAGES = ("offbeat", "torch", "numpy", "msgspec", "pyroute2")


def versions() -> dict[str, str]:
    """Python and the packages that take part in a measurement."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def hardware() -> dict[str, str | int]:
    """Processor, cores that we may use, memory, kernel, and the TCP algorithm of the lab's hosts."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "congestion_control": CONGESTION_CONTROL,
        "slow_start_after_idle": 0,
    }


def date() -> str:
    """The present time, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line() -> str:
    """The command that was given, without the folder the program lies in."""
    name = Path(sys.argv[0]).name
    return " ".join(["python -m offbeat" if name == "__main__.py" else name, *sys.argv[1:]])


def _processor() -> str:
    with Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
