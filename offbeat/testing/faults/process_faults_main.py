"""Strikes a process from outside: a program by itself, because who is struck can do nothing for a while.

    python process_faults_main.py PID KIND SECONDS FACTOR

KIND is one of `offbeat.fault_spec.Process`. It says "ready", waits for a line, strikes, and undoes it after SECONDS
where it lasts. Run by its path: it needs the standard library alone, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time

_MOMENT_S = 0.02


def strike(pid: int, kind: str, seconds: float, factor: float) -> None:
    """Do it, and undo it after `seconds` where it lasts."""
    if kind in ("sigkill", "sigterm"):
        os.kill(pid, signal.SIGKILL if kind == "sigkill" else signal.SIGTERM)
    elif kind == "sigstop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    elif kind == "slow":
        _slow(pid, seconds, factor)
    elif kind == "disk":
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        time.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _slow(pid: int, seconds: float, factor: float) -> None:
    """Let it run in one of `factor` moments."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_MOMENT_S * (factor - 1))
        os.kill(pid, signal.SIGCONT)
        time.sleep(_MOMENT_S)


def main(pid: int, kind: str, seconds: float, factor: float) -> None:
    """Be ready, then do it."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.readline():
        with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
            strike(pid, kind, seconds, factor)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
