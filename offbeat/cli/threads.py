"""The number of threads that torch gets in each of several workers on one machine.

Left alone, torch takes a thread for every core in every process. Several workers then compete for the cores and wait
for each other's threads, which costs more than half of the speed (`make threads` measures it). So each worker gets its
share of the cores, unless the environment says how many threads there are to be; a script that calls
`torch.set_num_threads` has the last word. A shard of a server always computes on one thread.
"""

from __future__ import annotations

import os
from pathlib import Path

SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by either of them torch goes
_WORKER = b"\0-m\0offbeat.cli.worker_main\0"
_SENTINEL = b'run_module("offbeat.diagnosis"'  # one is a child of each worker, whoever started that


def share_of_cores(workers: int, others: int = 0) -> tuple[dict[str, str], str]:
    """The environment that each of several workers gets, and a sentence that says so.

    Both are empty for a single worker, and where the environment has said how many threads there are to be.

    Args:
        workers: how many are started.
        others: workers that run on this machine already.
    """
    if workers + others < 2 or any(os.environ.get(name) for name in SAID):
        return {}, ""
    cores = usable_cores()
    threads = max(1, cores // (workers + others))
    # Those that run already are of whatever job: they compete for the same cores.
    who = f"{workers + others} workers" + (
        f" of all jobs on this machine, {others} of which run already," if others else ""
    )
    each = "one torch thread" if threads == 1 else f"{threads} torch threads"
    where = f"{cores} core{'s' if cores > 1 else ''}"
    return {"OMP_NUM_THREADS": str(threads)}, f"{who} on {where}: {each} each; OMP_NUM_THREADS chooses another number."


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those of its affinity, or fewer if the quota of its cgroup is less.

    Args:
        root: where /proc and /sys are.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return cores
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            cores = min([cores, *_quotas(root / "sys/fs/cgroup", controllers, Path(path.lstrip("/")))])
    return max(1, cores)


def _quotas(mount: Path, controllers: str, path: Path) -> list[int]:
    """Whole cores that a cgroup and those around it allow, as far as they say.

    Args:
        controllers: of version 1, such as "cpu,cpuacct"; empty for version 2.
    """
    found = []
    for folder in (path, *path.parents):  # in a container the path may be the host's: its own is the outermost
        try:
            if controllers:
                group = mount / "cpu" / folder
                limit, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
            else:
                limit, period = (mount / folder / "cpu.max").read_text().split()
            if limit != "max" and int(limit) > 0:
                found.append(int(limit) // int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return found


def workers_here() -> set[int]:
    """The pids of the workers of offbeat on this machine, of whatever job and whoever started them."""
    workers = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            if _WORKER in command:
                workers.add(int(entry.name))
            elif _SENTINEL in command:
                workers.add(int((entry / "stat").read_text().rpartition(")")[2].split()[1]))
        except OSError:  # it has just ended
            continue
    return workers - {1}  # a sentinel may outlive its worker
