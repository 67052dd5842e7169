"""Where elastic exchanges work: in memory that none of them can lack any more."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch._C._distributed_c10d import FileStore

from offbeat.fabric import BindContext, Elastic, ElasticGroup
from offbeat.fabric.elastic import BoundElastic
from offbeat.fabric.retryable import RetryableAllReduce
from offbeat.fabric.spare_memory import SpareMemory
from offbeat.payload import Sum
from tests.workers import run_workers


def test_memory_is_used_again_by_an_exchange_of_its_size_and_dtype() -> None:
    spare, memory = SpareMemory(), torch.empty(8)
    spare.give(memory, number=0, kept=2)
    assert spare.take(8, torch.float64) is not memory
    assert spare.take(9, torch.float32) is not memory
    assert spare.take(8, torch.float32) is memory
    assert spare.take(8, torch.float32) is not memory, "it is taken"


def test_memory_that_no_exchange_asks_for_is_released() -> None:
    spare, memory = SpareMemory(), torch.empty(8)
    spare.give(memory, number=0, kept=2)
    for number in range(1, 10):
        spare.give(torch.empty(3), number, kept=2)
    assert spare.take(8, torch.float32) is not memory


def test_a_result_that_was_not_read_keeps_its_memory() -> None:
    exchange = RetryableAllReduce(1, Sum(torch.ones(3), torch.ones(1)), SpareMemory())
    assert exchange.free() is None


class Watched(SpareMemory):
    """Notes which memory is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        memory = super().take(numel, dtype, device)
        self.addresses.add(memory.data_ptr())
        return memory


def many_exchanges() -> tuple[bool, int]:
    rank, right = int(os.environ["RANK"]), True
    group = ElasticGroup(FileStore(os.environ["OFFBEAT_STORE"], 2), rank, 2)
    fabric = Elastic().bind(BindContext(rank, 2, group=group))
    assert isinstance(fabric, BoundElastic)
    watched = fabric._spare = Watched()
    for step in range(20):
        mine = torch.full((100_000,), float(step + rank))
        exchange = fabric.start(Sum(mine))
        assert exchange.wait(timedelta(seconds=10))
        exchange.result()
        right = right and bool((mine == 2 * step + 1).all())
    fabric.close()
    return right, len(watched.addresses)


def test_twenty_exchanges_work_in_the_memory_of_two() -> None:
    for right, addresses in run_workers(2, many_exchanges):
        assert right
        assert addresses <= 3
