"""A shard beside every worker, in real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer
from offbeat.sync import ASP, BSP, SSP, LocalSGD, OuterSGD, Policy, RoundRobin
from tests.workers import run_workers

pytestmark = pytest.mark.timeout(180)  # two jobs in a test, with up to three servers each
BESIDE, SINGLE = ParameterServer(block_bytes=4096, collocated=True), ParameterServer(block_bytes=4096)
WORLD, STEPS = 3, 12


def shards() -> list[int]:
    """Process ids of the shards that this worker has started."""
    mine = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and "offbeat.cli.shard_main" in (status.parent / "cmdline").read_text():
                mine.append(int(status.parent.name))
        except OSError:  # it has ended
            continue
    return mine


def train(policy: Policy, fabric: ParameterServer, width: int = 60) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 3))
    generator = torch.Generator().manual_seed(rank)
    target = torch.randn(20, 3, generator=torch.Generator().manual_seed(99))
    losses = []
    with offbeat.init(offbeat.Plan(sync=policy, fabric=fabric)) as run:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        replica, optimizer = run.prepare(net, optimizer)
        started = shards()
        for _ in range(STEPS):
            x = torch.randn(64, 20, generator=generator)
            loss = F.cross_entropy(replica(x), (x @ target).argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        run.settle()
        state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return {"state": state, "losses": losses, "shards": started}


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BSP(), LocalSGD(3, after=3, outer=OuterSGD())], ids=repr)
def test_shards_beside_the_workers_have_the_bits_of_one(policy: Policy) -> None:
    beside, single = (run_workers(WORLD, train, policy, fabric, timeout_s=120) for fabric in (BESIDE, SINGLE))
    assert [len(one["shards"]) for one in beside] == [1, 1, 1], "one beside every worker"
    assert [len(one["shards"]) for one in single] == [1, 0, 0]
    assert all(equal(ours["state"], single[0]["state"]) for ours in [*beside, *single])


@pytest.mark.parametrize(
    ("policy", "width"),
    [
        pytest.param(ASP(), 60, marks=pytest.mark.slow),
        (RoundRobin(slots=WORLD), 60),
        pytest.param(SSP(bound=1), 4, marks=pytest.mark.slow),  # 4: fewer blocks than shards
    ],
    ids=str,
)
def test_every_policy_trains_on_them(policy: Policy, width: int) -> None:
    results = run_workers(WORLD, train, policy, BESIDE, width, timeout_s=120)
    assert all(equal(result["state"], results[0]["state"]) for result in results), "equal after settle"
    for result in results:
        assert sum(result["losses"][-3:]) < sum(result["losses"][:3]), result["losses"]


def loses_a_worker(victim: int) -> tuple[int, bool, float]:
    rank = int(os.environ["RANK"])
    net = nn.Linear(2000, 2)
    with offbeat.init(offbeat.Plan(sync=ASP(), fabric=BESIDE)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.001))
        note = Path(os.environ["OFFBEAT_STORE"] + ".shard")
        for step in range(40):
            if (rank, step) == (victim, 10):
                note.with_suffix(".part").write_text(str(shards()[0]))
                note.with_suffix(".part").rename(note)
                os.kill(os.getpid(), signal.SIGKILL)
            replica(torch.randn(4, 2000)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = run.mean(1.0)
        deadline_s = time.monotonic() + 20
        while not note.exists():
            assert time.monotonic() < deadline_s, "the fault has not fired"
            time.sleep(0.01)
        serves = "offbeat.cli.shard_main" in Path(f"/proc/{note.read_text()}/cmdline").read_text()
        return run.step, serves, mean


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_that_dies_leaves_its_shard_behind(victim: int) -> None:
    for rank, result in enumerate(run_workers(WORLD, loses_a_worker, victim, faulty=victim, timeout_s=120)):
        if rank != victim:
            assert result == (40, True, 1.0)


def with_servers() -> str:
    os.environ["OFFBEAT_SERVERS"] = "127.0.0.1:9"
    with pytest.raises(PlanError) as caught:
        offbeat.init(offbeat.Plan(fabric=BESIDE))
    return str(caught.value)


def test_a_job_with_servers_refuses_collocated_shards() -> None:
    for said in run_workers(2, with_servers):
        assert said.startswith("Cannot start shards beside the workers: this job has a server, at 127.0.0.1:9.")
