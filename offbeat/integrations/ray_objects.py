"""Stores of objects on a Ray cluster, one on each node, for tasks and actors that hand each other tensors by name.

    ray.init()
    start_stores()                                       # once, in the driver
    ...
    with ray_objects.connect() as client:                # in any task or actor, on any node
        weights = client.get("weights", version=7)

Named, detached actors look after the stores: one on each node, which has `offbeat objects serve` as its child, and one
that hands out the token and the addresses of the directories. They outlive the job that started them, and end with the
cluster or by `stop_stores`. A node that joins later gets its store when a task on it connects for the first time.

Whoever may use the Ray cluster gets the token from that actor, so the stores are as open as the cluster is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.diagnosis.process_state import glance
from offbeat.errors import NetworkError
from offbeat.objects import client as clients
from offbeat.objects.local_store import TOKEN_VARIABLE
from offbeat.wire.credentials import Token

if TYPE_CHECKING:
    from offbeat.objects.client import ObjectClient

NAMESPACE = "offbeat"
"""The Ray namespace in which the actors have their names, whatever the namespace of the job is."""
_KEEPER_S = 30.0  # for a store to say where it serves
# The store dies with the actor's process, also where that is killed. The token is in the environment.
_CHILD = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv.pop(1)):
    runpy.run_module("offbeat", run_name="__main__", alter_sys=True)
"""


class StoreSettings(NamedTuple):
    """The settings that all stores of a job share.

    Args:
        job: of the stores.
        token: that stores and clients prove to each other.
        memory_mib: of each store.
        directories: the Ray nodes that keep a directory, with its "host:port".
    """

    job: str
    token: str
    memory_mib: int
    directories: tuple[tuple[str, str], ...] = ()


class StoreRegistry:
    """A named actor that tells tasks how to reach the stores of a job.

    Args:
        job, memory_mib: as of `StoreSettings`.
        directories: how many nodes keep a directory.
    """

    def __init__(self, job: str, memory_mib: int, directories: int) -> None:
        self._settings = StoreSettings(job, secrets.token_hex(32), memory_mib)
        self._directories = directories
        self._groups: dict[str, tuple[int, int, set[int]]] = {}

    def settings(self) -> tuple[StoreSettings, int]:
        """The settings, and how many directories are wanted."""
        return self._settings, self._directories

    def agree(self, directories: tuple[tuple[str, str], ...]) -> StoreSettings:
        """Note which nodes keep the directories, unless another caller has said so; the settings."""
        if not self._settings.directories:
            self._settings = self._settings._replace(directories=directories)
        return self._settings

    def join_group(self, name: str, world: int, rank: int) -> int:
        """Number a collective group among those that have had its name.

        A rank that is already in the newest one, or another size, begins the next.
        """
        number, size, ranks = self._groups.get(name, (0, 0, set()))
        if rank in ranks or size != world:
            number, ranks = number + 1, set()
        self._groups[name] = number, world, ranks | {rank}
        return number


class StoreKeeper:
    """A named actor that looks after the store of its Ray node."""

    def __init__(self) -> None:
        self._settings: StoreSettings | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=20)
        self._address = ""
        self._said = threading.Event()

    def free_address(self) -> str:
        """An address on this node that nobody uses just now, for its directory."""
        host = _ray().util.get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return f"{host}:{server.getsockname()[1]}"

    def serve(self, settings: StoreSettings) -> tuple[str, str]:
        """Have the store run, if it does not; "host:port" for clients on this node, or "" and why there is none."""
        if settings == self._settings and self._is_serving():
            return self._address, ""
        self.stop()
        self._settings, self._address = settings, ""
        self._said.clear()
        self._lines.clear()
        ray = _ray()
        directories = [address for _, address in settings.directories]
        own = dict(settings.directories).get(ray.get_runtime_context().get_node_id(), "")
        options = ["--bind", ray.util.get_node_ip_address(), "--job", settings.job]
        options += ["--memory-mib", str(settings.memory_mib), "--directories", ",".join(directories)]
        if own:
            options += ["--directory", "--directory-port", own.rpartition(":")[2]]
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(os.getpid()), "objects", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                TOKEN_VARIABLE: settings.token,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        self._said.wait(_KEEPER_S)
        if self._address:
            return self._address, ""
        self.stop()
        last = next((line.strip() for line in reversed(self._lines) if line.strip()), "")
        said = re.sub(r"^(Error|offbeat): ", "", last)
        return "", f"its last line was: {said}" if said else f"it has said nothing within {_KEEPER_S:g} s."

    def stop(self) -> None:
        """End the store."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._settings = None

    def _is_serving(self) -> bool:
        # One that was killed is dead to the kernel before all of its threads have ended, and it can be waited for.
        return self._process is not None and bool(self._address) and glance(self._process.pid).state != "dead"

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._lines.append(line)
                if found := re.search(r"OFFBEAT_OBJECTS=(\S+);", line):
                    self._address = found[1]
                    self._said.set()
                else:
                    sys.stderr.write(line)  # to Ray's logs
        self._said.set()


def start_stores(
    *, directories: int = 1, memory_mib: int = 1024, job: str = "default", timeout: float = 60.0
) -> dict[str, str]:
    """Have a store run on each node of the Ray cluster; those that run already stay.

    Args:
        directories: how many nodes keep a directory, this one first.
        memory_mib: MiB for the objects of each node.
        job: of the stores; those of another one know nothing of these.
        timeout: in seconds, for a store to start.

    Returns:
        By Ray node, the address at which its tasks find the store, which `connect` finds by itself.

    Raises:
        NetworkError: if Ray is missing or not initialised, a store could not start, or stores of this job run with
            other settings.
    """
    ray = _initialised("start stores of objects")
    here = ray.get_runtime_context().get_node_id()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda node: (node != here, node))
    if not 1 <= directories <= len(nodes):
        raise NetworkError(
            f"Cannot keep {directories} directories: one to {len(nodes)} can be kept, as many as Ray has nodes."
        )
    registry = _named(StoreRegistry, f"{job}/registry", here, job, memory_mib, directories)
    settings, wanted = _answer(registry.settings.remote(), "start stores of objects", timeout)
    if (settings.memory_mib, wanted) != (memory_mib, directories):
        raise NetworkError(
            f"Cannot start stores of {memory_mib} MiB with directories={directories}: those of job {job!r} have "
            f"{settings.memory_mib} MiB, with directories={wanted}. Call stop_stores() before, or name another job."
        )
    if not settings.directories:
        keepers = [(node, _named(StoreKeeper, f"{job}/{node}", node)) for node in nodes[:directories]]
        free = [(node, keeper.free_address.remote()) for node, keeper in keepers]
        found = tuple((node, _answer(address, _on(node), timeout)) for node, address in free)
        settings = _answer(registry.agree.remote(found), "start stores of objects", timeout)
    answers = {node: _named(StoreKeeper, f"{job}/{node}", node).serve.remote(settings) for node in nodes}
    return {node: _address(answer, node, timeout) for node, answer in answers.items()}


def connect(*, job: str = "default", timeout: float = 60.0) -> ObjectClient:
    """Use the store of this node, in the driver and in any task or actor; a node without one gets it now.

    Args:
        job: of the stores.
        timeout: in seconds, for the store to start, if it does not run.

    Raises:
        NetworkError: if Ray is missing or not initialised, nobody has called `start_stores`, or the store cannot start
            or be reached.
    """
    ray = _initialised("connect to a store of objects")
    settings, _ = _answer(registry_of(job).settings.remote(), "connect to a store of objects", timeout)
    if not settings.directories:
        raise NetworkError(f"Cannot connect to the stores of job {job!r}: start_stores() has not returned yet.")
    node = ray.get_runtime_context().get_node_id()
    answer = _named(StoreKeeper, f"{job}/{node}", node).serve.remote(settings)
    return clients.connect(_address(answer, node, timeout), job=job, credentials=Token(settings.token.encode()))


def stop_stores(*, job: str = "default", timeout: float = 20.0) -> None:
    """End the stores of a job on all nodes, with their objects; does nothing where there are none.

    Raises:
        NetworkError: if Ray is missing or not initialised.
    """
    ray = _initialised("stop stores of objects")
    names = [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]
    actors = {}
    for name in names:
        if name.startswith(f"{job}/"):
            with contextlib.suppress(ValueError):  # it has just ended
                actors[name] = ray.get_actor(name, namespace=NAMESPACE)
    stopped = [actor.stop.remote() for name, actor in actors.items() if name != f"{job}/registry"]
    if stopped:
        ray.wait(stopped, num_returns=len(stopped), timeout=timeout)
    for actor in actors.values():
        ray.kill(actor)
    until_s = time.monotonic() + timeout
    while time.monotonic() < until_s and set(actors) & {
        found["name"] for found in ray.util.list_named_actors(all_namespaces=True)
    }:
        time.sleep(0.05)


def registry_of(job: str) -> Any:
    """The actor that knows the stores of a job.

    Raises:
        NetworkError: if there is none.
    """
    try:
        return _ray().get_actor(f"{job}/registry", namespace=NAMESPACE)
    except ValueError as error:
        raise NetworkError(
            f"Cannot find stores of job {job!r} on this Ray cluster: call start_stores() in the driver first."
        ) from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise NetworkError(
            "Cannot use stores of objects on Ray: it is not installed. Run pip install 'offbeat[rdt]'."
        ) from error
    return ray


def _initialised(what: str) -> Any:
    ray = _ray()
    if not ray.is_initialized():
        raise NetworkError(f"Cannot {what} on Ray: it is not initialised in this process. Call ray.init() first.")
    return ray


def _named(kind: type, name: str, node: str, *arguments: object) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        _ray()
        .remote(kind)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1 if kind is StoreKeeper else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(*arguments)
    )


def _on(node: str) -> str:
    return f"start the store of objects on Ray node {node[:12]}"


def _address(answer: Any, node: str, timeout: float) -> str:
    address, error = _answer(answer, _on(node), timeout)
    if not address:
        raise NetworkError(f"Cannot {_on(node)}: {error}")
    return str(address)


def _answer(reference: Any, what: str, timeout: float) -> Any:
    ray = _ray()
    try:
        return ray.get(reference, timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise NetworkError(
            f"Cannot {what}: the actor that looks after it has not answered in {timeout:g} s."
        ) from error
    except ray.exceptions.RayError as error:
        raise NetworkError(f"Cannot {what}: {str(error).splitlines()[0].rstrip('.')}.") from error
