"""Whole jobs whose workers go on at their own pace, and whose changes a switch sums."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from torch import nn

import offbeat
from offbeat.audit import verify
from offbeat.cli.status_client import JobOnlooker
from offbeat.cli.top_view import TopView
from offbeat.errors import NumericsError, PlanError
from tests.switch.local_switch import served_switch
from tests.workers import WorkerFailed, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS, SLOW_S = 12, 0.06


def train(
    plan: offbeat.Plan, slow: int | None = None, victim: int | None = None, extra: int = 0
) -> tuple[str, list[float], list[float], float]:
    """Move parameters by as much as the worker's number says in each step; their digest once all are settled, their
    values, the times when steps ended, and when all were settled.

    Args:
        slow: the worker that computes longer.
        victim: the worker that is killed in the middle.
        extra: steps that rank 0 makes more than the others.
    """
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    torch.manual_seed(0)
    model = nn.Linear(300, 2, bias=False)
    start = model.weight.detach().clone()
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    ends = []
    for step in range(STEPS + (extra if run.rank == 0 else 0)):
        if run.rank == slow:
            time.sleep(SLOW_S)
        if run.rank == victim and step == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        (prepared(torch.ones(1, 300)).sum() * (run.rank + 1) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
    run.settle()
    settled_s = time.monotonic()
    weights = model.weight.detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    moved = (start - weights).unique().tolist()
    run.close()
    return digest, moved, ends, settled_s


@pytest.mark.parametrize("sync", [offbeat.SSP(2), offbeat.ASP(), offbeat.DSSP(1, 4)])
def test_every_change_counts_once_and_all_end_equal(sync: offbeat.SSP | offbeat.ASP | offbeat.DSSP) -> None:
    with served_switch() as address:
        results = run_workers(3, train, offbeat.Plan(sync=sync, fabric=offbeat.Switch(address)), 1)
    assert len({digest for digest, *_ in results}) == 1
    # Each worker moves by lr * (rank + 1) / 64 a step, of which a third counts.
    expected = STEPS * 0.5 * (1 + 2 + 3) / 64 / 3
    assert results[0][1] == pytest.approx([expected] * len(results[0][1]), abs=1e-6)


def test_nobody_gets_further_ahead_than_the_policy_says() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address))
        (_, _, fast, _), (_, _, slow, _) = run_workers(2, train, plan, 1)
    # Who has ended step s may begin the next once the slowest has ended step s - 2.
    for step in range(3, STEPS):
        assert fast[step] >= slow[step - 3] - 0.005, (step, fast, slow)
    assert fast[2] < slow[1], "it never went ahead"


@pytest.mark.slow
def test_one_that_makes_more_steps_is_not_held_up_by_those_that_are_through() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(1), fabric=offbeat.Switch(address))
        results = run_workers(2, train, plan, None, None, 6)
    assert len({digest for digest, *_ in results}) == 1


def looked_at(plan: offbeat.Plan, folder: Path) -> dict[str, Any]:
    """Train, rank 1 more slowly; what a look at the job shows in the middle."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4), run_dir=folder)
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    found: dict[str, Any] = {}
    for step in range(40):
        time.sleep(0.1 if run.rank else 0.01)
        (prepared(torch.ones(1, 300)).sum() / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 30 and run.rank == 0:
            with JobOnlooker(str(folder), {}) as looker:
                (status,) = looker.look(5.0) or ()
            console = Console(width=200, file=io.StringIO())
            view = TopView()
            view.add((status,))
            console.print(view)
            assert isinstance(console.file, io.StringIO)
            found = {"clocks": [seen.table for seen in status.workers], "screen": console.file.getvalue()}
    run.settle()
    run.close()
    return found


@pytest.mark.slow
def test_lag_and_waiting_are_seen_without_an_exchange(tmp_path: Path) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(3), fabric=offbeat.Switch(address))
        found, _ = run_workers(2, looked_at, plan, tmp_path)
    fast, slow = found["clocks"]
    assert fast.lag == 0
    assert 1 <= slow.lag <= 4
    assert fast.waited_s > 1.0, "rank 0 waits for nine tenths of each step of rank 1"
    assert slow.waited_s < 0.2
    assert 0 <= fast.silent_s < 1.5
    assert "lag" in found["screen"]
    assert "barrier" in found["screen"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    leads = {rank: [one["lead"] for one in records if one["kind"] == "step" and one["rank"] == rank] for rank in (0, 1)}
    assert max(leads[0]) == 3
    assert max(leads[1]) <= 1


def run_away(plan: offbeat.Plan, folder: Path) -> tuple[str, list[float], list[str]]:
    """Move parameters much further than the table reaches; their digest, how far they have moved, and what was said."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4), history=folder)
    torch.manual_seed(0)
    model = nn.Linear(300, 2, bias=False)
    start = model.weight.detach().clone()
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    said: dict[str, None] = {}
    for _ in range(60):
        time.sleep(0.01 * (1 + run.rank))
        (prepared(torch.ones(1, 300)).sum() * (run.rank + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        said |= {text: None for _, text in run._session.context.metrics.events if "empty one" in text}
    run.settle()
    weights = model.weight.detach()
    moved = (start - weights).unique().tolist()
    run.close()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), moved, list(said)


def test_a_table_that_fills_up_is_followed_by_an_empty_one(tmp_path: Path) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address))
        (one, moved, said), (other, _, _) = run_workers(2, run_away, plan, tmp_path)
    assert one == other
    # Ranks move by 0.5 and 1 a step, of which half counts: nearly six times as far as the first table reaches.
    assert moved == pytest.approx([60 * 0.75] * len(moved), rel=1e-6)
    assert len(said) >= 2, "one table cannot hold that"
    assert "half as far as its integers reach" in said[0]
    assert verify(tmp_path).holds, verify(tmp_path).violations


def ruined(plan: offbeat.Plan) -> str:
    """Train, with NaN in the gradient of rank 1's third step; what it ends with."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    try:
        for step in range(STEPS):
            (prepared(torch.ones(1, 300)).sum() * (math.nan if run.rank == 1 and step == 2 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except NumericsError as error:
        return str(error)
    assert bool(torch.isfinite(model.weight).all())
    run.close()
    return ""


def test_nan_is_raised_where_it_is_and_reaches_nobody() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.Switch(address))
        first, second = run_workers(2, ruined, plan)
    assert first == ""
    assert "NaN or Inf" in second


def test_the_others_go_on_without_a_worker_that_is_killed() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(1), fabric=offbeat.Switch(address))
        results = run_workers(3, train, plan, None, 1, faulty=1)
    (first, _, ends, _), (second, _, _, _) = results[0], results[2]
    assert first == second
    assert max(after - before for before, after in itertools.pairwise(ends)) < 1.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: dataclasses.replace(plan, codec=offbeat.Cast("bf16")), "whole changes"),
        (lambda plan: dataclasses.replace(plan, tuning=offbeat.BatchTuning()), "part of the data"),
        (lambda plan: dataclasses.replace(plan, sync=offbeat.RoundRobin()), "gives no turns"),
    ],
)
def test_what_a_table_cannot_do_is_refused(change: Callable[[offbeat.Plan], offbeat.Plan], says: str) -> None:
    plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch("127.0.0.1:1"))
    with pytest.raises(PlanError, match=says):
        change(plan)


def prepare(plan: offbeat.Plan, size: int, value: float) -> None:
    """Prepare a model of one parameter, and begin to train it."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    model = nn.Linear(size, 1, bias=False)
    nn.init.constant_(model.weight, value)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    prepared(torch.ones(1, size)).sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("size", "value", "says"), [(0, 0.0, "have no values"), (300, 1e38, "takes none of 2.123 or")])
def test_models_for_which_there_is_no_table_are_refused(size: int, value: float, says: str) -> None:
    with served_switch() as address, pytest.raises(WorkerFailed, match=says):
        run_workers(2, prepare, offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address)), size, value)


def swap(plan: offbeat.Plan, pace_s: float = 0.005) -> tuple[list[str], list[float], str]:
    """Train, and have rank 1 swap the policy in the middle; each step's policy, and when each step ended.

    Args:
        pace_s: that a step takes rank 0.
    """
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    policies, ends = [], []
    for step in range(3 * STEPS):
        time.sleep(0.02 if run.rank else pace_s)
        (prepared(torch.ones(1, 300)).sum() / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
        policies.append(repr(run.plan.sync))
        if run.rank == 1 and step == STEPS:
            run.swap(sync=offbeat.SSP(6))
    run.settle()
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    run.close()
    return policies, ends, digest


def test_a_swap_holds_for_all_from_the_same_step_on() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(1), fabric=offbeat.Switch(address))
        (first, fast, one), (second, slow, other) = run_workers(2, swap, plan)
    assert one == other
    assert first == second
    begins = first.index("SSP(bound=6)")
    assert STEPS < begins <= STEPS + 4
    assert first == ["SSP(bound=1)"] * begins + ["SSP(bound=6)"] * (3 * STEPS - begins)
    # The fast one is further ahead in the end than the first policy would have let it be.
    assert fast[-5] < slow[-8]


@pytest.mark.slow
def test_a_swap_takes_hold_soon_after_a_policy_without_a_bound() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.ASP(), fabric=offbeat.Switch(address))
        (first, _, one), (second, _, other) = run_workers(2, swap, plan, 0.018)
    assert one == other
    assert first == second
    assert STEPS < first.index("SSP(bound=6)") <= STEPS + 16, "a ring of 64 clocks has gone by"


def cross(
    plan: offbeat.Plan, policies: tuple[tuple[int, offbeat.SSP | offbeat.BSP | offbeat.LocalSGD], ...]
) -> tuple[list[str], list[str], list[float], list[float]]:
    """Train with momentum and an own share of the data, and have rank 0 swap the policy at some steps; each step's
    policy, digests of what is equal at the end, losses, and the momentum at the end."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    x = torch.randn(1440, 64, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    sampler: torch.utils.data.Sampler[int] = torch.utils.data.DistributedSampler(dataset, run.world, run.rank)
    prepared, optimizer, loader = run.prepare(
        model, optimizer, torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)
    )
    named: list[str] = []
    losses: list[float] = []
    swaps = dict(policies)
    for batch, labels in loader:
        time.sleep(0.01 * (run.rank + 1))
        if run.rank == 0 and len(losses) in swaps:
            run.swap(sync=swaps[len(losses)])
        loss = nn.functional.cross_entropy(prepared(batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        named.append(type(run.plan.sync).__name__)
    run.settle()
    state = [*model.parameters(), *model.buffers()]
    digests = [hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for t in state]
    momentum = [float(optimizer.state[p]["momentum_buffer"].sum()) for p in model.parameters()]
    run.close()
    return named, digests, losses, momentum


def test_a_job_goes_from_the_stream_to_the_table_and_back() -> None:
    policies = ((5, offbeat.SSP(4)), (14, offbeat.DSSP(1, 2)), (24, offbeat.BSP()))
    with served_switch() as address:
        results = run_workers(2, cross, offbeat.Plan(fabric=offbeat.Switch(address)), policies)
    (first, one, losses, own), (second, other, _, others) = results
    assert first == second
    assert list(dict.fromkeys(first)) == ["BSP", "SSP", "DSSP"]
    assert first[0] == first[-1] == "BSP"
    assert one == other
    assert own == others
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.slow
def test_a_job_may_begin_with_the_table() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address))
        results = run_workers(3, cross, plan, ((6, offbeat.LocalSGD(3)), (14, offbeat.SSP(1))))
    assert len({tuple(digests) for _, digests, *_ in results}) == 1
    assert list(dict.fromkeys(results[0][0])) == ["SSP", "LocalSGD"]
    assert results[0][0][-1] == "SSP"


def even_adam(plan: offbeat.Plan) -> tuple[str, float, float]:
    """Train on gradients of 1 and 1e-5 side by side, and go over to `BSP`; the policy then, and second moments."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    model = nn.Linear(512, 1, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.Adam(model.parameters()))
    x = torch.ones(1, 512)
    x[:, 1::2] = 1e-5
    for step in range(12):
        if run.rank == 0 and step == 4:
            run.swap(sync=offbeat.BSP())
        prepared(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = optimizer.state[model.weight]["exp_avg_sq"][0, :2].tolist()
    named = type(run.plan.sync).__name__
    run.close()
    return named, *moments


@pytest.mark.parametrize("sync", [offbeat.SSP(1), offbeat.LocalSGD(2)])
def test_optimizers_states_are_averaged_with_all_their_digits(sync: offbeat.SSP | offbeat.LocalSGD) -> None:
    with served_switch() as address:
        results = run_workers(2, even_adam, offbeat.Plan(sync=sync, fabric=offbeat.Switch(address)))
    for named, large, small in results:
        assert named == "BSP"
        assert small == pytest.approx(large * 1e-10, rel=1e-3, abs=0.0)


def to_a_server_and_back(plan: offbeat.Plan) -> tuple[list[tuple[str, bool]], list[str], float]:
    """Train, and have rank 0 swap the fabric twice; by which plan all went, and whether there was a server; what was
    said of that; and the sum of the parameters at the end.
    """
    run = offbeat.init(plan, timeout=timedelta(seconds=6))
    torch.manual_seed(0)
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5))
    seen: list[tuple[str, bool]] = []
    said: dict[str, None] = {}
    step = 0
    while not (len(dict.fromkeys(seen)) > 3 and len(seen) - seen.index(seen[-1]) > 5):
        time.sleep(0.02)
        (prepared(torch.ones(2, 300)).sum() * (run.rank + 1) / 640).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.rank == 0 and step == 5:
            run.swap(sync=offbeat.SSP(2), fabric=offbeat.ParameterServer())
        if run.rank == 0 and run.plan.is_served and len(seen) - seen.index(seen[-1]) == 20:
            run.swap(sync=offbeat.SSP(1), fabric=plan.fabric)
        said |= {text: None for _, text in run._session.context.metrics.events}
        if run.plan.sync != offbeat.ASP():  # on its way from the server
            seen.append((f"{run.plan.sync!r} on {type(run.plan.fabric).__name__}", run._session.server is not None))
        step += 1
    run.settle()
    total = float(model.weight.detach().double().sum())
    run.close()
    return list(dict.fromkeys(seen)), list(said), total


@pytest.mark.slow
def test_a_job_goes_from_the_table_to_a_server_and_back_and_says_whose_momentum_it_is() -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address))
        (seen, said, one), (others, _, other) = run_workers(2, to_a_server_and_back, plan)
    assert (
        seen
        == others
        == [
            ("SSP(bound=2) on Switch", False),
            ("BSP() on Switch", False),
            ("SSP(bound=2) on ParameterServer", True),
            ("SSP(bound=1) on Switch", False),
        ]
    )
    assert one == other
    assert any("momentum is that of all workers' gradients again" in text for text in said)
    back = [text for text in said if "SSP(bound=1) decides" in text and "From step" in text]
    assert "its momentum is that of its own gradients" in back[0]


def leave_for_another_fabric(plan: offbeat.Plan) -> str:
    """Leave the server for a switch that the workers have not met for; the refusal."""
    run = offbeat.init(plan, timeout=timedelta(seconds=6))
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    refusal = ""
    for step in range(6):
        prepared(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        if run.rank == 0 and step == 2:
            try:
                run.swap(fabric=offbeat.Switch("127.0.0.1:1"))
            except PlanError as error:
                refusal = str(error)
    run.close()
    return refusal


def test_a_switch_that_the_workers_have_not_met_for_is_refused() -> None:
    plan = offbeat.Plan(sync=offbeat.BSP(), fabric=offbeat.ParameterServer())
    refusal, _ = run_workers(2, leave_for_another_fabric, plan)
    assert "the workers have met for ProcessGroup()" in refusal


def resumed(plan: offbeat.Plan, folder: Path, steps: int, loads: bool) -> tuple[str, str]:
    """Train with momentum; digests of the parameters at the beginning and at the end."""
    run = offbeat.init(plan, timeout=timedelta(seconds=4))
    torch.manual_seed(5 if loads else 0)
    model = nn.Linear(300, 2, bias=False)
    prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    kept = offbeat.Checkpoints(run, folder, model=model, optimizer=optimizer)
    assert kept.load() == loads
    begun = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    with prepared.join():  # rank 0 makes more steps
        for _ in range(steps + (not run.rank)):
            (prepared(torch.ones(1, 300)).sum() * (run.rank + 1) / 640).backward()
            optimizer.step()
            optimizer.zero_grad()
    run.settle()
    kept.save()
    run.close()
    return begun, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()


def test_a_job_is_resumed_where_it_was_saved(tmp_path: Path) -> None:
    with served_switch() as address:
        plan = offbeat.Plan(sync=offbeat.SSP(2), fabric=offbeat.Switch(address))
        first, second = run_workers(2, resumed, plan, tmp_path, 6, False)
        assert first[1] == second[1] != first[0]
        third, fourth = run_workers(2, resumed, plan, tmp_path, 6, True)
    assert third[0] == fourth[0] == first[1]
    assert third[1] == fourth[1] != first[1]
