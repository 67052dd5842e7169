"""Members of an object operation that are in step: stores as processes, and torch.distributed on Gloo."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from offbeat.objects.client import ObjectClient, connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

OPS = ("broadcast", "reduce", "allreduce")
STAGGERED = ("reduce, staggered", "allreduce, staggered")


def numbers(size_bytes: int, rank: int) -> torch.Tensor:
    """What a rank gives: whole numbers, so that every order of adding gives the same bits."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (size_bytes // 4,), generator=generator).float()


def digest_of(tensor: torch.Tensor) -> str:
    """By which results are compared."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


class StoreProcess:
    """The store of this host, as users start it; the one of rank 0 keeps the directory.

    Args:
        store: by which the ranks tell each other where the directory is.
        memory_mib: for objects.
    """

    def __init__(self, rank: int, store: Store, memory_mib: int = 4096) -> None:
        arguments = ["--bind", os.environ["GLOO_ADDRESS"], "--memory-mib", str(memory_mib)]
        if rank == 0:
            arguments += ["--directory", "--directory-port", "4700"]
        else:
            store.wait(["directory"])
            arguments += ["--directories", store.get("directory").decode()]
        command = [sys.executable, "-m", "offbeat", "objects", "serve", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"OFFBEAT_OBJECTS=(\S+); .*--directories (\S+);", line)
        assert found is not None, line
        if rank == 0:
            store.set("directory", found[2])
        self.address = found[1]

    def connect(self) -> ObjectClient:
        """A client on this host."""
        return connect(self.address)

    def end(self) -> None:
        """Have it say good-bye."""
        self.process.terminate()
        self.process.wait(10)


class ObjectStores:
    """Stores as processes, one on each host.

    Args:
        striped: whether each store makes a stripe of a sum at all.
    """

    ops: tuple[str, ...] = OPS + STAGGERED

    def __init__(self, rank: int, world: int, store: Store, *, striped: bool) -> None:
        self._rank, self._world, self._striped = rank, world, striped
        self._store = StoreProcess(rank, store)
        self._client = self._store.connect()
        self._before = 0

    def prepare(self, number: int, op: str, mine: torch.Tensor) -> None:
        self._before = self._resident()
        if "staggered" in op and self._rank == 0 and not self._is_striped(op):  # a sum is asked for before it can be
            self._client.reduce(f"{number}/sum", self._sources(number))

    def give(self, number: int, op: str, mine: torch.Tensor) -> None:
        if op != "broadcast" or self._rank == 0:
            self._client.put(f"{number}/{self._rank}", mine)

    def run(self, number: int, op: str) -> torch.Tensor | None:
        target = f"{number}/sum"
        if op == "broadcast":
            return self._client.get(f"{number}/0")
        if self._is_striped(op):
            return self._client.allreduce(target, self._sources(number))
        if self._rank == 0 and "staggered" not in op:
            self._client.reduce(target, self._sources(number))
        return self._client.get(target) if self._rank == 0 or op.startswith("allreduce") else None

    def books(self) -> dict[str, int]:
        status = self._client.status()
        grown = self._resident() - self._before
        return {"used_bytes": status.used_bytes, "peak_bytes": status.peak_bytes, "grown_bytes": grown}

    def clean(self, number: int, op: str) -> None:
        if self._rank == 0:
            for name in [*self._sources(number), f"{number}/sum"]:
                self._client.delete(name)

    def close(self) -> None:
        self._client.close()
        self._store.end()

    def _is_striped(self, op: str) -> bool:
        return self._striped and op.startswith("allreduce")

    def _sources(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self._world)]

    def _resident(self) -> int:
        """The proportional set size of store and client: a page that both map counts once."""
        return sum(proportional_bytes(pid) for pid in (self._store.process.pid, os.getpid()))


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) << 10


class GlooRing:
    """torch.distributed on Gloo."""

    ops: tuple[str, ...] = OPS + STAGGERED

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensor = torch.empty(0)

    def prepare(self, number: int, op: str, mine: torch.Tensor) -> None:
        self._tensor = mine.clone() if op != "broadcast" or self._rank == 0 else torch.zeros_like(mine)

    def give(self, number: int, op: str, mine: torch.Tensor) -> None:
        """Gloo sends it from where it is."""

    def run(self, number: int, op: str) -> torch.Tensor | None:
        if op == "broadcast":
            dist.broadcast(self._tensor, 0)
        elif op.startswith("reduce"):
            dist.reduce(self._tensor, 0)
            return self._tensor if self._rank == 0 else None
        else:
            dist.all_reduce(self._tensor)
        return self._tensor

    def books(self) -> dict[str, int]:
        return {}

    def clean(self, number: int, op: str) -> None:
        self._tensor = torch.empty(0)

    def close(self) -> None:
        """The group ends with the process."""
