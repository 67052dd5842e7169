"""Rules that compare whole contributions, over a parameter server in two shards, in real processes."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat import ParameterServer, Plan
from offbeat.audit import verify
from offbeat.history import HistoryLog, UpdateJudged
from offbeat.protocol.messages import pack
from offbeat.protocol.training import DensePayload, PushBlock
from offbeat.robust import CentredClipping, GeometricMedian, Krum, Mean, Rule
from offbeat.server.pushed_block import body_of
from offbeat.sync import KSync, LocalSGD
from offbeat.tensors import bytes_of
from tests.training.server_jobs import Counter, kept, kill, serve, told, wait_for_snapshot
from tests.training.test_server_restart import lost_in
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat.server.client.model_state import ModelState

pytestmark = pytest.mark.timeout(180)
WORLD, STEPS, LR = 5, 8, 0.2
LIARS = (0,)
DIES_AT = 3


def model() -> nn.Module:
    """Three blocks of 4096 bytes, over two shards."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 130), nn.Tanh(), nn.Linear(130, 3)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(100 * rank + step)).double()
    return x, x[:, :3].argmax(1)


def gradient(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of one worker, flat; liars turn theirs around."""
    net.zero_grad()
    x, y = batch(rank, step)
    F.cross_entropy(net(x), y).backward()
    flat = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
    return -6 * flat if rank in LIARS else flat


def loss(net: nn.Module) -> float:
    x, y = batch(99, 0)
    with torch.no_grad():
        return float(F.cross_entropy(net(x), y))


def simulate(rule: Rule, here: Callable[[int, int], bool] = lambda rank, step: True) -> nn.Module:
    """All workers in one loop, and the rule over whole gradients of those that are here in a step."""
    net = model()
    before = torch.zeros(sum(p.numel() for p in net.parameters())).double()
    for step in range(STEPS):
        stack = torch.stack([gradient(net, rank, step) for rank in range(WORLD) if here(rank, step)])
        before = rule(stack, reference=before if rule.needs_reference else None)
        for parameter, part in zip(net.parameters(), before.split([p.numel() for p in net.parameters()]), strict=True):
            parameter.data -= LR * part.view_as(parameter)
    return net


def train(folder: Path, plan: Plan, dies: int | None = None) -> list[torch.Tensor]:
    os.environ["OFFBEAT_HISTORY"] = str(folder / "history")
    serve(folder, 2, history=str(folder / "history"))
    net = model()
    with offbeat.init(plan, timeout=timedelta(seconds=3), run_dir=folder) as run:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        replica, optimizer = run.prepare(net, optimizer)
        for step in range(STEPS):
            x, y = batch(run.rank, step)
            F.cross_entropy(replica(x), y).backward()
            for parameter in net.parameters() if run.rank in LIARS else ():
                assert parameter.grad is not None
                parameter.grad.mul_(-6)
            if (run.rank, step) == (dies, DIES_AT):
                die_while_pushing(run)
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
        return [parameter.detach().clone() for parameter in net.parameters()]


def die_while_pushing(run: offbeat.Run) -> None:
    """The next contribution comes without its last block, and then this worker is gone."""
    server = run._session.server
    assert server is not None
    client = server.client

    def push(state: ModelState, clock: int) -> None:
        assert state.parts is not None
        assert len(state.parts) == 3
        for block, part in list(state.parts.items())[:-1]:
            link = client._links[state.shards[block]]
            link.send(pack(PushBlock(state.model, clock, block, DensePayload())), bytes_of(body_of(part)))
        asyncio.get_running_loop().call_later(0.3, kill, os.getpid())

    client._models._push = push  # type: ignore[method-assign]


def judgements(folder: Path) -> list[UpdateJudged]:
    return [one for one in HistoryLog(folder / "history" / "coordinator.log") if isinstance(one, UpdateJudged)]


def fabric() -> ParameterServer:
    return ParameterServer(block_bytes=4096)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Krum(1), GeometricMedian(), CentredClipping()], ids=repr)
def test_a_liar_moves_two_shards_no_further_than_the_rule_lets_it(rule: Rule, tmp_path: Path) -> None:
    results = run_workers(WORLD, train, tmp_path, Plan(fabric=fabric(), rule=rule))
    expected = simulate(rule)
    for got in results:
        for one, other in zip(got, expected.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-11)
    assert loss(expected) < loss(model()) < loss(simulate(Mean())), "the mean goes where the liar wants it"
    judged = judgements(tmp_path)
    assert [one.version for one in judged] == list(range(1, STEPS + 1))
    if rule == Krum(1):
        assert all(scale == 0 for one in judged for worker, _, scale in one.scales if worker in LIARS)
    verdict = verify(tmp_path / "history")
    assert verdict.holds, verdict.violations[0]
    assert (verdict.judged, verdict.applied + verdict.rejected) == (STEPS, STEPS * WORLD)
    assert verdict.rejected == ((WORLD - 1) * STEPS if rule == Krum(1) else 0)
    assert rule != Krum(1) or [verdict.by_rank[rank] for rank in LIARS] == [(STEPS, STEPS)] * len(LIARS)
    assert verdict.compared > 0, "replicas are equal"


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_pushes_is_not_judged(tmp_path: Path) -> None:
    rule, dies = GeometricMedian(), 3
    results = run_workers(WORLD, train, tmp_path, Plan(fabric=fabric(), rule=rule), dies, faulty=dies)
    expected = simulate(rule, lambda rank, step: rank != dies or step < DIES_AT)
    for rank, got in enumerate(results):
        for one, other in zip(got or (), expected.parameters(), strict=rank != dies):
            torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-11)
    assert [len(one.scales) for one in judgements(tmp_path)] == [WORLD] * DIES_AT + [WORLD - 1] * (STEPS - DIES_AT)
    verdict = verify(tmp_path / "history")
    assert verdict.holds, verdict.violations[0]
    assert (verdict.lost, verdict.in_part) == (1, 0)


@pytest.mark.parametrize("sync", [LocalSGD(2), KSync(4)], ids=repr)
def test_changes_and_the_first_k_are_judged(sync: Any, tmp_path: Path) -> None:
    results = run_workers(WORLD, train, tmp_path, Plan(sync=sync, fabric=fabric(), rule=GeometricMedian()))
    for got in results:
        for one, other in zip(got, results[0], strict=True):
            assert torch.equal(one, other)
    net = model()
    for parameter, value in zip(net.parameters(), results[0], strict=True):
        parameter.data.copy_(value)
    assert loss(net) < loss(model())
    verdict = verify(tmp_path / "history")
    assert verdict.holds, verdict.violations[0]
    assert verdict.judged == verdict.updates > 0


def count(folder: Path, steps: int, killed: int) -> float:
    """Rank 0 kills a shard after a snapshot; how many updates the parameters have at the end."""
    keepers = serve(folder, 2, snapshots=str(folder / "server"), every=5, restarts=5)
    plan = Plan(fabric=ParameterServer(block_bytes=4096, patience_s=120.0), rule=Krum(0))
    with offbeat.init(plan, timeout=timedelta(seconds=2), run_dir=folder) as run:
        counter = Counter(run)
        for step in range(steps):
            counter.step(2.0 if run.rank == 2 else 1.0)
            if keepers and step == killed:
                wait_for_snapshot(folder / "server")
                kill(kept(keepers[1]))
        run.settle()
        return counter.count


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shard_that_is_killed_comes_back_without_updates_that_were_held(tmp_path: Path) -> None:
    results = run_workers(3, count, tmp_path, 30, 12, timeout_s=290)
    (text,) = told(tmp_path, 0)
    assert text.startswith("The parameter server was restarted and resumes from version")
    (rounds,) = set(results)
    assert 3 * rounds + lost_in([text]) == 3 * 30
