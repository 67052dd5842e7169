"""Another policy while training, in real processes: nothing is lost, nothing counts twice, all know of it."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, Policy, RoundRobin
from tests.training.server_jobs import Counter, join, kept, serve, told, wait_for_snapshot
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

SERVER = ParameterServer(block_bytes=4096)
LR = 0.1
STEPS = 40
PATIENCE_S = 120.0  # starting a server takes long on a machine that does much else
# Without KSync, whose updates move the parameters by more than the samples in them are of a round.
POLICIES: tuple[Policy, ...] = (
    BSP(),
    ASP(),
    SSP(0),
    SSP(2),
    DSSP(1, 3),
    RoundRobin(),
    RoundRobin(strict=True),
    Hybrid(BSP(), ASP(), groups=2),
    LocalSGD(3),
)


def emitted(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(1000 * rank + step))


def swap_often(steps: int, every: int) -> dict[str, Any]:
    """Plain SGD adds up, so the final parameters tell whether each gradient was applied exactly once."""
    rank, told = int(os.environ["RANK"]), listen()
    chance = random.Random(0)
    model = nn.Linear(3000, 1, bias=False)
    nn.init.zeros_(model.weight)
    swaps = 0
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        _, optimizer = run.prepare(model, optimizer)
        for step in range(steps):
            (model.weight * emitted(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.03 if rank else 0.0)  # so that rank 0, which waits for each swap, is done first ...
            if rank == 0 and step % every == every - 1:
                swaps += 1
                # ... and what the others bring then weighs no more than before: with ASP rounds keep their size.
                others = [policy for policy in POLICIES if policy != run.plan.sync]
                run.swap(sync=ASP() if swaps * every == steps else chance.choice(others))
        run.settle()
        plan, rate = run.plan, run.state_dict()["plan"]
        return {
            "weight": model.weight.detach().clone().flatten(),
            "swaps": swaps,
            "plan": plan,
            "toml": rate,
            "told": told,
        }


@pytest.mark.timeout(120)
def test_a_hundred_swaps_lose_nothing() -> None:
    world, steps = 4, 200
    results = run_workers(world, swap_often, steps, 2, timeout_s=110)
    everything = torch.stack([emitted(rank, step) for rank in range(world) for step in range(steps)])
    assert results[0]["swaps"] == 100
    torch.testing.assert_close(results[0]["weight"], -LR * everything.sum(0) / world, rtol=1e-3, atol=1e-3)
    for one in results:
        assert torch.equal(one["weight"], results[0]["weight"]), "equal on all after settle"
        assert one["plan"] == results[0]["plan"]
        assert one["toml"] == results[0]["plan"].to_toml(), "a checkpoint has the plan that holds"


def swap_by_all() -> list[str]:
    """Every worker runs the same script."""
    model = nn.Linear(4, 1)
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        seen = []
        for step in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 2:
                run.swap(sync=SSP(2))
            seen.append(repr(run.plan.sync))
        run.settle()
        return seen


def test_all_may_ask_for_the_same() -> None:
    for seen in run_workers(3, swap_by_all):
        assert seen == ["BSP()"] * 2 + ["SSP(bound=2)"] * 4 or seen == ["BSP()"] * 3 + ["SSP(bound=2)"] * 3


def swap_for_what_cannot_be() -> list[str]:
    model = nn.Linear(4, 1)
    refusals = []
    with offbeat.init(offbeat.Plan(fabric=SERVER)) as run:
        with pytest.raises(PlanError) as caught:
            run.swap(sync=SSP(2))
        refusals.append(str(caught.value))
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        for changes in (
            {"sync": KSync(5)},
            {"nonfinite": "skip"},
            {"sync": RoundRobin(), "fabric": ParameterServer(collocated=True)},
        ):
            with pytest.raises(PlanError) as caught:
                run.swap(**changes)
            refusals.append(str(caught.value))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert run.plan.sync == BSP()
        run.settle()
    return refusals


def test_what_cannot_be_is_refused_and_the_old_plan_goes_on() -> None:
    for refusals in run_workers(2, swap_for_what_cannot_be):
        for refusal, says in zip(
            refusals,
            (
                "training has not begun",
                "Cannot make updates of 5 contributions with 2 workers",
                "Cannot swap 'pass' for 'skip' while training",
                "Cannot swap ParameterServer(",
            ),
            strict=True,
        ):
            assert says in refusal


# -- a server that is set back to before a swap ------------------------------------------------------------------------


def swap_and_kill(folder: Path, shards: int) -> tuple[str, list[str], float]:
    """Rank 0 kills a shard right after a swap, of which no snapshot knows; which policy decides in the end."""
    keepers = serve(folder, shards, snapshots=str(folder / "server"), every=1000, restarts=5)
    with join(BSP(), folder, PATIENCE_S) as run:
        counter = Counter(run)
        for step in range(STEPS):
            counter.step()
            if keepers and step == 10:
                wait_for_snapshot(folder / "server")
                run.swap(sync=SSP(2))
                os.kill(kept(keepers[-1]), signal.SIGKILL)
        run.settle()
        policies = [scene.policy for scene in scenes(run)]
        return repr(run.plan.sync), policies, counter.count


def scenes(run: offbeat.Run) -> list[Any]:
    server = run._session.server
    assert server is not None
    exchange = server.client.look()
    assert exchange.wait(timedelta(seconds=30))
    return list(exchange.scenes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_that_is_set_back_learns_from_its_workers_which_plan_holds(tmp_path: Path, shards: int) -> None:
    results = run_workers(2, swap_and_kill, tmp_path, shards, timeout_s=290)
    assert [mine for mine, _, _ in results] == ["SSP(bound=2)"] * 2
    assert [policies for _, policies, _ in results] == [["SSP(bound=2)"]] * 2
    texts = told(tmp_path, 0)
    assert any("The parameter server was restarted and resumes from version" in text for text in texts), "it fired"
    (rounds,) = {count for _, _, count in results}
    assert 0 < rounds <= STEPS
