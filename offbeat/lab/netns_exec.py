"""Run a program inside a network namespace, and end it with its parent.

    netns_exec.py PARENT_PID NAMESPACE PROGRAM [ARGS]

`NAMESPACE` may be `-`: stay where we are. So may `PARENT_PID`: whoever starts it. Started by its path, without the
package, so that it costs milliseconds.
Where the lab has made a cgroup with the name of the namespace (`memory_cgroup`), the program is in that.
The kernel sends SIGKILL when the parent dies (PR_SET_PDEATHSIG), which no crash of the lab can forget to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
CGROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
"""Where memory is limited: version 1, version 2."""


def main(arguments: list[str]) -> None:
    """Become the program; never returns."""
    parent, namespace, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "Cannot tie this process to its parent (PR_SET_PDEATHSIG)")
    if parent != "-" and os.getppid() != int(parent):
        # The parent died before the line above: no signal will ever come.
        sys.exit(f"the parent {parent} is gone")
    if namespace != "-":
        for folder in CGROUPS:
            with contextlib.suppress(FileNotFoundError), open(f"{folder}/{namespace}/cgroup.procs", "r+") as processes:
                processes.write("0")
        handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"Cannot enter the network namespace {namespace}")
        os.close(handle)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
