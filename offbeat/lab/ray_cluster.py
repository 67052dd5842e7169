"""A Ray cluster with one node on each host of a lab, for rows in which Ray does the work.

All processes of a lab have one disk, and nodes that start at the same moment take each other's files there, so they
start one after another. On a busy machine a node often does not come up; then it is started again, and says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

_PORT = 6379
_ATTEMPTS, _START_S, _LOOK_S = 3, 60.0, 0.1
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # While nodes start on few cores, others answer the head late; by default they would count as lost.
    "RAY_health_check_initial_delay_ms": "600000",
    "RAY_health_check_timeout_ms": "120000",
    "RAY_health_check_period_ms": "60000",
}


def resource(rank: int) -> str:
    """The custom resource that only the node of this rank has, so that an actor can be put there."""
    return f"rank{rank}"


@contextmanager
def node(
    store: Store, *, rank: int, world: int, head: str, own: str = "", memory_mib: int = 100, cpus: int = 1
) -> Iterator[None]:
    """Make this host a node of a cluster while the block runs; every rank calls this, and goes on when all are there.

    Rank 0 has the head, and is connected to it by `ray.init`. It ends last, so the store may live in its process.

    Args:
        store: by which the ranks agree; every key of this module begins with "ray/".
        head: the address of rank 0's host.
        own: that of this host; "" for the one by which it reaches the head.
        memory_mib: for the objects of each node.
        cpus: that each node has.

    Raises:
        NetworkError: if a node does not start.
    """
    os.environ |= _ENVIRONMENT
    own = own or _own_address(head)
    address = f"{head}:{_PORT}"
    rest = ["--block", f"--node-ip-address={own}", f"--num-cpus={cpus}", f'--resources={{"{resource(rank)}": 1000}}']
    rest += [f"--object-store-memory={memory_mib << 20}", "--disable-usage-stats"]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        if rank == 0:
            joins = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
        else:
            joins = [f"--address={address}"]
            store.wait([f"ray/turn/{rank}"])
        process = _start([*joins, *rest], own, lambda: _is_up(store, rank, address))
        try:
            if rank == 0:
                _gather(store, world, address, own)
            store.wait(["ray/ready"])
            yield
            store.add("ray/left", 1)
            while rank == 0 and store.add("ray/left", 0) < world:
                time.sleep(_LOOK_S)
        finally:
            if rank == 0:
                import ray

                ray.shutdown()
            _kill(process)  # it would take half a minute to end in order


def _own_address(head: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((head, 9))
        return str(route.getsockname()[0])


def _start(arguments: list[str], own: str, is_up: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
    for attempt in range(1, 1 + _ATTEMPTS):
        process = subprocess.Popen(command, start_new_session=True)
        until_s = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < until_s:
            if is_up():
                return process
            time.sleep(_LOOK_S)
        _kill(process)
        sys.stderr.write(f"The Ray node at {own} has not started (attempt {attempt} of {_ATTEMPTS}).\n")
    raise NetworkError(
        f"Cannot start a Ray node at {own}: it failed {_ATTEMPTS} times. Close other programs: on a busy machine its "
        "processes do not find each other in time."
    )


def _is_up(store: Store, rank: int, address: str) -> bool:
    if rank:
        return store.check([f"ray/joined/{rank}"])
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def _gather(store: Store, world: int, address: str, own: str) -> None:
    """Connect to the head, and have the others join one after another."""
    import ray

    ray.init(address, log_to_driver=False, _node_ip_address=own)
    for rank in range(1, world):
        store.set(f"ray/turn/{rank}", "")
        until_s = time.monotonic() + _ATTEMPTS * _START_S
        while not any(one["Alive"] and resource(rank) in one["Resources"] for one in ray.nodes()):
            if time.monotonic() > until_s:
                raise NetworkError(f"Cannot start a Ray cluster: the node of rank {rank} has not joined.")
            time.sleep(_LOOK_S)
        store.set(f"ray/joined/{rank}", "")
    store.set("ray/ready", "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
