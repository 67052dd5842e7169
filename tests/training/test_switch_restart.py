"""Whole jobs whose switch is killed, and started again at the same address: nothing is lost or counted twice."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import offbeat
from tests.switch.killed_switch import KilledSwitch
from tests.switch.local_switch import served_switch
from tests.workers import WorkerFailed, run_workers

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 16
TIMEOUT = timedelta(seconds=8)


def train(plan: offbeat.Plan, mark: Path | None, victim: int | None = None) -> tuple[list[str], list[float]]:
    """Train on random images; digests of the parameters after each step, and when it was over.

    Args:
        mark: what rank 1 leaves in the middle.
        victim: the rank that is killed in the middle.
    """
    run = offbeat.init(plan, timeout=TIMEOUT)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = torch.Generator().manual_seed(run.rank)
    digests, ends = [], []
    for step in range(STEPS):
        x, y = torch.randn(32, 64, generator=data), torch.randint(10, (32,), generator=data)
        if run.rank == victim and step == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.rank == 1 and step == STEPS // 2 and mark is not None:
            mark.touch()
        nn.functional.cross_entropy(prepared(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
        digests.append(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
    run.close()
    return digests, ends


@pytest.mark.parametrize("sync", [offbeat.BSP(), offbeat.LocalSGD(2)])
def test_a_stream_goes_on_bit_for_bit_at_a_switch_that_was_restarted(
    sync: offbeat.BSP | offbeat.LocalSGD, tmp_path: Path
) -> None:
    with KilledSwitch() as switch:
        plan = offbeat.Plan(sync=sync, fabric=offbeat.Switch(switch.address, values=64), bucket_bytes=1 << 16)
        undisturbed = run_workers(3, train, plan, None)
        with switch.struck_at(tmp_path / "mark", switch.restart):
            results = run_workers(3, train, plan, tmp_path / "mark")
    assert [digests for digests, _ in results] == [digests for digests, _ in undisturbed]


def swap_and_move(plan: offbeat.Plan, folder: Path) -> str:
    """Train with a quorum, with sums of all while the switch is ended and started again, and with a quorum once more;
    a digest of the parameters.
    """
    run = offbeat.init(plan, timeout=TIMEOUT)
    torch.manual_seed(0)
    model = nn.Linear(3000, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def step() -> None:
        (prepared(torch.ones(1, 3000)).sum() * (run.rank + 1) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()

    for sync in (offbeat.BSP(), plan.sync):
        step()
        if run.rank == 0:
            run.swap(sync=sync)
        while run.plan.sync != sync:
            step()
        if sync == offbeat.BSP():
            (folder / "mark").touch()
            while run.mean(float((folder / "back").exists())) < 1:
                step()
    step()
    run.settle()
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    run.close()
    return digest


def test_a_job_with_a_quorum_outlives_a_planned_restart_under_another_policy(tmp_path: Path) -> None:
    def renew() -> None:
        switch.renew()
        (tmp_path / "back").touch()

    with KilledSwitch() as switch:
        plan = offbeat.Plan(sync=offbeat.KSync(2), fabric=offbeat.Switch(switch.address))
        with switch.struck_at(tmp_path / "mark", renew):
            results = run_workers(3, swap_and_move, plan, tmp_path)
    assert len(set(results)) == 1


def move(plan: offbeat.Plan, mark: Path, settles: bool) -> tuple[str, list[float]]:
    """Move parameters by as much as the worker's number says in each step; their digest, and by how much in all."""
    run = offbeat.init(plan, timeout=TIMEOUT)
    torch.manual_seed(0)
    model = nn.Linear(3000, 2, bias=False)
    start = model.weight.detach().clone()
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(STEPS):
        time.sleep(0.005 * run.rank)
        if settles and step == STEPS // 4:
            run.settle()
        if run.rank == 1 and step == STEPS // 2:
            mark.touch()
        (prepared(torch.ones(1, 3000)).sum() * (run.rank + 1) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.settle()
    weights = model.weight.detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    moved = (start - weights).unique().tolist()
    run.close()
    return digest, moved


def move_and_go(plan: offbeat.Plan, mark: Path) -> tuple[str, list[float]]:
    """As `move`, but rank 2 has left long before the others, who go on without it."""
    run = offbeat.init(plan, timeout=TIMEOUT)
    torch.manual_seed(0)
    model = nn.Linear(3000, 2, bias=False)
    start = model.weight.detach().clone()
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(4 if run.rank == 2 else STEPS):
        if run.rank == 1 and step == STEPS - 4:
            mark.touch()
        time.sleep(0 if run.rank == 2 else 0.02)
        (prepared(torch.ones(1, 3000)).sum() * (run.rank + 1) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
    if run.rank != 2:
        run.settle()
    moved = (start - model.weight.detach()).unique().tolist()
    run.close()
    return "", moved


@pytest.mark.slow
def test_what_one_has_added_that_is_done_is_not_lost_with_the_switch(tmp_path: Path) -> None:
    with KilledSwitch() as switch:
        plan = offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.Switch(switch.address))
        with switch.struck_at(tmp_path / "mark", switch.restart):
            results = run_workers(3, move_and_go, plan, tmp_path / "mark", faulty=2)
    expected = 0.5 * (STEPS * (1 + 2) + 4 * 3) / 64 / 3
    for _, moved in results[:2]:
        assert moved == pytest.approx([expected] * len(moved), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "settles"),
    [(offbeat.SSP(2), True), (offbeat.SSP(0), False), (offbeat.ASP(), False), (offbeat.DSSP(1, 4), True)],
)
def test_a_table_has_every_change_once_at_a_switch_that_was_restarted(
    sync: offbeat.SSP | offbeat.ASP | offbeat.DSSP, settles: bool, tmp_path: Path
) -> None:
    with KilledSwitch() as switch:
        plan = offbeat.Plan(sync=sync, fabric=offbeat.Switch(switch.address))
        with switch.struck_at(tmp_path / "mark", switch.restart):
            results = run_workers(3, move, plan, tmp_path / "mark", settles)
    assert len({digest for digest, _ in results}) == 1
    expected = STEPS * 0.5 * (1 + 2 + 3) / 64 / 3
    assert results[0][1] == pytest.approx([expected] * len(results[0][1]), abs=1e-6)


def test_what_is_added_behind_a_settle_counts(tmp_path: Path) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address))
        results = run_workers(2, move, plan, tmp_path / "mark", True)
    assert len({digest for digest, _ in results}) == 1
    assert results[0][1] == pytest.approx([STEPS * 0.5 * (1 + 2) / 64 / 2] * len(results[0][1]), abs=1e-6)


@pytest.mark.slow
def test_the_others_go_on_without_who_is_lost_with_the_switch(tmp_path: Path) -> None:
    with KilledSwitch() as switch:
        plan = offbeat.Plan(fabric=offbeat.Switch(switch.address, values=64), bucket_bytes=1 << 16)
        with switch.struck_at(tmp_path / "mark", switch.restart):
            results = run_workers(3, train, plan, tmp_path / "mark", 2, faulty=2)
    assert results[0][0] == results[1][0]
    assert len(results[0][0]) == STEPS


@pytest.mark.slow
def test_a_switch_that_does_not_come_back_is_told_in_a_sentence(tmp_path: Path) -> None:
    says = r"The switch is lost, and .* Cannot reach 127\.0\.0\.1:\d+ .*offbeat switch serve"
    with KilledSwitch() as switch, switch.struck_at(tmp_path / "mark", switch.kill):
        plan = offbeat.Plan(fabric=offbeat.Switch(switch.address))
        with pytest.raises(WorkerFailed, match=says):
            run_workers(2, train, plan, tmp_path / "mark")
