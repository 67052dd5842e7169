"""Object operations on Dask (`distributed`): a worker on each host, a scheduler and a client on the first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from offbeat.lab.object_load import OPS, digest_of, numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

_PORT = 8786
_read: dict[str, tuple[float, Any]] = {}  # in each worker: what was read last, and when


def make(size_bytes: int, rank: int) -> np.ndarray[Any, Any]:
    """Return the array that a host gives."""
    array: np.ndarray[Any, Any] = numbers(size_bytes, rank).numpy()
    return array


def read(array: np.ndarray[Any, Any]) -> float:
    """Read an object; when its last element was read."""
    torch.from_numpy(array)[-1].item()
    _read["last"] = time.monotonic(), array
    return _read["last"][0]


def add(arrays: list[Any]) -> np.ndarray[Any, Any]:
    """Add objects; read the sum."""
    total: np.ndarray[Any, Any] = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    read(total)
    return total


def ended_s(_: Any) -> float:
    """The moment at which this worker read something last, for a task that needs the result."""
    return _read["last"][0]


def digest() -> str:
    """The digest of what was read last here."""
    return digest_of(torch.tensor(_read["last"][1]))


@contextmanager
def dask_node(rank: int) -> Iterator[None]:
    """Have a worker run on this host while the block runs, and on the first one a scheduler."""
    own, head = os.environ["GLOO_ADDRESS"], os.environ["MASTER_ADDR"]
    commands = [["scheduler", "--host", own, "--port", str(_PORT), "--no-dashboard"]] if rank == 0 else []
    options = ["--host", own, "--name", f"rank{rank}", "--nthreads", "2", "--no-nanny", "--memory-limit", "0"]
    commands.append(["worker", f"tcp://{head}:{_PORT}", *options, "--no-dashboard"])
    processes = [subprocess.Popen([sys.executable, "-m", "dask", *command]) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class DaskDriver:
    """The client: futures on chosen workers."""

    ops: tuple[str, ...] = OPS

    def __init__(self, world: int) -> None:
        from distributed import Client

        self._client: Any = Client(f"tcp://{os.environ['MASTER_ADDR']}:{_PORT}")
        self._client.wait_for_workers(world, timeout=60)
        self._world = world
        self._given: list[Any] = []

    def prepare(self, op: str, size_bytes: int) -> None:
        from distributed import wait

        ranks = range(1 if op == "broadcast" else self._world)
        self._given = [self._on(rank, make, size_bytes, rank) for rank in ranks]
        wait(self._given)

    def run(self, op: str) -> float:
        if op == "broadcast":
            return self._spread(self._given[0])
        total = self._on(0, add, self._given)
        if op == "reduce":
            return float(self._on(0, ended_s, total).result())
        return self._spread(total)

    def _spread(self, future: Any) -> float:
        """Copy an object from its worker to all others, as `scatter(broadcast=True)` does."""
        self._client.replicate([future])
        return max(map(float, self._client.gather([self._on(rank, read, future) for rank in range(self._world)])))

    def digests(self, op: str) -> list[str]:
        ranks = [0] if op == "reduce" else range(self._world)
        return list(self._client.gather([self._on(rank, digest) for rank in ranks]))

    def clean(self) -> None:
        self._given = []

    def close(self) -> None:
        self._client.close()

    def _on(self, rank: int, what: Any, *arguments: Any) -> Any:
        """Run a function on a rank's worker."""
        return self._client.submit(what, *arguments, workers=[f"rank{rank}"], pure=False)
