"""Turns in strict order: two runs are the same to the bit, whatever the timing."""

from __future__ import annotations

import hashlib
import os
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.fabric import ParameterServer
from offbeat.sync import ASP, Policy, RoundRobin
from tests.workers import run_workers

WORLD, STEPS = 3, 20
MOST_JITTER_S = 0.02


def train(policy: Policy, seed: int) -> tuple[list[str], list[int], float]:
    """The hash of the parameters after each own step, each contribution's age, and how long was slept."""
    rank = int(os.environ["RANK"])
    jitter, slept_s = random.Random(100 * seed + rank), 0.0
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 2))
    generator = torch.Generator().manual_seed(rank)
    hashes, ages = [], []
    with offbeat.init(offbeat.Plan(sync=policy, fabric=ParameterServer(block_bytes=4096))) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        for _ in range(STEPS):
            x = torch.randn(16, 8, generator=generator)
            pause_s = MOST_JITTER_S * jitter.random()
            time.sleep(pause_s)  # the fault: computing takes longer, each time by another amount
            slept_s += pause_s
            F.cross_entropy(replica(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()
            optimizer.zero_grad()
            memory = torch.cat([p.detach().flatten() for p in net.parameters()]).numpy().tobytes()
            hashes.append(hashlib.sha256(memory).hexdigest())
            ages.append(run._reducers[0].staleness)  # type: ignore[attr-defined]
    return hashes, ages, slept_s


def test_two_strict_rotations_are_the_same_to_the_bit() -> None:
    policy = RoundRobin(strict=True)
    first, second = run_workers(WORLD, train, policy, 1), run_workers(WORLD, train, policy, 2)
    for rank, (one, other) in enumerate(zip(first, second, strict=True)):
        assert abs(one[2] - other[2]) > 1e-3, "the jitter is not the same"
        assert one[0] == other[0], f"rank {rank} differs from step {[a == b for a, b in zip(*one[:1], *other[:1])].index(False)} on"  # fmt: skip  # noqa: B905, E501
        assert one[1] == other[1] == [rank, *[WORLD - 1] * (STEPS - 1)], "and so is every gradient's age"
    assert len({one[0][-1] for one in first}) == WORLD, "each worker has seen other parameters: they take turns"


def test_without_an_order_they_are_not() -> None:
    first, second = run_workers(WORLD, train, ASP(), 1), run_workers(WORLD, train, ASP(), 2)
    assert [one[0] for one in first] != [other[0] for other in second]
