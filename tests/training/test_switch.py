"""Whole jobs whose gradients a switch sums: replicas are equal, close to DDP's, and outlive a worker."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import PlanError
from offbeat.fabric import switch
from offbeat.run.fabric_binding import FabricBinding
from offbeat.switch.control_client import ControlClient
from offbeat.wire.credentials import Token
from tests.late_copies import LateCopies
from tests.switch.local_switch import served_switch
from tests.workers import WorkerFailed, run_workers

STEPS = 8


def train(fabric: offbeat.Plan, victim: int | None = None) -> tuple[list[str], list[float]]:
    """Train on random images; digests of the parameters after each step, and the losses."""
    run = offbeat.init(fabric, timeout=timedelta(seconds=4))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = torch.Generator().manual_seed(run.rank)
    digests, losses = [], []
    for step in range(STEPS):
        x, y = torch.randn(32, 64, generator=data), torch.randint(10, (32,), generator=data)
        if run.rank == victim and step == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.cross_entropy(prepared(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        digests.append(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
    run.close()
    return digests, losses


def train_capped(plan: offbeat.Plan) -> tuple[float, str, list[tuple[float, float]]]:
    """Step with gradients of 1, 2 and 1000; return a parameter's move, a digest, and the workers' status."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    torch.manual_seed(0)
    model = nn.Linear(700, 1, bias=False)
    before = model.weight.detach().clone()
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    (prepared(torch.ones(1, 700)).sum() * (1, 2, 1000)[run.rank]).backward()
    optimizer.step()
    run.mean(0.0)  # all have sent theirs
    assert isinstance(plan.fabric, offbeat.Switch)
    with contextlib.closing(ControlClient(plan.fabric.address, role="onlooker")) as control:
        (job,) = control.status().jobs
    run.mean(0.0)  # and all have looked
    moved = (before - model.weight.detach()).mean().item()
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    run.close()
    return moved, digest, [(one.clamped, one.typical * 3) for one in job.members]


def test_no_workers_gradient_counts_for_more_than_the_cap() -> None:
    with served_switch() as address:
        results = run_workers(3, train_capped, offbeat.Plan(fabric=offbeat.Switch(address, cap=2.5)))
    assert len({digest for _, digest, _ in results}) == 1
    moved, _, told = results[0]
    assert moved == pytest.approx((1 + 2 + 2.5) / 3, rel=1e-6)
    padding = 700 / 768  # of the last chunk's values
    assert [clamped for clamped, _ in told] == [0, 0, pytest.approx(padding)]
    expected = [(square * padding) ** 0.5 for square in (1, 4, 2.5**2)]
    assert [typical for _, typical in told] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("world", "sync"), [(2, offbeat.BSP()), (3, offbeat.BSP()), (2, offbeat.LocalSGD(2))])
def test_replicas_are_equal_and_train_as_with_ddp(world: int, sync: offbeat.BSP | offbeat.LocalSGD) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=sync, fabric=offbeat.Switch(address))
        switched = run_workers(world, train, plan)
    if sync == offbeat.BSP():
        assert all(digests == switched[0][0] for digests, _ in switched)
    else:
        assert len({digests[-1] for digests, _ in switched}) == 1
    reference = run_workers(world, train, offbeat.Plan(sync=sync))
    for (_, losses), (_, expected) in zip(switched, reference, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)


def train_as_on_gpus(plan: offbeat.Plan) -> tuple[list[str], list[float], int]:
    """`train`, with all tensors copied to the host and back as if they lay on a GPU; and looks at late copies."""
    copies, bind = LateCopies(int(os.environ["RANK"])), FabricBinding.bind
    with (
        mock.patch.object(switch, "CudaCopies", return_value=copies),
        mock.patch.object(FabricBinding, "bind", lambda self, plan, backend: bind(self, plan, "nccl")),
    ):
        return *train(plan), copies.looks


@pytest.mark.parametrize("sync", [offbeat.BSP(), offbeat.LocalSGD(2)])
def test_the_way_by_the_host_changes_no_bit(sync: offbeat.BSP | offbeat.LocalSGD) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=sync, fabric=offbeat.Switch(address))
        straight, staged = run_workers(2, train, plan), run_workers(2, train_as_on_gpus, plan)
    assert [one[0] for one in staged] == [one[0] for one in straight]
    assert all(looks > 5 for _, _, looks in staged)


def test_the_others_go_on_without_a_worker_that_is_killed() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(fabric=offbeat.Switch(address))
        results = run_workers(3, train, plan, 1, faulty=1)
    assert results[0][0] == results[2][0]
    assert len(results[0][0]) == STEPS


@pytest.mark.slow
def test_a_switch_that_nobody_answers_for_is_named() -> None:
    plan = offbeat.Plan(fabric=offbeat.Switch("127.0.0.1:9"))
    with pytest.raises(WorkerFailed, match=r"Cannot reach 127\.0\.0\.1:9 .* within 4 s.*offbeat switch serve"):
        run_workers(2, train, plan)


def test_a_wrong_token_is_refused() -> None:
    with served_switch(Token(b"a" * 32)) as address:
        plan = offbeat.Plan(fabric=offbeat.Switch(address))
        with pytest.raises(WorkerFailed, match="token"):
            run_workers(2, train, plan)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: offbeat.Switch("nowhere"), "host:port"),
        *(
            (lambda address=address: offbeat.Switch(address), "port from 1 to 65535")
            for address in ("a:99999", "a:0", "a:\u0663", "a b:1", "\n:1", "a:1\n", ":1", None)
        ),
        (lambda: offbeat.Switch("127.0.0.1:1", values=100), "multiple of 16"),
        (lambda: offbeat.Switch("127.0.0.1:1", slots=100), "power of two"),
        (lambda: offbeat.Switch("127.0.0.1:1", window=300), "twice as many"),
        (lambda: offbeat.Plan(sync=offbeat.RoundRobin(), fabric=offbeat.Switch("127.0.0.1:1")), "gives no turns"),
        *(
            (lambda sync=sync: offbeat.Plan(sync=sync, fabric=offbeat.Switch("127.0.0.1:1")), "at most 62 fit")
            for sync in (offbeat.SSP(63), offbeat.SSP(200), offbeat.DSSP(2, 200))
        ),
        (
            lambda: offbeat.Plan(fabric=offbeat.Switch("127.0.0.1:1")).swapped('[sync]\nkind = "SSP"\nbound = 200'),
            "at most 62 fit",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_plan_is_made(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(PlanError, match=says):
        make()
