"""Another policy while training, in real processes: nothing is lost, nothing counts twice, all know of it."""

from __future__ import annotations

import hashlib
import itertools
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
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, OuterSGD, Policy, RoundRobin
from tests.training.server_jobs import Counter, join, kept, serve, told, wait_for_snapshot
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat.fabric import FabricSpec

FABRICS: dict[str, FabricSpec] = {
    "group": offbeat.ProcessGroup(),
    "elastic": offbeat.Elastic(),
    "server": ParameterServer(block_bytes=4096),
}
LR = 0.1
STEPS = 40
PATIENCE_S = 120.0  # starting a server takes long on a machine that does much else
GROUP_POLICIES: tuple[Policy, ...] = (
    BSP(),
    LocalSGD(2),
    LocalSGD(3),
    LocalSGD(4, after=2),
    LocalSGD(5),
    LocalSGD(3, delay=1),
    LocalSGD(4, fragments=2),
    LocalSGD(4, delay=1, fragments=4),
)
# Without KSync, whose updates move the parameters by more than the samples in them are of a round.
SERVER_POLICIES: tuple[Policy, ...] = (
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


def open_run(fabric: str) -> offbeat.Run:
    return offbeat.init(offbeat.Plan(fabric=FABRICS[fabric]), timeout=timedelta(seconds=5))


def emitted(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(1000 * rank + step))


def swap_often(fabric: str, swaps: int, every: int) -> dict[str, Any]:
    """Plain SGD adds up, so the final parameters tell whether each gradient was applied exactly once."""
    rank, chance, held = int(os.environ["RANK"]), random.Random(0), []
    model = nn.Linear(3000, 1, bias=False)
    nn.init.zeros_(model.weight)
    with open_run(fabric) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        for step in range(swaps * every):
            if fabric != "server" and step % every == 0:
                policy, asker = chance.choice(GROUP_POLICIES), chance.choice([0, 1, 2, None])
                if asker in (None, rank):
                    run.swap(sync=policy)
            replica(emitted(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fabric == "server":
                time.sleep(0.03 if rank else 0.0)  # so that rank 0, which waits for each swap, is done first ...
                if rank == 0 and step % every == every - 1:
                    # ... and what the others bring then weighs no more than before: with ASP rounds keep their size.
                    others = [policy for policy in SERVER_POLICIES if policy != run.plan.sync]
                    run.swap(sync=ASP() if step == swaps * every - 1 else chance.choice(others))
            held.append(run.plan.sync)
        run.settle()
        return {
            "weight": model.weight.detach().clone().flatten(),
            "plan": run.plan,
            "toml": run.state_dict()["plan"],
            "swaps": sum(before != after for before, after in itertools.pairwise(held)),
        }


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("fabric", "world", "every"), [("group", 3, 7), ("elastic", 3, 7), ("server", 4, 2)])
def test_a_hundred_swaps_lose_nothing_and_count_nothing_twice(fabric: str, world: int, every: int) -> None:
    results = run_workers(world, swap_often, fabric, 100, every, timeout_s=110)
    everything = torch.stack([emitted(rank, step) for rank in range(world) for step in range(100 * every)])
    torch.testing.assert_close(results[0]["weight"], -LR * everything.sum(0) / world, rtol=1e-3, atol=1e-3)
    for one in results:
        assert torch.equal(one["weight"], results[0]["weight"]), "equal on all after settle"
        assert one["plan"] == results[0]["plan"]
        assert one["toml"] == results[0]["plan"].to_toml(), "a checkpoint has the plan that holds"
    # Without a server some policies are swapped for themselves.
    assert 50 < max(one["swaps"] for one in results) <= 100


def settle_or_swap(mark: Path) -> Policy:
    """Have rank 0 swap while the other one waits for it to settle."""
    with open_run("server") as run:
        model = nn.Linear(2, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        if run.rank:
            mark.touch()
        else:
            while not mark.exists():
                time.sleep(0.01)
            time.sleep(0.2)  # by then it has asked
            run.swap(sync=ASP())
        run.settle()
        return run.plan.sync


def test_who_waits_for_the_others_to_settle_goes_by_what_they_swap_to(tmp_path: Path) -> None:
    assert run_workers(2, settle_or_swap, tmp_path / "mark") == [ASP(), ASP()]


def swap_by_all(fabric: str, policy: Policy) -> list[str]:
    """Every worker runs the same script."""
    model = nn.Linear(4, 1)
    with open_run(fabric) as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        seen = []
        for step in range(6):
            replica(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 2:
                run.swap(sync=policy)
            seen.append(repr(run.plan.sync))
        run.settle()
        return seen


@pytest.mark.parametrize(
    ("fabric", "policy"), [("server", SSP(2)), pytest.param("elastic", LocalSGD(2), marks=pytest.mark.slow)]
)
def test_all_may_ask_for_the_same(fabric: str, policy: Policy) -> None:
    before, after = repr(BSP()), repr(policy)
    for seen in run_workers(3, swap_by_all, fabric, policy):
        assert seen in ([before] * 2 + [after] * 4, [before] * 3 + [after] * 3)


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "group": [
        ({"sync": SSP(2)}, "Cannot use SSP(bound=2) on ProcessGroup(): "),
        ({"bucket_bytes": 7}, "Cannot swap 26214400 for 7 while training"),
    ],
    "server": [
        ({"sync": KSync(5)}, "Cannot make updates of 5 contributions with 2 workers"),
        ({"nonfinite": "skip"}, "Cannot swap 'pass' for 'skip' while training"),
        ({"sync": RoundRobin(), "fabric": ParameterServer(collocated=True)}, "Cannot swap ParameterServer("),
    ],
}


def swap_for_what_cannot_be(fabric: str) -> list[str]:
    model, texts = nn.Linear(4, 1), []
    with open_run(fabric) as run:
        if fabric == "server":  # without one, the workers vote behind the first step
            with pytest.raises(PlanError, match="training has not begun"):
                run.swap(sync=LocalSGD(2))
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        for changes, _ in REFUSED[fabric]:
            with pytest.raises(PlanError) as caught:
                run.swap(**changes)
            texts.append(str(caught.value))
        replica(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert run.plan.sync == BSP()
        run.settle()
    return texts


@pytest.mark.parametrize("fabric", REFUSED)
def test_what_cannot_be_is_refused_and_the_old_plan_goes_on(fabric: str) -> None:
    for texts in run_workers(2, swap_for_what_cannot_be, fabric):
        for text, (_, says) in zip(texts, REFUSED[fabric], strict=True):
            assert says in text


# -- without a server --------------------------------------------------------------------------------------------------


def digest(model: nn.Module) -> str:
    parts = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(optimizer_name: str) -> list[str]:
    """Digests after each step; the data differ, so that optimizers differ after steps of the workers' own."""
    run = open_run("group")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    made: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=1e-3)
        if optimizer_name == "Adam"
        else torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    )
    prepared, optimizer = run.prepare(model, made)
    torch.manual_seed(run.rank)
    digests = []
    for step in range(30):
        if step == 8:
            run.swap(sync=LocalSGD(4, outer=OuterSGD()))
        if step == 18:
            run.swap(sync=BSP())
        prepared(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(model))
    run.close()
    return digests


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_replicas_are_equal_again_after_steps_of_their_own(optimizer: str) -> None:
    one, other = run_workers(2, train, optimizer)
    same = [a == b for a, b in zip(one, other, strict=True)]
    assert all(same[:9])
    assert not all(same[9:20])
    assert all(same[21:]), same  # what the optimizers had gathered was averaged, too


def ask_for_two_at_once() -> tuple[list[str], str]:
    said, model = listen(), nn.Linear(3, 3)
    with open_run("group") as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.swap(sync=LocalSGD(2 + run.rank))
        for _ in range(3):
            prepared(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return said, repr(run.plan.sync)


def test_of_two_plans_that_are_asked_for_at_once_neither_holds() -> None:
    results = run_workers(2, ask_for_two_at_once)
    assert [policy for _, policy in results] == ["BSP()"] * 2
    (text,) = itertools.chain.from_iterable(said for said, _ in results)
    assert "for 2 others at once" in text


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
        policies = [status.policy for status in job_status(run)]
        return repr(run.plan.sync), policies, counter.count


def job_status(run: offbeat.Run) -> list[Any]:
    server = run._session.server
    assert server is not None
    exchange = server.client.look()
    assert exchange.wait(timedelta(seconds=30))
    return list(exchange.value)


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
