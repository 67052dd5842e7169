"""Workload: one tensor to all, a sum at one, a sum at all; by stores of objects, Gloo, Ray, Dask or shardcast.

    python object_ops.py SYSTEM WARM_UP REPEATS SIZE,SIZE,... [OP;OP...]

In most systems every worker is a member, and is measured as in `offbeat.lab.object_load`. In Ray and Dask rank 0
drives the members (`Driver`): the operation begins when it does, and ends when the last member has read the last
element of the result.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from offbeat.lab import object_load, ray_cluster
from offbeat.lab.object_load import OPS, STAGGERED, LoadAsked, OperationCarrier, StoreMember, cells, say

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

CELL_S = 20.0
"""A driven cell begins no repeat after so long, once it has one."""
_RAY_MIB, _IDLE_S = 1536, 3.0


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


def member(system: str, rank: int, world: int, store: Store) -> OperationCarrier:
    """This member of a system."""
    if system == "gloo":
        return GlooRing(rank)
    if system == "shardcast":
        from benchmarks.workloads.shardcast_ops import Shardcast

        return Shardcast(rank, world, store)
    return StoreMember(rank, world, store, striped=system == object_load.STRIPED)


def driver(system: str, world: int, store: Store) -> Driver:
    """The driver of a system, at rank 0."""
    if system == "dask":
        from benchmarks.workloads.dask_ops import DaskDriver

        return DaskDriver(world)
    from benchmarks.workloads import ray_ops

    return ray_ops.DRIVERS[system](world)


def run_driver(driver: Driver, asked: LoadAsked) -> None:
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


def busy_cores() -> float:
    """Return how many cores of this machine are busy now."""

    def ticks() -> int:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields) - fields[3] - fields[4]  # idle, and waiting for a disk

    before = ticks()
    time.sleep(_IDLE_S)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / _IDLE_S


def main() -> None:
    asked = LoadAsked(sys.argv[1:])
    system = asked.system
    rank, world, store = object_load.begin()
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
                store.set("driven", "")
            store.wait(["driven"], timedelta(hours=1))
            dist.barrier()
        else:
            if system.endswith("beside ray") and rank == 0:
                say(busy_cores=round(busy_cores(), 3))
            dist.barrier()
            carrier = member(system, rank, world, store)
            object_load.run_member(carrier, rank, world, store, asked)
            dist.barrier()
            carrier.close()


if __name__ == "__main__":
    main()
