"""Every sample counts the same, however the workers' batches are cut."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import offbeat
from tests.workers import run_workers

SIZES = (8, 2)  # of the batches of ranks 0 and 1
STEPS = 4


class Part(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A rank's own samples."""

    def __init__(self, rank: int) -> None:
        self._x, self._y = data()
        self._mine = [i for i in range(len(self._x)) if (i % sum(SIZES) >= SIZES[0]) == bool(rank)]

    def __len__(self) -> int:
        return len(self._mine)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[self._mine[index]], self._y[self._mine[index]]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = STEPS * sum(SIZES)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def loader_of(kind: str, rank: int) -> Any:
    part = Part(rank)
    whole = DataLoader(
        part, batch_size=SIZES[rank], sampler=DistributedSampler(part, num_replicas=1, rank=0, shuffle=False)
    )
    if kind == "sizes known":
        return whole
    return [(x, y) for x, y in whole] if kind == "a list" else (batch for batch in whole)


def train(kind: str) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.init() as run:
        replica, optimizer, loader = run.prepare(net, optimizer, loader_of(kind, int(os.environ["RANK"])))
        steps = 0
        for x, y in loader:
            F.cross_entropy(replica(x.double()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == STEPS
    return dict(net.state_dict())


def alone() -> dict[str, torch.Tensor]:
    """One worker with batches of ten."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in zip(*(tensor.split(sum(SIZES)) for tensor in data()), strict=True):
        F.cross_entropy(net(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


@pytest.mark.parametrize("kind", ["sizes known", "a list", "a generator"])
def test_unequal_batches_give_the_mean_over_all_samples(kind: str) -> None:
    expected = alone()
    for state in run_workers(2, train, kind):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def weights() -> list[float]:
    net = nn.Linear(1, 1)
    noted = []
    with offbeat.init() as run:
        numbers = TensorDataset(torch.arange(11.0).view(-1, 1))
        replica, optimizer, loader = run.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(numbers, batch_size=2)
        )
        for (x,) in loader:
            replica(x).sum().backward()
            noted.append(run._session.models.synchronizers[0].accounting.scale)
            optimizer.step()
            optimizer.zero_grad()
    return noted


def test_equal_batches_weigh_exactly_one() -> None:
    """So that the mean has the bits of DistributedDataParallel's; 6 samples in 3 batches, and 5."""
    first, second = run_workers(2, weights)
    assert first[:2] == second[:2] == [1.0, 1.0]


def last_weights() -> tuple[float, float]:
    with offbeat.init() as run:
        net = nn.Linear(1, 1)
        replica, optimizer, loader = run.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(11, 1)), batch_size=4)
        )
        weight = 0.0
        for (x,) in loader:
            replica(x).sum().backward()
            weight = run._session.models.synchronizers[0].accounting._scale
            optimizer.step()
            optimizer.zero_grad()
        assert replica.weight.grad is None
    return weight, float(net.weight)


def test_a_short_last_batch_weighs_less() -> None:
    """Of 11 samples rank 0 has 6 and rank 1 has 5: the last batches have 2 and 1."""
    (first, moved), (second, same) = run_workers(2, last_weights)
    assert (first, second) == (2 / 1.5, 1 / 1.5)
    assert moved == same
