"""Whole jobs on a switch whose updates are of the first k workers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.audit import verify
from offbeat.errors import PlanError
from offbeat.history import HistoryLog, ParametersAfter
from offbeat.switch.control_client import ControlClient
from tests.switch.local_switch import served_switch
from tests.training.test_switch_standstill import stand_still
from tests.workers import WorkerFailed, run_workers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

STEPS, SLOW_S = 10, 0.5


class Job:
    """A job whose gradients are known: in step s worker r has (r + 1) 2^-s for each of its parameters; steps of 1 add
    them up.
    """

    def __init__(self, plan: offbeat.Plan, folder: Path | None = None) -> None:
        self.run = offbeat.init(plan, history=folder, timeout=timedelta(seconds=4))
        torch.manual_seed(0)
        self.model = nn.Linear(700, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.replica, self.optimizer = self.run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.digests: list[str] = []
        self.ends: list[float] = []
        self.parameters: list[float] = []

    def step(self, number: int) -> None:
        gradient = (self.run.rank + 1) * 2.0**-number
        (self.replica(torch.ones(1, 700)).sum() * gradient).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.digests.append(hashlib.sha256(self.model.weight.detach().numpy().tobytes()).hexdigest())
        self.ends.append(time.monotonic())
        self.parameters.append(self.model.weight[0, 0].item())

    @property
    def residual(self) -> torch.Tensor:
        """What this worker has not sent; in the units of its gradients."""
        state = self.run._session.models.prepared[0].codec_state.state_dict()
        kept = state["gradients"]["weight"]["residual"] if state else torch.zeros(700)
        return kept * self.run.world


class Trained(NamedTuple):
    """What one worker tells of its training."""

    digests: list[str]
    ends: list[float]
    parameters: list[float]
    residual: torch.Tensor


def train(plan: offbeat.Plan, folder: Path, slow: int | None = None, victim: int | None = None) -> Trained:
    """Train.

    Args:
        folder: of the history.
        slow: the worker that computes longer in step 2.
        victim: the worker that is killed in the middle.
    """
    job = Job(plan, folder)
    for number in range(STEPS):
        if job.run.rank == slow and number == 2:
            time.sleep(SLOW_S)
        if job.run.rank == victim and number == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        job.step(number)
    trained = Trained(job.digests, job.ends, job.parameters, job.residual)
    job.run.close()
    return trained


def given(folder: Path) -> list[list[float]]:
    """For each step what each worker gave to the only bucket's update, by rank."""
    by_rank = {}
    for path in sorted(folder.rglob("worker-*")):
        log = HistoryLog(path)
        by_rank[log.header.rank] = [one for one in log if isinstance(one, ParametersAfter)]
    return [[one.given[0] for one in step] for step in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_nobody_waits_for_who_comes_too_late_and_all_have_the_same_bits(
    late: Literal["drop", "carry"], tmp_path: Path
) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.KSync(2, late), fabric=offbeat.Switch(address))
        results = run_workers(3, train, plan, tmp_path, 1)
    assert all(one.digests == results[0].digests for one in results)
    assert len(set(results[0].digests)) == STEPS
    first, slow, third = results
    assert max(first.ends[5], third.ends[5]) < slow.ends[2]
    result = verify(tmp_path)
    assert result.holds, result.violations
    assert result.checked == {1, 2, 3}
    shares, updates = given(tmp_path), -torch.tensor([0.0, *first.parameters], dtype=torch.float64).diff()
    assert all(sum(step) >= 2 for step in shares)
    assert not any(step[1] for step in shares[2:6])
    assert result.dropped == (late == "drop") * sum(step.count(0.0) for step in shares)
    if late == "drop":
        for number, (step, update) in enumerate(zip(shares, updates.tolist(), strict=True)):
            mean = sum((rank + 1) * share for rank, share in enumerate(step)) / sum(step) * 2.0**-number
            assert update == pytest.approx(mean, rel=1e-6)
        return
    whole = sum(2.0**-number for number in range(STEPS)) * (1 + 2 + 3)
    applied = sum(sum(step) * update for step, update in zip(shares, updates.tolist(), strict=True))
    kept = sum(one.residual[0].item() for one in results)
    assert applied + kept == pytest.approx(whole, abs=1e-5)


def wait_for_others(plan: offbeat.Plan, folder: Path, still_s: float) -> Trained:
    """Train with a worker that is stopped for a while in the middle."""
    job = Job(plan, folder)
    for number in range(STEPS):
        if job.run.rank == 1 and number == 2:
            stand_still("CONT", still_s)
        job.step(number)
    if job.run.rank == 0:
        with contextlib.closing(ControlClient(plan.fabric.address, role="onlooker")) as control:  # type: ignore[attr-defined]
            (one,) = control.status().jobs
            assert {member.worker: member.left_out > 0 for member in one.members} == {0: False, 1: True, 2: False}
    job.run.mean(0.0)
    trained = Trained(job.digests, job.ends, job.parameters, job.residual)
    job.run.close()
    return trained


@pytest.mark.parametrize("late", ["drop", "carry"])
def test_a_sum_waits_for_a_stopped_worker_for_as_long_as_the_plan_says(
    late: Literal["drop", "carry"], tmp_path: Path
) -> None:
    wait_s, still_s = 0.3, 1.5
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.KSync(1, late, wait_s), fabric=offbeat.Switch(address))
        results = run_workers(3, wait_for_others, plan, tmp_path, still_s)
    assert all(one.digests == results[0].digests for one in results)
    first, stopped, third = results
    shares = given(tmp_path)
    assert shares[:2] == [[1, 1, 1]] * 2, "nobody is late"
    assert shares[2:4] == [[1, 0, 1]] * 2, "the sum is closed without the one that is stopped"
    assert shares[-1] == [1, 1, 1], "it is back"
    for one in (first, third):
        took_s = [there - before for before, there in pairwise(one.ends[1:4])]
        assert all(wait_s <= took < still_s - wait_s for took in took_s), took_s
    assert stopped.ends[2] - stopped.ends[1] > still_s
    updates = -torch.tensor([0.0, *first.parameters], dtype=torch.float64).diff()
    assert updates[2].item() == pytest.approx((1 + 3) / 2 * 2.0**-2, rel=1e-6), "the mean is of those in it"
    result = verify(tmp_path)
    assert result.holds, result.violations
    if late == "carry":
        whole = sum(2.0**-number for number in range(STEPS)) * (1 + 2 + 3)
        applied = sum(sum(step) * update for step, update in zip(shares, updates.tolist(), strict=True))
        assert applied + sum(one.residual[0].item() for one in results) == pytest.approx(whole, abs=1e-5)


def test_a_worker_that_is_killed_stops_nobody(tmp_path: Path) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.KSync(2), fabric=offbeat.Switch(address))
        results = run_workers(3, train, plan, tmp_path, None, 1, faulty=1)
    first, _, third = results
    assert first.digests == third.digests
    assert len(first.digests) == STEPS
    # From then on updates are the means of the two that are left.
    updates = -torch.tensor(first.parameters, dtype=torch.float64).diff()
    assert updates[-1].item() == pytest.approx(2.0 ** -(STEPS - 1) * 2, rel=1e-5)
    result = verify(tmp_path)
    assert result.holds, result.violations


POLICIES = (
    offbeat.KSync(2, "carry"), offbeat.BSP(), offbeat.KSync(1), offbeat.LocalSGD(2), offbeat.KSync(2), offbeat.SSP(2),
    offbeat.KSync(2),
)  # fmt: skip


def swap(plan: offbeat.Plan, folder: Path) -> Trained:
    """Swap the policy again and again; one worker is late under each, but for the last."""
    job, number = Job(plan, folder), 0

    def step() -> None:
        nonlocal number
        if job.run.rank == 2 and number % 3 == 1:
            time.sleep(0.05)
        job.step(number)
        number += 1

    step()
    for policy in POLICIES:
        if job.run.rank == 0:
            job.run.swap(sync=policy)
        while job.run.plan.sync != policy:
            step()
        for _ in range(3):
            step()
    job.run.settle()
    digest = hashlib.sha256(job.model.weight.detach().numpy().tobytes()).hexdigest()
    trained = Trained([digest], job.ends, job.parameters, job.residual)
    job.run.close()
    return trained


@pytest.mark.slow
def test_the_policy_is_swapped_at_the_same_exchange_on_all(tmp_path: Path) -> None:
    with served_switch() as address:
        results = run_workers(3, swap, offbeat.Plan(fabric=offbeat.Switch(address)), tmp_path)
    assert all(one.digests == results[0].digests for one in results)
    assert not any(one.residual.any() for one in results), "what was carried went with the next policy's sums"
    result = verify(tmp_path)
    assert result.holds, result.violations


def go_on(plan: offbeat.Plan, folder: Path, steps: range) -> Trained:
    """Train with a worker that is always late, from a checkpoint if there is one; save one at the end."""
    job = Job(plan)
    checkpoints = offbeat.Checkpoints(job.run, folder, model=job.model, optimizer=job.optimizer)
    checkpoints.load()
    for number in steps:
        if job.run.rank == 2:
            time.sleep(SLOW_S)
        job.step(number)
    checkpoints.save()
    trained = Trained(job.digests, job.ends, job.parameters, job.residual)
    job.run.close()
    return trained


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_what_was_carried(tmp_path: Path) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.KSync(2, "carry"), fabric=offbeat.Switch(address))
        whole = run_workers(3, go_on, plan, tmp_path / "whole", range(4))
        run_workers(3, go_on, plan, tmp_path / "parts", range(2))
        resumed = run_workers(3, go_on, plan, tmp_path / "parts", range(2, 4))
    assert whole[2].residual[0].item() == pytest.approx(3 * (1 + 0.5 + 0.25 + 0.125))
    for one, other in zip(whole, resumed, strict=True):
        assert one.digests[2:] == other.digests
        assert torch.equal(one.residual, other.residual)


def loop(plan: offbeat.Plan, victim: int | None = None) -> tuple[int, str, str, str]:
    """Two loops over a prepared loader, with a worker that is late in each step; how many steps there were, digests of
    the parameters and of the buffers, and of the buffers once all have settled.
    """
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    data = TensorDataset(torch.randn(114, 16), torch.randint(2, (114,)))
    prepared, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data, batch_size=8, shuffle=True)
    )
    steps = 0
    for epoch in range(2):
        for x, y in loader:
            if run.rank == 2:
                time.sleep(0.02)
            if run.rank == victim and epoch == 0 and steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            nn.functional.cross_entropy(prepared(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

    def digest(tensors: Iterable[torch.Tensor]) -> str:
        return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()

    parameters, apart = digest(model.parameters()), digest(model.buffers())
    run.settle()
    even = digest(model.buffers())
    run.close()
    return steps, parameters, apart, even


@pytest.mark.parametrize("victim", [None, 1])
def test_loops_begin_together_and_buffers_are_even_once_all_settle(victim: int | None) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.KSync(2), fabric=offbeat.Switch(address))
        results = [one for one in run_workers(3, loop, plan, victim, faulty=victim) if one is not None]
    assert len(results) == (3 if victim is None else 2)
    assert {steps for steps, *_ in results} == {10}
    assert len({parameters for _, parameters, _, _ in results}) == 1
    assert len({apart for _, _, apart, _ in results}) == len(results)
    assert len({even for *_, even in results}) == 1


def adapt(plan: offbeat.Plan, seconds: float) -> tuple[str, str]:
    """Train with a worker that is late until it is left out; the policy in the end, and a digest of the parameters."""
    job, number, begun_s = Job(plan), 0, time.monotonic()
    while job.run.mean(time.monotonic() - begun_s) < seconds and job.run.plan.sync == plan.sync:
        for _ in range(10):
            time.sleep(0.05 if job.run.rank == 2 else 0.005)
            job.step(min(number, 60))
            number += 1
    sync = repr(job.run.plan.sync)
    job.run.close()
    return sync, job.digests[-1]


@pytest.mark.slow
def test_a_controller_lowers_the_quorum_while_one_worker_is_late() -> None:
    with served_switch() as address:
        controller = offbeat.AdaptQuorum(2, 3, too_late=0.4, window_s=0.5, least_s=0.5)
        plan = offbeat.Plan(sync=offbeat.KSync(3), fabric=offbeat.Switch(address), controller=controller)
        results = run_workers(3, adapt, plan, 20.0)
    assert {sync for sync, _ in results} == {repr(offbeat.KSync(2))}
    assert len({digest for _, digest in results}) == 1


def test_what_would_wait_for_all_is_refused() -> None:
    fabric = offbeat.Switch("127.0.0.1:1")
    with pytest.raises(PlanError, match="a switch adds float32: use Dense"):
        offbeat.Plan(sync=offbeat.KSync(2), fabric=fabric, codec=offbeat.Cast())
    with pytest.raises(PlanError, match="tell each other their times"):
        offbeat.Plan(sync=offbeat.KSync(2), fabric=fabric, tuning=offbeat.BatchTuning())


def prepare(plan: offbeat.Plan, kind: str) -> None:
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    model = nn.Embedding(100, 16, sparse=True) if kind == "sparse" else nn.Linear(300, 2).double()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("kind", "says"), [("sparse", "is sparse"), ("double", "adds float32")])
def test_models_whose_gradients_would_wait_for_all_are_refused(kind: str, says: str) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.KSync(1), fabric=offbeat.Switch(address))
        with pytest.raises(WorkerFailed, match=says):
            run_workers(2, prepare, plan, kind)
