"""Accumulation: `require_backward_grad_sync` is the flag that `no_sync()` sets, under every plan."""

from __future__ import annotations

import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.codec import ErrorFeedback, TopK
from offbeat.sync import LocalSGD
from tests.workers import run_workers

STEPS, MICRO_BATCHES = 5, 3
PLANS = {
    "dense": offbeat.Plan(),
    "error feedback": offbeat.Plan(codec=ErrorFeedback(TopK(0.25))),
    "local steps": offbeat.Plan(sync=LocalSGD(2)),
    "local steps, late": offbeat.Plan(sync=LocalSGD(2, after=2)),
}
State = dict[str, torch.Tensor]


def train(plan: offbeat.Plan, way: str) -> tuple[int, State]:
    """Accumulate in a way; the exchanges that were counted, and the final parameters."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(50 + int(os.environ["RANK"]))
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8))
        for _ in range(STEPS):
            for micro in range(MICRO_BATCHES):
                x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
                is_last = micro == MICRO_BATCHES - 1
                if way == "flag":
                    replica.require_backward_grad_sync = is_last
                with replica.no_sync() if way == "no_sync" and not is_last else contextlib.nullcontext():
                    loss = F.cross_entropy(replica(x), y) / MICRO_BATCHES
                    if way == "flag after the forward pass":
                        replica.require_backward_grad_sync = is_last
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
        return run.step, copy.deepcopy(model.state_dict())


def each_way() -> dict[str, dict[str, tuple[int, State]]]:
    path = f"file://{os.environ['OFFBEAT_STORE']}"
    dist.init_process_group("gloo", init_method=path, rank=int(os.environ["RANK"]), world_size=2)
    ways = ("no_sync", "flag", "flag after the forward pass")
    try:
        return {name: {way: train(plan, way) for way in ways} for name, plan in PLANS.items()}
    finally:
        dist.destroy_process_group()


def test_the_flag_accumulates_as_no_sync_does_under_every_plan() -> None:
    first, second = run_workers(2, each_way)
    for name, ways in first.items():
        _, expected = ways["no_sync"]
        for way, (steps, state) in ways.items():
            assert steps == STEPS, (name, way)
            for key, tensor in expected.items():
                assert torch.equal(state[key], tensor), (name, way, key)
                assert torch.equal(second[name][way][1][key], tensor), (name, way, key)


def test_no_sync_shows_in_the_flag_and_leaves_it_as_it_was() -> None:
    model = nn.Linear(2, 1)
    with offbeat.init() as run:
        replica, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert replica.require_backward_grad_sync
        with replica.no_sync():
            assert not replica.require_backward_grad_sync
        with run.no_sync():
            assert not replica.require_backward_grad_sync
        replica.require_backward_grad_sync = False
        with replica.no_sync():
            pass
        assert not replica.require_backward_grad_sync
        mine = copy.deepcopy(replica)
        mine.require_backward_grad_sync = True  # of a copy it means nothing
        assert not replica.require_backward_grad_sync
