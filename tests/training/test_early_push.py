"""Workers that push to a server while backward computes come to what those come to that push behind it."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer
from offbeat.sync import ASP, BSP, SSP, LocalSGD, Policy, RoundRobin
from tests.training.server_jobs import TIMEOUT_S, Counter, kept, kill, look, serve, wait_for_snapshot
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.protocol.status import WorkerStatus
    from offbeat.server.client.model_state import ModelState

TIMEOUT = timedelta(seconds=TIMEOUT_S)
STEPS = 16  # of which seven are learnt from


def plan(
    policy: Policy | None = None, *, early: bool = True, patience_s: float = 30.0, shards: int = 1
) -> offbeat.Plan:
    return offbeat.Plan(
        sync=policy or BSP(),
        fabric=ParameterServer(block_bytes=4096, patience_s=patience_s, collocated=shards > 1),
        scheduling=offbeat.Prophet() if early else None,
    )


def pushed_early(run: offbeat.Run) -> int:
    """Blocks of the contribution at hand that are pushed."""
    server = run._session.server
    assert server is not None
    server._loop.run(asyncio.sleep(0))  # which has heard of all by then
    return len(server.client.state(0).pushed)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 64, bias=False))


# -- the same as without -----------------------------------------------------------------------------------------------


def trained(shards: int, kind: str, early: bool) -> tuple[list[torch.Tensor], int]:
    """The parameters of a loop that does something between backward and the step, and steps with blocks pushed."""
    net, with_early = network(), 0
    with offbeat.init(plan(early=early, shards=shards)) as run:
        replica, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(STEPS):
            for _ in range(2 if kind == "accumulated" and step % 3 == 2 else 1):
                replica(torch.randn(5, 64, generator=generator)).square().mean().backward()
            if kind == "clipped" and step % 3 == 2:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if kind == "asked" and step % 3 == 2:
                assert run.mean(step) == step
            if kind == "left out" and step % 5 == 4:
                optimizer.zero_grad()
                continue
            if kind == "evaluated" and step % 2:
                with torch.no_grad():
                    replica(torch.ones(3, 64))
            with_early += pushed_early(run) > 0 or (early and kind == "asked" and step % 3 == 2)
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
        return [tensor.clone() for tensor in net.state_dict().values()], with_early


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "clipped", "asked", "accumulated", "left out", "evaluated"])
def test_the_bits_are_those_of_pushing_behind_backward(kind: str, shards: int) -> None:
    early, behind = (run_workers(2, trained, shards, kind, is_early, timeout_s=55) for is_early in (True, False))
    for (one, with_early), (other, without) in zip(early, behind, strict=True):
        assert all(map(torch.equal, one, other))
        assert without == 0
        assert with_early >= STEPS - 7 - 3, "most steps behind the first seven push early"


def clipped_always() -> tuple[int, int]:
    net, counts = network(), list[int]()
    with offbeat.init(plan()) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for _ in range(20):
            replica(torch.ones(5, 64)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            counts.append(pushed_early(run))
            optimizer.step()
            optimizer.zero_grad()
    return sum(count > 0 for count in counts), counts[-1]


def test_who_clips_in_each_step_pushes_behind_backward() -> None:
    assert run_workers(2, clipped_always) == [(8, 0), (8, 0)]


@pytest.mark.parametrize("policy", [RoundRobin(), LocalSGD(4)], ids=str)
def test_where_nothing_can_be_pushed_early_a_plan_says_so(policy: Policy) -> None:
    with pytest.raises(PlanError, match=r"Cannot schedule with Prophet.*use BSP\(\), ASP\(\)"):
        plan(policy)


# -- faults ------------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Layers whose gradients are ones, and of which some are complete before others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3000, 1, bias=False) for _ in range(4)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, times: float) -> torch.Tensor:
        return torch.cat([layer(torch.full((3000,), times)) for layer in self.layers])


class BlockCounter(Counter):
    """The same with several parameters, which are read by a forward pass."""

    def __init__(self, run: offbeat.Run) -> None:
        self.model = Sums()  # type: ignore[assignment]
        self.replica, self.optimizer = run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0))

    def backward(self, times: float = 1.0) -> None:
        self.replica(times).sum().backward()

    def step(self, times: float = 1.0) -> None:
        self.backward(times)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def count(self) -> float:
        values = torch.cat([value.flatten() for value in self.model.state_dict().values()]).unique()
        assert len(values) == 1, values
        return -float(values[0])


def dies_before_it_announces(folder: Path, policy: Policy, shards: int) -> tuple[float, list[WorkerStatus]]:
    """Rank 1 dies when it has pushed blocks that would move the parameters by ten times as much as others."""
    serve(folder, shards)
    with offbeat.init(plan(policy), timeout=TIMEOUT) as run:
        counter = BlockCounter(run)
        for step in range(STEPS):
            if run.rank == 1 and step == 12:
                counter.backward(10.0)
                server = run._session.server
                assert server is not None
                look(run)  # an answer of the server: what was pushed before is there, with one shard
                assert server.client.state(0).pushed, "the fault hits"
                kill(os.getpid())
            counter.step()
        run.settle()
        return counter.count, look(run)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "shards"),
    [(BSP(), 1), (BSP(), 2), (ASP(), 2), pytest.param(SSP(2), 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_who_dies_before_it_announces_leaves_nothing_behind(tmp_path: Path, policy: Policy, shards: int) -> None:
    (count, seen), _, (other, _) = run_workers(
        3, dies_before_it_announces, tmp_path, policy, shards, faulty=1, timeout_s=110
    )
    assert count == other, "all have the same parameters after settle"
    assert (seen[1].phase, seen[1].applied, seen[1].lost) == ("gone", 12, 0)
    if policy == BSP():
        assert count == STEPS


def dies_half_way(folder: Path, policy: Policy, shards: int) -> tuple[float, list[WorkerStatus], bool]:
    """Rank 1 announces a contribution, and dies when blocks with it have come back to others that compute."""
    serve(folder, shards)
    with offbeat.init(plan(policy), timeout=TIMEOUT) as run:
        counter = BlockCounter(run)
        for step in range(STEPS):
            if run.rank == 1 and step == 12:
                run.synchronize()  # of the step before
                die_with_the_last_block(run)
                counter.step(10.0)
            counter.step()
        run.settle()
        ahead = run._session.models.synchronizers[0]._gradients._return is not None  # type: ignore[attr-defined]
        return counter.count, look(run), ahead


def die_with_the_last_block(run: offbeat.Run) -> None:
    """Once all but one block of the next contribution have come back with it, this worker is gone."""
    server = run._session.server
    assert server is not None
    client, hear, push = server.client, server.client.hear, server.client._models._push_block
    last = max(client.state(0).shards.index(shard) for shard in set(client.state(0).shards))

    def push_but_one(state: ModelState, block: int, part: torch.Tensor, *, again: bool = False) -> None:
        if block != last:
            push(state, block, part, again=again)

    def hear_and_die(shard: int, message: Any) -> None:
        hear(shard, message)
        if client.state(0).missing == {last}:
            kill(os.getpid())

    client._models._push_block, client.hear = push_but_one, hear_and_die  # type: ignore[method-assign]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "shards"), [(BSP(), 1), (BSP(), 2), pytest.param(ASP(), 1, marks=pytest.mark.slow)], ids=str
)
def test_what_is_given_again_lands_behind_backward(tmp_path: Path, policy: Policy, shards: int) -> None:
    """Blocks with half a contribution are there before the next forward pass, which reads them; and then without it."""
    (count, seen, ahead), _, (other, _, _) = run_workers(
        3, dies_half_way, tmp_path, policy, shards, faulty=1, timeout_s=110
    )
    assert ahead
    assert count == other, "all have the same parameters after settle, in all elements"
    assert (seen[1].phase, seen[1].applied, seen[1].lost) == ("gone", 12, 1)
    if policy == BSP():
        assert count == STEPS


def server_dies(folder: Path, policy: Policy, shards: int, at: int) -> tuple[float, int, bool, WorkerStatus]:
    """Rank 0 kills a shard when blocks of the contribution at hand are pushed."""
    keepers = serve(folder, shards, snapshots=str(folder / "server"), every=3, restarts=5)
    hits, again = 0, False
    with offbeat.init(plan(policy, patience_s=90.0), timeout=TIMEOUT, run_dir=folder) as run:
        counter = BlockCounter(run)
        for step in range(2 * STEPS):
            counter.backward()
            if keepers and step == at:
                assert pushed_early(run), "the fault hits"
                wait_for_snapshot(folder / "server")
                os.kill(kept(keepers[-1]), signal.SIGKILL)
                hits += 1
            counter.optimizer.step()
            counter.optimizer.zero_grad()
        counter.backward()
        again = pushed_early(run) > 0
        counter.optimizer.step()
        run.settle()
        return counter.count, hits, again, look(run)[run.rank]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "shards"), [(BSP(), 1), pytest.param(ASP(), 2, marks=pytest.mark.slow), (BSP(), 2)], ids=str
)
def test_a_server_that_dies_meanwhile_goes_on(tmp_path: Path, policy: Policy, shards: int) -> None:
    results = run_workers(2, server_dies, tmp_path, policy, shards, 14, timeout_s=290)
    (count, hits, again, seen), (other, _, other_again, _) = results
    assert hits == 1
    assert count == other, "all elements agree, on all workers"
    assert again, "blocks are pushed early afterwards, too"
    assert other_again
    if policy == BSP():
        assert count == seen.applied
    assert seen.applied + seen.dropped + seen.lost == 2 * STEPS + 1, "each counts, or is reported"


# -- with data ---------------------------------------------------------------------------------------------------------


def with_leases(schedules: bool) -> tuple[list[int], bool]:
    """The samples that this worker has computed, out of data that the server leases."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    data = TensorDataset(torch.arange(400))
    seen: list[int] = []
    with offbeat.init(plan(early=schedules)) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=10, shuffle=True))
        for (numbers,) in loader:
            seen += numbers.tolist()
            replica(numbers.float().unsqueeze(1).expand(-1, 64) / 400).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ahead = run._session.models.synchronizers[0]._gradients._return is not None  # type: ignore[attr-defined]
    return seen, ahead


@pytest.mark.timeout(120)
def test_each_sample_is_computed_once() -> None:
    (one, ahead), (other, _) = run_workers(2, with_leases, True, timeout_s=55)
    assert ahead
    assert sorted(one + other) == list(range(400))
