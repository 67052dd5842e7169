"""Training along paths of our own: the bits of a process group, who is lost, what is waited for, and discovery."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.collective import Ring, WaterFilling
from offbeat.errors import DisagreementError, PlanError, WorkerLostError
from offbeat.fabric import BindContext, Routed, lane_network, linked_group
from offbeat.fabric.discovery import star_of, unlike
from offbeat.payload import Sum
from offbeat.plan import Plan
from offbeat.topology import MAX_RATE_MBPS
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from offbeat.fabric.fabric import FabricSpec


def train(fabric: FabricSpec, steps: int = 5, kill_at: int | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(100 + rank)
    with offbeat.init(Plan(fabric=fabric, bucket_bytes=10_000), timeout=10.0) as run:
        replica, optimizer = run.prepare(model, optimizer)
        for step in range(steps):
            if (rank, step) == (1, kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator)
            nn.functional.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("method", [None, Ring(), WaterFilling()], ids=repr)
def test_two_workers_have_the_bits_of_a_process_group(method: Ring | WaterFilling | None) -> None:
    expected = run_workers(2, train, offbeat.ProcessGroup())
    for states in run_workers(2, train, Routed(method)):
        assert all(torch.equal(states[name], expected[0][name]) for name in states)


def test_three_workers_agree() -> None:
    first, *others = run_workers(3, train, Routed(WaterFilling(2)))
    expected = run_workers(3, train, offbeat.ProcessGroup())[0]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    for name in first:
        torch.testing.assert_close(first[name], expected[name], atol=1e-5, rtol=1e-5)


def lose_one(fabric: Routed | None = None) -> tuple[float, str]:
    began_s = time.monotonic()
    try:
        train(fabric or Routed(Ring()), steps=200, kill_at=20)
    except WorkerLostError as error:
        return time.monotonic() - began_s, str(error)
    raise AssertionError("nobody was lost")


def test_who_is_killed_is_named() -> None:
    for _, said in (one for rank, one in enumerate(run_workers(3, lose_one, faulty=1)) if rank != 1):
        assert "rank 1" in said.lower()


def train_while_one_is_stopped() -> tuple[torch.Tensor, list[str]]:
    lane_network._LIMITS = replace(lane_network._LIMITS, timeout=timedelta(seconds=2))
    told, rank = listen(), int(os.environ["RANK"])
    torch.manual_seed(1)
    model = nn.Linear(30, 3000)
    with offbeat.init(Plan(fabric=Routed(WaterFilling(2))), timeout=2.0) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        bound: Any = run._session.models.prepared[0].fabric
        assert not bound._collectives.goes_by_group(4 * 3000 * 31)
        for step in range(5):
            if (rank, step) == (1, 3):
                subprocess.Popen(["bash", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            replica(torch.ones(4, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().clone(), told


def test_a_worker_that_is_stopped_is_reported_and_ends_nothing() -> None:
    """For longer than the links' timeout and the run's; as on any other fabric."""
    (first, told), (other, _) = run_workers(2, train_while_one_is_stopped)
    assert torch.equal(first, other)
    assert any("rank 1 on" in line and "paused (SIGSTOP)" in line for line in told), told


def begin_while_one_is_slow() -> str:
    patched: Any = linked_group
    check = patched.check_alike

    def check_late(plan: Any, meet: Any, network: Any) -> None:
        if network.rank == 1:
            time.sleep(3)
        check(plan, meet, network)

    patched.check_alike = check_late
    with offbeat.init(Plan(fabric=Routed(Ring())), timeout=1.0) as run:
        model = nn.Linear(3, 2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    return "well"


def test_workers_meet_late_while_paths_are_planned() -> None:
    assert run_workers(2, begin_while_one_is_slow) == ["well", "well"]


def wait_for_late() -> str:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world
    )
    fabric = Routed(Ring()).bind(BindContext(rank, world))
    trouble = ""
    if rank == 1:
        time.sleep(0.5)
    pending = fabric.start(Sum(torch.ones(1000)))
    if rank == 0:
        time.sleep(0.2)
        trouble = getattr(pending, "owed", "")
    while not pending.wait(timedelta(seconds=1)):
        pass
    assert not getattr(pending, "owed", "?")
    fabric.close()
    torch.distributed.destroy_process_group()
    return trouble


def test_what_is_waited_for_is_told() -> None:
    told = run_workers(2, wait_for_late)[0]
    assert told.startswith("chunk ")
    assert "from rank 1: 0 of 2000 bytes are here, the last 0." in told


def call_unlike() -> str:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world
    )
    fabric = Routed(Ring()).bind(BindContext(rank, world))
    pending = fabric.start(Sum(torch.ones(1000 + rank, dtype=torch.float64 if rank else torch.float32)))
    try:
        while not pending.wait(timedelta(seconds=1)):
            pass
    except DisagreementError as error:
        fabric.abandon()
        return str(error)
    raise AssertionError("they agree")


def test_unlike_sums_are_told_to_both() -> None:
    first, second = run_workers(2, call_unlike)
    assert "this worker calls a sum of 1000 float32" in first
    assert "rank 1 calls a sum of 1001 float64" in first
    assert "this worker calls a sum of 1001 float64" in second


@pytest.mark.parametrize("method", ["ring", Ring, 3])
def test_what_is_no_method(method: object) -> None:
    with pytest.raises(
        PlanError, match=r"use a method of offbeat\.collective, made with .* - at `plan\.fabric\.method`"
    ):
        Routed(method)  # type: ignore[arg-type]


@pytest.mark.parametrize("fabric", [Routed(), Routed(Ring()), Routed(WaterFilling(3))], ids=repr)
def test_it_is_written_and_read(fabric: Routed) -> None:
    plan = Plan(fabric=fabric)
    assert Plan.from_toml(plan.to_toml()) == plan


def test_an_error_within_ends_with_its_path() -> None:
    text = Plan(fabric=Routed(WaterFilling(3))).to_toml().replace("pieces = 3", "pieces = 0")
    with pytest.raises(PlanError, match=r"- at `plan\.fabric\.method\.pieces`"):
        Plan.from_toml(text)


def test_the_star_that_explains_rates() -> None:
    """The fastest host sends to all as fast as they take it in; a slow one is slow with all."""
    rates = [[0.0, 20e6, 5e6], [20e6, 0.0, 5e6], [10e6, 10e6, 0.0]]
    star = star_of(rates, range(3))
    assert [link.rates_mbps for link in star.links] == [(160, 160), (160, 160), (80, 40)]
    assert not unlike(rates, star)
    rates[0][1] = 5e6
    assert unlike(rates, star) == [(0, 1)]
    assert star_of([[0.0, 1e12], [1e12, 0.0]], range(2)).links[0].rate_mbps == MAX_RATE_MBPS
