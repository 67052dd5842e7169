"""A worker that hands tensors to others by a store of its host (a program by itself).

    python -m offbeat.lab.object_load SYSTEM WARM_UP REPEATS SIZE,SIZE,... [OP;OP...]

One tensor goes to all, or the sum of all to one, or to all. Each operation begins at a moment that rank 0 has named
before, on the clock that all processes of the machine share, and ends for a worker when it has read the last element of
the result. Objects are where they begin before that, and are deleted after it. In staggered operations members begin up
to 0.3 s apart, and the clock starts when the last one does. JSON lines on the standard output say what was seen. Other
systems are measured in the same way: each is an `OperationCarrier`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from offbeat.objects.client import ObjectClient, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

OPS = ("broadcast", "reduce", "allreduce")
STAGGERED = ("reduce, staggered", "allreduce, staggered")
STAGGERED_BYTES = 32 << 20
"""Below this size a transfer takes so little of the time between arrivals that nothing is seen."""
STRIPED = "offbeat, striped"
"""The system in which each store makes a stripe of a sum at all."""
PATIENCE = timedelta(seconds=200)
_AHEAD_S, _STAGGER_S = 0.05, 0.3


class OperationCarrier(Protocol):
    """The Protocol of one system's way to carry tensors, in each member."""

    ops: tuple[str, ...]

    def prepare(self, number: int, op: str, mine: torch.Tensor) -> None:
        """Do what is not measured, before any member has given anything."""

    def give(self, number: int, op: str, mine: torch.Tensor) -> None:
        """Have what this member gives where it begins."""

    def run(self, number: int, op: str) -> torch.Tensor | None:
        """Carry the operation out; the result, if this member gets one."""

    def books(self) -> dict[str, int]:
        """Return the bytes of memory that this host's part of the system holds now, and has held; {} if unknown."""

    def clean(self, number: int, op: str) -> None:
        """Let go of all of it."""

    def close(self) -> None:
        """The end."""


def numbers(size_bytes: int, rank: int) -> torch.Tensor:
    """Return what a rank gives: whole numbers, so that every order of adding gives the same bits."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (size_bytes // 4,), generator=generator).float()


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest by which results are compared."""
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
            arguments += ["--directory"]
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


class StoreMember:
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


class LoadAsked:
    """The arguments of the program."""

    def __init__(self, arguments: list[str]) -> None:
        self.system, self.warm_up, self.repeats = arguments[0], int(arguments[1]), int(arguments[2])
        self.sizes = [int(size) for size in arguments[3].split(",")]
        self.ops = arguments[4].split(";") if len(arguments) > 4 else []


def say(**line: object) -> None:
    """Print a line for the benchmark."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def arrivals(world: int, repeat: int) -> list[float]:
    """Seconds after which each member begins; 0 to `_STAGGER_S`, the same in every system."""
    chance = random.Random(repeat)
    return [chance.uniform(0.0, _STAGGER_S) for _ in range(world)]


def cells(sizes: list[int], ops: tuple[str, ...], chosen: list[str]) -> Iterator[tuple[int, str]]:
    """The cells to measure, in order."""
    for size in sizes:
        for op in ops:
            if (not chosen or op in chosen) and (op not in STAGGERED or size >= STAGGERED_BYTES):
                yield size, op


def run_member(carrier: OperationCarrier, rank: int, world: int, store: Store, asked: LoadAsked) -> None:
    """Measure as one of several members in step."""
    number = 0
    for size, op in cells(asked.sizes, carrier.ops, asked.ops):
        mine, is_staggered = numbers(size, rank), op in STAGGERED
        for repeat in range(asked.warm_up + asked.repeats):
            number += 1
            late = arrivals(world, repeat) if is_staggered else [0.0] * world
            carrier.prepare(number, op, mine)
            if not is_staggered:
                carrier.give(number, op, mine)
            dist.barrier()
            if rank == 0:
                store.set(f"begin/{number}", str(time.monotonic() + _AHEAD_S))
            begin_s = float(store.get(f"begin/{number}"))
            time.sleep(max(0.0, begin_s + late[rank] - time.monotonic()))
            if is_staggered:
                carrier.give(number, op, mine)
            found = carrier.run(number, op)
            if found is not None:
                found[-1].item()
            took_s = time.monotonic() - begin_s - max(late)
            dist.barrier()  # whoever is done first does not take processors from those that are measured
            if repeat >= asked.warm_up:
                digest = "" if found is None else digest_of(found)
                took = {} if found is None else {"took_s": took_s, "digest": digest}
                say(size=size, op=op, repeat=repeat, **took, **carrier.books())
            del found
            dist.barrier()
            carrier.clean(number, op)


def begin() -> tuple[int, int, Store]:
    """Meet the other workers; this one's rank, how many there are, and the store that they share."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    return dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()


def main() -> None:
    asked = LoadAsked(sys.argv[1:])
    rank, world, store = begin()
    carrier = StoreMember(rank, world, store, striped=asked.system == STRIPED)
    run_member(carrier, rank, world, store, asked)
    dist.barrier()
    carrier.close()


if __name__ == "__main__":
    main()
