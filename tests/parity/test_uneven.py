"""Workers with different numbers of batches: who has none left takes part with weight 0."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join

import offbeat
from tests.parity import jobs
from tests.workers import run_workers

BATCHES = (7, 4, 5)  # of ranks 0, 1, 2


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [jobs.vectors(generator) for _ in range(BATCHES[rank])]


def train_both() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=3)
    try:
        return {system: train(system, rank) for system in ("ddp", "offbeat")}
    finally:
        dist.destroy_process_group()


def train(system: str, rank: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = jobs.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    with contextlib.ExitStack() as stack:
        loader: Any = batches(rank)
        if system == "ddp":
            replica: nn.Module = nn.parallel.DistributedDataParallel(model)
            # By default DDP's join goes on dividing by the number of workers at the start.
            stack.enter_context(Join([replica], divide_by_initial_world_size=False))  # type: ignore[list-item]
        else:
            run = stack.enter_context(offbeat.init())
            replica, optimizer, loader = run.prepare(model, optimizer, loader)
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return {"state": {n: t.clone() for n, t in model.state_dict().items()}, "steps": steps}


def test_weights_are_those_of_ddp_with_join() -> None:
    results = run_workers(3, train_both)
    for result in results:
        assert result["offbeat"]["steps"] == max(BATCHES), "every worker's loop is as long as the longest"
        for name, tensor in results[0]["ddp"]["state"].items():
            # Not to the bit: DDP divides by another count in each phase, offbeat multiplies by 1/N and corrects.
            torch.testing.assert_close(result["offbeat"]["state"][name], tensor, atol=1e-6, rtol=1e-5)
            assert torch.equal(result["offbeat"]["state"][name], results[0]["offbeat"]["state"][name])


class Endless(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Nobody can know its length beforehand."""

    def __iter__(self) -> Any:
        return iter(batches(int(os.environ["RANK"])))


def train_without_length() -> dict[str, Any]:
    torch.manual_seed(1)
    model = jobs.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with offbeat.init() as run:
        replica, optimizer, loader = run.prepare(
            model, optimizer, torch.utils.data.DataLoader(Endless(), batch_size=None)
        )
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_loader_without_length_gives_the_same() -> None:
    known = run_workers(3, train_both)[0]["offbeat"]["state"]
    unknown = run_workers(3, train_without_length)
    for name, tensor in known.items():
        assert all(torch.equal(tensor, state[name]) for state in unknown), name


def train_batchnorm() -> dict[str, torch.Tensor]:
    """Padding must not disturb the buffers either."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = jobs.CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(100 + rank)
    data = [jobs.images(generator) for _ in range(2 + rank)]
    with offbeat.init() as run:
        replica, optimizer, loader = run.prepare(model, optimizer, data)
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_buffers_come_from_a_worker_with_data() -> None:
    first, second = run_workers(2, train_batchnorm)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert first["1.num_batches_tracked"] == 3
