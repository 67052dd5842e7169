"""A prepared model in another wrapper is refused, whichever came first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import offbeat
from offbeat.errors import ModelError
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
# Put around what `prepare` returned, or something in it; the result is trained.
AFTER: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DistributedDataParallel of its module": lambda replica: DistributedDataParallel(replica.module),
    "DistributedDataParallel of what holds it": lambda replica: DistributedDataParallel(nn.Sequential(replica)),
    "DataParallel": DataParallel,
    "FullyShardedDataParallel": lambda replica: FullyShardedDataParallel(replica, device_id=CPU),
    "FullyShardedDataParallel with its parameters": lambda replica: FullyShardedDataParallel(
        replica, device_id=CPU, use_orig_params=True
    ),
    "fully_shard": lambda replica: fully_shard(replica, mesh=init_device_mesh("cpu", (2,))),
    "DistributedDataParallel by replicate": lambda replica: replicate(replica),
}
# Put around the model before it is prepared, which is prepared and trained.
BEFORE: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=CPU),
    "Sequential": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU())


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return "trained"


def wrapped_after(kind: str) -> str:
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model := two_layers(), torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            return one_step(AFTER[kind](replica), optimizer)
        except ModelError as error:
            return str(error)


def wrapped_before(kind: str) -> str:
    wrapped = BEFORE[kind](two_layers())
    with offbeat.init() as run:
        try:
            return one_step(*run.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)))
        except ModelError as error:
            return str(error)


def the_wrapper_is_trained() -> str:
    """The model in it was prepared, and the replica is never called."""
    wrapped = DistributedDataParallel(two_layers())
    with offbeat.init() as run:
        _, optimizer = run.prepare(wrapped.module, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        try:
            return one_step(wrapped, optimizer)
        except ModelError as error:
            return str(error)


def put_into_a_wrapper() -> str:
    """As where a framework has wrapped a model, part of which is prepared by one of its callbacks."""
    outer = nn.Sequential(two_layers())
    wrapped = DistributedDataParallel(outer)
    with offbeat.init() as run:
        outer[0], optimizer = run.prepare(outer[0], torch.optim.SGD(outer.parameters(), lr=0.1))
        try:
            return one_step(wrapped, optimizer)
        except ModelError as error:
            return str(error)


def left_alone() -> str:
    """What was in a wrapper may be prepared, and other models may be wrapped."""
    wrapped = DistributedDataParallel(two_layers())
    with offbeat.init() as run:
        replica, optimizer = run.prepare(wrapped.module, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        DistributedDataParallel(two_layers())(torch.ones(4, 3)).sum().backward()
        for _ in range(2):
            one_step(replica, optimizer)
    DistributedDataParallel(replica)
    return "trained"


def every_way() -> dict[str, str]:
    path = f"file://{os.environ['OFFBEAT_STORE']}"
    dist.init_process_group("gloo", init_method=path, rank=int(os.environ["RANK"]), world_size=2)
    try:
        said = {f"{kind} after": wrapped_after(kind) for kind in AFTER}
        said |= {f"{kind} before": wrapped_before(kind) for kind in BEFORE}
        said |= {"trained": the_wrapper_is_trained(), "put into": put_into_a_wrapper(), "left alone": left_alone()}
        return said
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_no_wrapper_averages_a_prepared_model_again() -> None:
    for said in run_workers(2, every_way):
        assert said.pop("left alone") == "trained"
        for what, text in said.items():
            if what == "Sequential before":
                assert text.startswith("Cannot prepare a model whose parameters are sharded (0.weight): "), text
                assert "wrapped" not in text, "fully_shard changes the model in place"
                assert 'call init_process_group("offbeat")' in text
                continue
            if what.endswith("before"):
                assert text.startswith("Cannot prepare a"), what
                assert "it keeps workers equal by itself" in text, what
                continue
            kind = what.partition(" ")[0] if what.endswith("after") else "DistributedDataParallel"
            assert text.startswith(f"Cannot train a prepared model in {kind}: "), what
            assert "Train with what run.prepare returned" in text, what


def test_one_worker_is_told_as_well() -> None:
    with offbeat.init() as run:
        replica, _ = run.prepare(model := two_layers(), torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(
            ModelError, match="Cannot train a prepared model in DataParallel: it drives several devices"
        ):
            DataParallel(replica)
    DataParallel(replica)
