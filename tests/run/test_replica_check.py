"""A state that is taken while replicas differ: it is said, once, and how to save what all have in common."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.codec import ErrorReset
from offbeat.sync import LocalSGD
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

RESETS = offbeat.Plan(codec=ErrorReset(offbeat.GRBS(2), every=2))
APART = {
    "LocalSGD(every=4)": offbeat.Plan(sync=LocalSGD(4)),
    "LocalSGD(every=2, delay=1)": offbeat.Plan(sync=LocalSGD(2, delay=1)),
    "ErrorReset(": RESETS,
    "LocalSGD(every=3)": offbeat.Plan(sync=LocalSGD(3), fabric=offbeat.ParameterServer()),
}


def steps(replica: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        replica(torch.full((2, 3), 1.0 + int(os.environ["RANK"]))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(plan: offbeat.Plan) -> tuple[list[str], list[str], list[dict[str, torch.Tensor]]]:
    """What is said of states that are taken as they should be, then of others; the states that all have in common."""
    told, model = listen(), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    common: list[dict[str, torch.Tensor]] = []
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        replica.state_dict()
        steps(replica, optimizer, 2)
        copy.deepcopy(model).state_dict()
        run.settle()
        common.append(copy.deepcopy(replica.state_dict()))
        steps(replica, optimizer, 2)
        if not plan.is_served:
            with run.averaged():
                common.append(copy.deepcopy(model.state_dict()))
        quiet = [text for text in told if "state_dict" in text]
        steps(replica, optimizer, 1)
        for _ in range(2):
            model[1].state_dict()
            replica.state_dict()
        run.settle()
    return quiet, [text for text in told if "state_dict" in text], common


def each_plan() -> list[Any]:
    path = f"file://{os.environ['OFFBEAT_STORE']}"
    dist.init_process_group("gloo", init_method=path, rank=int(os.environ["RANK"]), world_size=2)
    try:
        return [saved(plan) for plan in (*APART.values(), offbeat.Plan())]
    finally:
        dist.destroy_process_group()


def test_a_replica_of_ones_own_is_named_once_with_the_way_out() -> None:
    first, second = run_workers(2, each_plan)
    for name, (quiet, told, common), (_, _, others) in zip([*APART, "BSP"], first, second, strict=True):
        assert quiet == [], name
        for mine, theirs in zip(common, others, strict=True):
            assert all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items()), name
        if name == "BSP":
            assert told == []
            continue
        ways = "call run.settle() before" if name == "LocalSGD(every=3)" else "within `with run.averaged():`"
        assert len(told) == 1, name
        assert told[0].startswith("The state_dict that is taken after step 5 holds this worker's own replica: ")
        assert f"own replica: with {name}" in told[0]
        assert ways in told[0]


def checkpointed(folder: Path) -> list[str]:
    told, model = listen(), nn.Linear(3, 2)
    with offbeat.init(RESETS) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        checkpoints = offbeat.Checkpoints(run, folder, model=replica, optimizer=optimizer)
        steps(replica, optimizer, 3)
        checkpoints.save()
    return [text for text in told if "state_dict" in text]


def test_checkpoints_hold_each_workers_replica(tmp_path: Path) -> None:
    assert run_workers(2, checkpointed, tmp_path) == [[], []]


@pytest.mark.parametrize("plan", [APART["LocalSGD(every=4)"], RESETS])
def test_who_is_alone_has_no_other_replica(plan: offbeat.Plan) -> None:
    told, model = listen(), nn.Linear(3, 2)
    with offbeat.init(plan) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(3):
            replica(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        replica.state_dict()
    assert told == []
