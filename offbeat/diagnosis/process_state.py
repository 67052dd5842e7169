"""The kernel's view of a process: running, paused or dead, and how much it computes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessSample:
    """One look at a process.

    Args:
        state: "running", "paused" or "dead".
        cpu_s: processor seconds it has used so far.
    """

    state: str
    cpu_s: float


def glance(pid: int) -> ProcessSample:
    """Look at process `pid`; a zombie is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessSample("dead", 0.0)
    fields = stat.rpartition(")")[2].split()
    letter, cpu_s = fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    if letter in "ZX":
        return ProcessSample("dead", cpu_s)
    # T: stopped by a signal, t: by a debugger.
    return ProcessSample("paused" if letter in "Tt" else "running", cpu_s)


def catches(pid: int, number: int) -> bool:
    """Whether process `pid` has a handler for signal `number`; without one most signals would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


class CpuShare:
    """The share of a core that a process has used over about the last second."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, float]] = []

    def share(self, now_s: float, cpu_s: float) -> float:
        """Processor seconds per second, since about a second ago."""
        self._looks.append((now_s, cpu_s))
        while len(self._looks) > 2 and self._looks[1][0] < now_s - 1.0:
            self._looks.pop(0)
        first_s, first_cpu_s = self._looks[0]
        return (cpu_s - first_cpu_s) / (now_s - first_s) if now_s > first_s else 0.0
