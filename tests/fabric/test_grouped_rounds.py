"""Sums by grouped sends and receives of torch's group: the bits of those over lanes, and who is lost."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from offbeat.collective import (
    CollectiveMethod,
    DoubleBinaryTree,
    MultiTree,
    PipelinedTrees,
    RecursiveDoubling,
    Ring,
    WaterFilling,
)
from offbeat.errors import PlanError
from offbeat.fabric import BindContext, Elastic, Routed
from offbeat.payload import Sum
from tests.fabric.test_routed import lose_one, train
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

METHODS: list[CollectiveMethod] = [
    Ring(), RecursiveDoubling(), DoubleBinaryTree(), MultiTree(split=2), PipelinedTrees(8), WaterFilling(4),
]  # fmt: skip


def sums(folder: Path, backend: str = "gloo", device: str = "cpu") -> list[tuple[str, bool]]:
    """Whether each method's sums, and a broadcast, are the same bits in rounds as over lanes.

    Args:
        folder: of a file that says which links there are, as some methods plan by what they measure.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world)
    found = []
    for method in METHODS:
        results = []
        for grouped in (False, True):
            context = BindContext(rank, world, backend=backend, topology=folder / f"{world}.toml")
            fabric = Routed(method, grouped=grouped).bind(context)
            vectors = [
                torch.randn(numel, generator=torch.Generator().manual_seed(numel + rank)).to(device)
                for numel in (100_003, 1, world - 1, 50_000, 30_000)
            ]
            under_way = [fabric.start(Sum(vector)) for vector in vectors[:-1]]
            under_way.append(fabric.broadcast(vectors[-1], world - 1))
            for one in under_way:
                while not one.wait(timedelta(seconds=1)):
                    pass
                one.result()
            results.append([vector.cpu() for vector in vectors])
            fabric.close()
        same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        found.append((repr(method), same))
    dist.destroy_process_group()
    return found


def described(folder: Path, world: int) -> Path:
    (folder / f"{world}.toml").write_text(f'topology = {{ kind = "star", dims = [{world}], rate_mbps = 1000 }}')
    return folder


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rounds_have_the_bits_of_lanes(world: int, tmp_path: Path) -> None:
    for found in run_workers(world, sums, described(tmp_path, world)):
        assert found == [(repr(method), True) for method in METHODS]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two workers")
def test_rounds_have_the_bits_of_lanes_on_gpus(tmp_path: Path) -> None:
    for found in run_workers(2, sums, described(tmp_path, 2), "nccl", "cuda"):
        assert found == [(repr(method), True) for method in METHODS]


def test_training_has_the_bits_of_a_process_group() -> None:
    expected = run_workers(2, train, Routed(Ring()))
    for states in run_workers(2, train, Routed(Ring(), grouped=True)):
        assert all(torch.equal(states[name], expected[0][name]) for name in states)


def lose_one_in_rounds() -> tuple[float, str]:
    return lose_one(Routed(Ring(), grouped=True))


def test_who_is_killed_is_named() -> None:
    for took_s, said in (one for rank, one in enumerate(run_workers(3, lose_one_in_rounds, faulty=1)) if rank != 1):
        assert "rank 1" in said.lower()
        assert took_s < 15, "they knew by the links, not by a timeout"


def give_up() -> bool:
    """Whether memory stays as it is, once an exchange with somebody who does not come was given up."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world)
    fabric = Routed(Ring(), grouped=True).bind(BindContext(rank, world))
    vector = torch.ones(1000)
    if rank == 1:
        time.sleep(1)
        fabric.start(Sum(torch.ones(1000)))
        time.sleep(0.5)
    else:
        pending = fabric.start(Sum(vector))
        assert not pending.wait(timedelta(seconds=0.3))
        fabric.abandon()
        fabric.abandon()
        vector.fill_(7)
        time.sleep(1.5)
    fabric.abandon()
    return bool((vector == (7 if rank == 0 else 1)).all())


def test_nothing_is_added_once_it_was_given_up() -> None:
    assert run_workers(2, give_up) == [True, True]


def test_options_that_are_none() -> None:
    with pytest.raises(PlanError, match=r"Cannot use grouped='yes': it is True or False - at `plan.fabric.grouped`"):
        Routed(grouped="yes")  # type: ignore[arg-type]


def test_it_is_not_elastic() -> None:
    with pytest.raises(PlanError, match=r"Cannot be elastic over Routed\(grouped=True\): .*over\.grouped"):
        Elastic(over=Routed(grouped=True))
