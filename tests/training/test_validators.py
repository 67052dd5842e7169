"""Validators: processes on trusted data, beside which a server judges what workers bring."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat import ASP, LocalSGD, ParameterServer, Plan
from offbeat.robust import ZenoPlusPlus, ZenoPS
from tests.training.server_jobs import serve
from tests.workers import listen, run_workers

WORLD, LR = 3, 0.1
SECRET = "v" * 32


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(20, 3)


def batches(rank: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three directions, and which of them points most where a sample does."""
    generator = torch.Generator().manual_seed(50 + rank)
    truth = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    xs = [torch.randn(32, 20, generator=generator) for _ in range(steps)]
    return [(x, (x @ truth.T).argmax(1)) for x in xs]


def train(folder: str, plan: Plan, steps: int, liars: int) -> tuple[float, list[str]]:
    said, rank = listen(), int(os.environ["RANK"])
    serve(Path(folder), validator_token=SECRET)
    if rank >= WORLD:
        del os.environ["OFFBEAT_STORE"], os.environ["OFFBEAT_STORE_PREFIX"]
        os.environ.update(OFFBEAT_ROLE="validator", OFFBEAT_VALIDATOR_TOKEN=SECRET)
    net = model()
    try:
        with offbeat.init(plan, timeout=timedelta(seconds=2)) as run:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            replica, optimizer = run.prepare(net, optimizer)
            for x, y in batches(rank, 100 * steps if run.is_validator else steps):
                F.cross_entropy(replica(x), y).backward()
                if rank < liars:
                    for parameter in net.parameters():
                        parameter.grad.mul_(-6)
                optimizer.step()
                optimizer.zero_grad()
            run.settle()
    except SystemExit as stop:
        assert not stop.code
        said.append("ended")
    x, y = batches(99, 1)[0]
    return float((net(x).argmax(1) == y).float().mean()), said


def test_honest(tmp_path: Path) -> None:
    plan = Plan(sync=LocalSGD(2), fabric=ParameterServer(), validator=ZenoPS())
    print(run_workers(WORLD, train, str(tmp_path), plan, 60, 0, newcomers=1))


def test_liars(tmp_path: Path) -> None:
    plan = Plan(sync=LocalSGD(2), fabric=ParameterServer(), validator=ZenoPS())
    print(run_workers(WORLD, train, str(tmp_path), plan, 60, 2, newcomers=1))


def test_asp(tmp_path: Path) -> None:
    plan = Plan(sync=ASP(), fabric=ParameterServer(), validator=ZenoPlusPlus())
    print(run_workers(WORLD, train, str(tmp_path), plan, 60, 2, newcomers=1))
