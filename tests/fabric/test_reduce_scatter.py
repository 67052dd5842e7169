"""Sums in two rounds: what a worker that is lost between them leaves behind, and the memory that they work in."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from offbeat.fabric import BindContext, Elastic, ElasticGroup, Fabric, ProcessGroup, ReduceScatters, Scattered
from offbeat.fabric.elastic import BoundElastic
from offbeat.fabric.spare_memory import SpareMemory
from offbeat.payload import Reply, Sum, Total
from tests.workers import run_workers

if TYPE_CHECKING:
    from offbeat.pending import Pending

LOST = 1


def waited_for(pending: Pending | Scattered) -> Reply:
    for _ in range(200):
        if pending.wait(timedelta(milliseconds=100)):
            return pending.result()
    raise AssertionError("it never came to its end")


def sums_when(kind: str) -> tuple[set[float], float, tuple[int, ...], int]:
    """A sum, its weight, who is left, and how often they formed groups anew, where something goes wrong.

    Args:
        kind: "before" and "between" say when a worker is killed; "broken" that a connection breaks between the rounds,
            and nobody is lost.
    """
    rank, gone = int(os.environ["RANK"]), dict[int, str]()
    group = ElasticGroup(FileStore(os.environ["OFFBEAT_STORE"], 3), rank, 3, timedelta(seconds=1))
    group.gone = lambda: gone
    fabric = Elastic().bind(BindContext(rank, 3, group=group))
    assert isinstance(fabric, BoundElastic)
    waited_for(fabric.start(Sum(torch.ones(1))))  # all are there
    if rank == LOST and kind == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    gone |= {LOST: "was killed"} if kind == "before" else {}
    memory = torch.full((9,), 10.0**rank)
    scattered = fabric.reduce_scatter(Sum(memory[:7], memory[7:]))
    waited_for(scattered)
    if kind == "between":
        waited_for(fabric.start(Sum(torch.ones(1))))  # all have their parts
        if rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        gone |= {LOST: "was killed"}
    if kind == "broken" and rank == 0:
        group.invalidate()
    total = waited_for(scattered.all_gather())
    assert isinstance(total, Total)
    assert total.tensor.data_ptr() == memory.data_ptr()
    assert total.tail is not None
    found = set(memory.tolist()), total.weight, group.members, group._number
    fabric.close()
    return found


@pytest.mark.parametrize("kind", ["before", "between"])
def test_what_a_lost_worker_had_of_the_sum_is_summed_again(kind: str) -> None:
    results = run_workers(3, sums_when, kind, faulty=LOST)
    assert [results[rank] for rank in (0, 2)] == [({101.0}, 2 / 3, (0, 2), 1)] * 2


def test_a_connection_that_breaks_between_the_rounds_loses_nobody() -> None:
    assert run_workers(3, sums_when, "broken") == [({111.0}, 1.0, (0, 1, 2), 1)] * 3


class Watched(SpareMemory):
    """Notes which memory is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        memory = super().take(numel, dtype, device)
        self.addresses.add(memory.data_ptr())
        return memory


def bound(fabric: str) -> Fabric:
    rank, store = int(os.environ["RANK"]), os.environ["OFFBEAT_STORE"]
    if fabric == "elastic":
        return Elastic().bind(BindContext(rank, 2, group=ElasticGroup(FileStore(store, 2), rank, 2)))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return ProcessGroup().bind(BindContext(rank, 2))


def many_sums(kind: str) -> tuple[bool, int]:
    fabric, right = bound(kind), True
    assert isinstance(fabric, ReduceScatters)
    watched = fabric._spare = Watched()  # type: ignore[attr-defined]
    for step in range(20):
        mine = torch.full((100_001,), float(step + fabric.rank))
        scattered = fabric.reduce_scatter(Sum(mine))
        waited_for(scattered)
        waited_for(scattered.all_gather())
        right = right and bool((mine == 2 * step + 1).all())
    fabric.close()
    return right, len(watched.addresses)


@pytest.mark.parametrize(("kind", "most"), [("group", 1), ("elastic", 3)])
def test_twenty_sums_work_in_the_memory_of_few(kind: str, most: int) -> None:
    for right, addresses in run_workers(2, many_sums, kind):
        assert right
        assert addresses <= most
