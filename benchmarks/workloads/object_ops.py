"""Workload: one tensor to all, a sum at one, a sum at all; by stores of objects, Gloo, Ray, Dask or shardcast.

    python object_ops.py SYSTEM WARM_UP REPEATS SIZE,SIZE,... [OP;OP...]

In most systems every worker is a member (`Carrier`): each operation begins at a moment that rank 0 has named before, on
the clock that all processes of the machine share, and ends for a worker when it has read the last element of the
result. In Ray and Dask rank 0 drives the members (`Driver`), and the operation begins when it does. Objects are where
they begin before that, and are deleted after it. In staggered operations members begin up to 0.3 s apart, and the clock
starts when the last one does. JSON lines on the standard output say what was seen.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from benchmarks.workloads.object_members import STAGGERED, GlooRing, ObjectStores, digest_of, numbers
from offbeat.lab import ray_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

STAGGERED_BYTES = 32 << 20
"""Below this size a transfer takes so little of the time between arrivals that nothing is seen."""
CELL_S = 20.0
"""A driven cell begins no repeat after so long, once it has one."""
_AHEAD_S, _STAGGER_S, _PATIENCE = 0.05, 0.3, timedelta(seconds=200)
_RAY_MIB, _IDLE_S = 1536, 3.0


class Carrier(Protocol):
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


class Driver(Protocol):
    """The Protocol of one system that rank 0 drives."""

    ops: tuple[str, ...]

    def prepare(self, op: str, size_bytes: int) -> None:
        """Have what the members give where it begins."""

    def run(self, op: str) -> float:
        """Carry the operation out; the moment at which the last member had read its result, on the common clock."""

    def digests(self, op: str) -> list[str]:
        """Return the digest of each result."""

    def clean(self) -> None:
        """Let go of all of it."""

    def close(self) -> None:
        """The end."""


def member(system: str, rank: int, world: int, store: Store) -> Carrier:
    """This member of a system."""
    if system == "gloo":
        return GlooRing(rank)
    if system == "shardcast":
        from benchmarks.workloads.shardcast_ops import Shardcast

        return Shardcast(rank, world, store)
    return ObjectStores(rank, world, store, striped="striped" in system)


def driver(system: str, world: int, store: Store) -> Driver:
    """The driver of a system, at rank 0."""
    if system == "dask":
        from benchmarks.workloads.dask_ops import DaskDriver

        return DaskDriver(world)
    from benchmarks.workloads import ray_ops

    return ray_ops.DRIVERS[system](world)


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


def run_member(carrier: Carrier, rank: int, world: int, store: Store, asked: Asked) -> None:
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
            if repeat >= asked.warm_up:
                digest = "" if found is None else digest_of(found)
                took = {} if found is None else {"took_s": took_s, "digest": digest}
                say(size=size, op=op, repeat=repeat, **took, **carrier.books())
            del found
            dist.barrier()
            carrier.clean(number, op)


def run_driver(driver: Driver, asked: Asked) -> None:
    """Measure as the driver of all members."""
    for size, op in cells(asked.sizes, driver.ops, asked.ops):
        began_s = time.monotonic()
        for repeat in range(asked.warm_up + asked.repeats):
            if repeat > asked.warm_up and time.monotonic() - began_s > CELL_S:
                break
            driver.prepare(op, size)
            begin_s = time.monotonic()
            took_s = driver.run(op) - begin_s
            if repeat >= asked.warm_up:
                for digest in driver.digests(op):
                    say(size=size, op=op, repeat=repeat, took_s=took_s, digest=digest)
            driver.clean()


class Asked:
    """What the command line asks for."""

    def __init__(self, arguments: list[str]) -> None:
        self.system, self.warm_up, self.repeats = arguments[0], int(arguments[1]), int(arguments[2])
        self.sizes = [int(size) for size in arguments[3].split(",")]
        self.ops = arguments[4].split(";") if len(arguments) > 4 else []


def busy_cores() -> float:
    """Return how many cores of this machine are busy now."""

    def ticks() -> int:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields) - fields[3] - fields[4]  # idle, and waiting for a disk

    before = ticks()
    time.sleep(_IDLE_S)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / _IDLE_S


def main() -> None:
    asked = Asked(sys.argv[1:])
    system, rank, world = asked.system, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    store = dist.distributed_c10d._get_default_store()
    with ExitStack() as around:
        if "ray" in system:
            head, own = os.environ["MASTER_ADDR"], os.environ["GLOO_ADDRESS"]
            around.enter_context(
                ray_cluster.node(store, rank=rank, world=world, head=head, own=own, memory_mib=_RAY_MIB, cpus=2)
            )
        if system.startswith("ray") or system == "dask":
            if system == "dask":
                from benchmarks.workloads.dask_ops import dask_node

                around.enter_context(dask_node(rank))
            dist.barrier()
            if rank == 0:
                driving = driver(system, world, store)
                run_driver(driving, asked)
                driving.close()
            say(ends=True)
            store.set(f"driven/{rank}", "")
            store.wait(["driven/0"], timedelta(hours=1))
        else:
            if system.endswith("beside ray") and rank == 0:
                say(busy_cores=round(busy_cores(), 3))
            dist.barrier()
            carrier = member(system, rank, world, store)
            run_member(carrier, rank, world, store, asked)
            say(ends=True)
            dist.barrier()
            carrier.close()


if __name__ == "__main__":
    main()
