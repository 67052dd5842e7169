"""Training over stores of objects in the workers: bits, late workers, memory, and who is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import DisagreementError, NetworkError, OffbeatError, PeerError, PlanError
from offbeat.fabric import BindContext, Elastic, Fabric, ObjectStore
from offbeat.payload import Sum, Total
from offbeat.plan import Plan
from offbeat.server.launch import ShardSettings
from tests.fabric.test_routed import lose_one, train
from tests.workers import listen, run_workers

SHORT = timedelta(milliseconds=100)


def bind(spec: ObjectStore, settings: ShardSettings | None = None, timeout_s: float = 20) -> Fabric:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ['OFFBEAT_STORE']}", rank=rank, world_size=world
    )
    return spec.bind(BindContext(rank, world, settings=settings, timeout=timedelta(seconds=timeout_s)))


def total(pending: Any) -> torch.Tensor:
    while not pending.wait(SHORT):
        pass
    reply = pending.result()
    assert isinstance(reply, Total)
    return reply.tensor


@pytest.mark.parametrize("spec", [ObjectStore(), ObjectStore(1), ObjectStore(deterministic=False)], ids=repr)
def test_two_workers_have_the_bits_of_a_process_group(spec: ObjectStore) -> None:
    expected = run_workers(2, train, offbeat.ProcessGroup())
    for states in run_workers(2, train, spec):
        assert all(torch.equal(states[name], expected[0][name]) for name in states)


def test_three_workers_have_the_same_bits_in_every_run() -> None:
    first, *others = run_workers(3, train, ObjectStore())
    expected = run_workers(3, train, offbeat.ProcessGroup())[0]
    for other in (*others, *run_workers(3, train, ObjectStore())):
        assert all(torch.equal(first[name], other[name]) for name in first)
    for name in first:
        torch.testing.assert_close(first[name], expected[name], atol=1e-5, rtol=1e-5)


def sum_late(spec: ObjectStore, numel: int) -> torch.Tensor:
    fabric = bind(spec)
    summed = torch.empty(0)
    for turn in range(3):
        time.sleep(0.2 * ((fabric.rank + turn) % 3))  # in another order each time
        generator = torch.Generator().manual_seed(fabric.rank)
        summed = total(fabric.start(Sum(torch.randn(numel, generator=generator))))
    fabric.close()
    torch.distributed.destroy_process_group()
    return summed


@pytest.mark.parametrize("numel", [1000, 1_000_003])
def test_workers_that_arrive_at_different_times(numel: int) -> None:
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for spec in (ObjectStore(1), ObjectStore(1, deterministic=False), ObjectStore(deterministic=False)):
        for summed in run_workers(3, sum_late, spec, numel):
            if spec == ObjectStore(1):
                assert torch.equal(summed, parts[0] + parts[1] + parts[2]), "in the order of ranks"
            torch.testing.assert_close(summed, parts[0] + parts[1] + parts[2])


def sum_of_16_bits(spec: ObjectStore) -> torch.Tensor:
    fabric = bind(spec)
    summed = total(fabric.start(Sum(digits(fabric.rank))))
    fabric.close()
    torch.distributed.destroy_process_group()
    return summed


def digits(rank: int) -> torch.Tensor:
    """Numbers whose sums float32 holds exactly, and bfloat16 does not."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(-127, 128, (300_001,), generator=generator) / 2.0 ** (2 * rank)).bfloat16()


@pytest.mark.parametrize("spec", [ObjectStore(), ObjectStore(1), ObjectStore(deterministic=False)], ids=repr)
def test_16_bits_are_added_in_32_and_rounded_once(spec: ObjectStore) -> None:
    parts = [digits(rank) for rank in range(3)]
    for summed in run_workers(3, sum_of_16_bits, spec):
        assert torch.equal(summed, torch.stack(parts).float().sum(0).bfloat16())
        assert not torch.equal(summed, parts[0] + parts[1] + parts[2])


def books(fabric: Any) -> tuple[int, int, int, int]:
    store, directory = fabric.store, fabric._directory.directory
    known = (len(store.used), len(store._given), len(store._asked), len(store._waiting))
    return store.used_bytes, len(store.objects), len(list(directory.entries())), sum(known)


def sum_often(steps: int) -> list[tuple[int, int, int, int]]:
    fabric: Any = bind(ObjectStore())
    seen = []
    for step in range(steps):
        sums = [fabric.start(Sum(torch.full((size,), float(step)))) for size in (10, 100_000)]
        assert all(bool((total(pending) == 2.0 * step).all()) for pending in sums)
        assert bool((total(fabric.broadcast(torch.full((70_000,), float(fabric.rank)), step % 2)) == step % 2).all())
        if step in (steps // 2, steps - 1):
            until_s = time.monotonic() + 10
            while any(books(fabric)) and time.monotonic() < until_s:
                time.sleep(0.05)
            seen.append(books(fabric))
            torch.distributed.barrier()  # the next exchange is in the books of both
    fabric.close()
    torch.distributed.destroy_process_group()
    return seen


@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_of_exchanges_that_are_over(steps: int) -> None:
    for seen in run_workers(2, sum_often, steps):
        assert seen == [(0, 0, 0, 0)] * 2


def test_a_killed_worker_is_named() -> None:
    for rank, told in enumerate(run_workers(3, lose_one, ObjectStore(), faulty=1)):
        if rank != 1:
            assert "rank 1" in told[1].lower()


def lose_one_without_a_run() -> tuple[float, str]:
    fabric = bind(ObjectStore())
    for step in range(100):
        if (fabric.rank, step) == (2, 10):
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        try:
            total(fabric.start(Sum(torch.ones(100_000))))
        except NetworkError as error:
            fabric.abandon()
            return time.monotonic() - began_s, str(error)
    raise AssertionError("nobody was lost")


def test_a_killed_worker_ends_the_exchange() -> None:
    for waited_s, said in run_workers(3, lose_one_without_a_run, faulty=2)[:2]:
        assert "Cannot sum without rank 2" in said
        assert waited_s < 5


def train_while_one_is_stopped() -> tuple[torch.Tensor, list[str]]:
    told, rank = listen(), int(os.environ["RANK"])
    torch.manual_seed(1)
    model = nn.Linear(30, 3000)
    with offbeat.init(Plan(fabric=ObjectStore()), timeout=2.0) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in range(5):
            if (rank, step) == (1, 3):
                subprocess.Popen(["bash", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            replica(torch.ones(4, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().clone(), told


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_reported_and_ends_nothing() -> None:
    """For longer than the links' timeout and the run's."""
    (first, told), (other, _) = run_workers(2, train_while_one_is_stopped)
    assert torch.equal(first, other)
    assert any("rank 1 on" in line and "paused (SIGSTOP)" in line for line in told), told


def meet_with_another_token() -> str:
    token = "a" * 32 if os.environ["RANK"] == "0" else "b" * 32
    try:
        bind(ObjectStore(), ShardSettings(job="mnist", token=token), timeout_s=3)
    except OffbeatError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("they have met")


def test_a_worker_of_a_job_with_another_token() -> None:
    for said in run_workers(2, meet_with_another_token):
        assert PeerError.__name__ in said
        assert "token" in said


def call_unlike() -> str:
    fabric = bind(ObjectStore())
    dtype = torch.float64 if fabric.rank else torch.float32
    try:
        total(fabric.start(Sum(torch.ones(100_000 + fabric.rank, dtype=dtype))))
    except DisagreementError as error:
        fabric.abandon()
        return str(error)
    raise AssertionError("they agree")


def test_both_hear_of_unlike_sums() -> None:
    for said in run_workers(2, call_unlike):
        assert "float32[100000]" in said
        assert "float64[100001]" in said


def local_sgd() -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Linear(20, 5000)
    with offbeat.init(Plan(sync=offbeat.LocalSGD(2), fabric=ObjectStore(deterministic=False)), timeout=10.0) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        for _ in range(4):
            replica(torch.randn(4, 20, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [one.detach().clone() for one in model.parameters()]


def test_local_sgd() -> None:
    first, other = run_workers(2, local_sgd)
    assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("fabric", [ObjectStore(), ObjectStore(4), ObjectStore(deterministic=False)], ids=repr)
def test_it_is_written_and_read(fabric: ObjectStore) -> None:
    plan = Plan(fabric=fabric)
    assert Plan.from_toml(plan.to_toml()) == plan


@pytest.mark.parametrize("stripes", [0, -1, 257, True, "2"])
def test_impossible_stripes(stripes: Any) -> None:
    with pytest.raises(PlanError, match=r"use 1 to 256, or None .* - at `plan\.fabric\.stripes`"):
        ObjectStore(stripes)


def test_it_is_not_elastic() -> None:
    over: Any = ObjectStore()
    with pytest.raises(PlanError, match=r"Cannot be elastic over ObjectStore\(.*ProcessGroup\(\) or Routed\(\)"):
        Elastic(over)
