"""To a parameter server and back while training, in real processes: bits as without, nothing lost, nothing twice."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer, ProcessGroup
from offbeat.server.launch import ShardSettings, start_shard
from offbeat.sync import ASP, BSP, SSP, LocalSGD
from tests.sum_model import Adding, added
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from offbeat.scheduling import Scheduler

SERVER = ParameterServer(block_bytes=4096)
ON_SERVER = (BSP(), SSP(2), LocalSGD(3), ASP())
IN_GROUP = (BSP(), LocalSGD(2), LocalSGD(3))


# -- bits --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_server() -> Iterator[ParameterServer]:
    """One that waits for workers."""
    process, address = start_shard(ShardSettings(job="default"))
    try:
        yield ParameterServer(addresses=(address,), block_bytes=4096)
    finally:
        process.kill()
        process.wait()


def train(
    made: str, swaps: dict[int, offbeat.Plan], scheduling: Scheduler | None = None, epochs: int = 2
) -> tuple[list[torch.Tensor], list[str]]:
    """Some epochs over a loader whose last batches are uneven; the parameters after each step, and what was said."""
    said = listen()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5))
    data = TensorDataset(torch.randn(84, 20), torch.randn(84, 5))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if made == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    after: list[torch.Tensor] = []
    with offbeat.init(offbeat.Plan(scheduling=scheduling)) as run:
        prepared, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
        for _ in range(epochs):
            for x, y in loader:
                if (plan := swaps.get(len(after))) and run.rank == 0:
                    run.swap(plan)
                nn.functional.mse_loss(prepared(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if len(after) % 5 == 2:  # the others with a step under way, where there is a scheduler
                    run.synchronize()
                after.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        run.settle()
        assert run.step == len(after)
    return after, said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("made", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_server_for_a_while_changes_no_bit(made: str) -> None:
    plain = run_workers(2, train, made, {}, timeout_s=110)
    with a_server() as server:
        swaps = {2: offbeat.Plan(fabric=server), 8: offbeat.Plan()}
        crossed = run_workers(2, train, made, swaps, timeout_s=110)
    (mine, said), (other, _) = crossed
    assert len(mine) == len(plain[0][0]) == 12, "no step more or fewer"
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mine, plain[0][0], strict=True))
    moved = [text for text in said if ", on " in text]
    assert "on ParameterServer(" in moved[0]
    assert "on ProcessGroup()" in moved[1]
    assert " ms)." in moved[0], "it is said how long it took"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_with_a_scheduler_the_bits_are_those_of_the_same_swap_without() -> None:
    """In loops over a prepared loader, whose last batches are uneven."""
    told = []
    for scheduling in (None, offbeat.Prophet(1 << 10)):
        with a_server() as server:
            swaps = {8: offbeat.Plan(fabric=server, scheduling=scheduling), 25: offbeat.Plan(scheduling=scheduling)}
            told.append(run_workers(2, train, "sgd", swaps, scheduling, 8, timeout_s=80))
    (usual, _), (other, _) = told[0]
    (mine, said), (others, _) = told[1]
    for step in range(2, len(usual), 5):
        assert torch.equal(mine[step], usual[step]), step
        assert torch.equal(others[step], other[step]), step
    assert len(mine) == len(usual) == 48
    assert [", on ParameterServer(" in text for text in said if ", on " in text] == [True, False]


def hides_steps(run: offbeat.Run) -> bool:
    """Whether the next forward pass begins while a step is under way."""
    synchronizer: Any = run._session.models.synchronizers[0]
    gradients = synchronizer._gradients
    return gradients._return is not None if run.plan.is_served else gradients.is_ahead


def go_over(
    folder: Path, server: ParameterServer, scheduling: Scheduler | None, first: int, fabric: str
) -> tuple[list[torch.Tensor], list[tuple[bool, bool]]]:
    """To a server, and back; the parameters in the end, and behind each step: is there a server, and are steps hidden?

    Args:
        first: rank of the worker that, with a scheduler, has made a step more when the other one wants to go back.
    """
    steps, behind = [], {0}
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    group = offbeat.Elastic() if fabric == "elastic" else offbeat.ProcessGroup()
    plans = {at: offbeat.Plan(fabric=made, scheduling=scheduling) for at, made in ((12, server), (40, group))}
    with offbeat.init(plans[40]) as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(70):
            if step in plans and run.rank == 1 - first:
                while step == 40 and scheduling is not None and not (folder / "ahead").exists():
                    time.sleep(0.01)
                run.swap(plans[step])
            prepared(torch.randn(5, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 40 and run.rank == first:
                (folder / "ahead").touch()
            steps.append((run.plan.is_served, scheduling is not None and hides_steps(run)))
            behind.add(run.step - run._session.models.synchronizers[0].number if run.plan.is_served else 0)
        assert len(behind) == 2, "what is under way counts, too"
        run.synchronize()
        return [p.detach().clone() for p in model.parameters()], steps


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("first", "fabric"), [(0, "group"), (1, "group"), (1, "elastic")])
def test_a_step_under_way_is_at_its_end_before_all_go_over(tmp_path: Path, first: int, fabric: str) -> None:
    """The one that is ahead has brought its part of an update, of which the other has still to bring its own."""
    told = []
    for scheduling in (None, offbeat.Prophet(1 << 10)):
        (tmp_path / "ahead").unlink(missing_ok=True)
        with a_server() as server:
            told.append(run_workers(2, go_over, tmp_path, server, scheduling, first, fabric, timeout_s=55))
    usual, hidden = told
    for (mine, steps), (theirs, _) in zip(hidden, usual, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, mine, hidden[0][0]))
        assert steps == hidden[0][1], "all went over behind the same steps"
        runs = [(is_there, hides) for (is_there, hides), _ in itertools.groupby(steps)]
        assert runs == [(False, False), (False, True), (True, False), (True, True), (False, False), (False, True)]
        assert steps[40] == (True, True), "whoever wants to go back has a step to bring that the other has brought"


# -- nothing is lost ---------------------------------------------------------------------------------------------------


def cross_often(crossings: int, every: int) -> tuple[float, int, list[str]]:
    """To a server and back again and again, by policies that are drawn."""
    said, chance = listen(), random.Random(1)
    with offbeat.init(offbeat.Plan()) as run:
        model = Adding(run, 500)

        def ask(is_served: bool) -> None:
            policy = chance.choice(ON_SERVER if is_served else IN_GROUP)
            if run.rank == 0:
                run.swap(sync=policy, fabric=SERVER if is_served else ProcessGroup())

        for _ in range(crossings):
            before = run.plan.is_served
            ask(before)
            for _ in range(every):
                model.step()
            ask(not before)
            while run.plan.is_served == before:  # all see it behind the same of their steps
                model.step()
        run.settle()
        return model.value, model.steps, said


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("crossings", "every"), [(3, 10), pytest.param(20, 30, marks=pytest.mark.slow)])
def test_each_gradient_is_applied_once_whatever_the_fabric(crossings: int, every: int) -> None:
    world = 3
    results = run_workers(world, cross_often, crossings, every, timeout_s=590)
    values, steps, _ = zip(*results, strict=True)
    assert len(set(steps)) == 1
    assert len(set(values)) == 1
    assert values[0] == pytest.approx(added(range(world), steps[0]), rel=1e-9)
    told = [text for text in results[0][2] if "decides when" in text]
    assert sum(", on ParameterServer(" in text for text in told) == (crossings + 1) // 2, told
    assert sum(", on ProcessGroup()" in text for text in told) == crossings // 2, told


def be_apart(folder: Path) -> tuple[float, int]:
    """Rank 1 is a step ahead, though both have brought as much: one of its contributions was of a step more."""
    with offbeat.init(offbeat.Plan(sync=LocalSGD(3), fabric=SERVER)) as run:
        model = Adding(run, 3)
        for _ in range(1 + run.rank):
            model.step()
        if run.rank == 1:
            (folder / "ahead").touch()
        else:
            while not (folder / "ahead").exists():
                time.sleep(0.01)
            run.swap(sync=BSP())
        for _ in range(8):
            model.step()
        if run.rank == 0:
            run.swap(offbeat.Plan())
        while run.plan.is_served:
            model.step()
        return model.value, model.steps


def test_who_comes_to_the_border_later_weighs_no_more_for_it(tmp_path: Path) -> None:
    (value, steps), other = run_workers(2, be_apart, tmp_path)
    assert other == (value, steps)
    assert value == pytest.approx(added((0, 1), steps), rel=1e-9)


# -- leased data -------------------------------------------------------------------------------------------------------


def lease(epochs: int) -> tuple[list[list[int]], list[str], list[int]]:
    """Which samples this worker computed in each of its loops."""
    said, seen, steps = listen(), [], []
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(101.0).reshape(-1, 1))
    with offbeat.init(offbeat.Plan(sync=SSP(3), fabric=SERVER)) as run:
        prepared, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-6), DataLoader(data, batch_size=5, shuffle=True)
        )
        for epoch in range(epochs):
            drawn: list[int] = []
            for index, (x,) in enumerate(loader):
                if run.rank == 0 and index == 3 and epoch == 1:
                    run.swap(offbeat.Plan())
                if run.rank == 0 and index == 3 and epoch == 3:
                    run.swap(sync=ASP(), fabric=SERVER)
                drawn += x.flatten().int().tolist() if run.has_data else []
                prepared(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(drawn)
            steps.append(len(drawn))
        run.settle()
    return seen, said, steps


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_leased_data_goes_over_where_a_loop_begins_and_each_sample_is_computed_once_in_an_epoch() -> None:
    (mine, said, _), (other, _, _) = run_workers(2, lease, 6, timeout_s=110)
    for epoch in range(6):
        assert sorted(mine[epoch] + other[epoch]) == list(range(101)), epoch
    assert any("on ProcessGroup()" in text for text in said)
    assert any("where the next loop over the data begins" in text for text in said)
    assert any("ASP() decides when workers may go on, not BSP() any more, on ParameterServer(" in text for text in said)


def lease_and_hide() -> tuple[list[torch.Tensor], list[list[int]], list[bool]]:
    """From a server that leases data to the group, with a scheduler.

    Returns:
        The parameters behind each loop, the samples that were computed in it, and whether there was a server then.
    """
    after, seen, there = [], list[list[int]](), []
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    data = TensorDataset(torch.linspace(-1, 1, 80).reshape(-1, 1), torch.arange(80))
    with offbeat.init(offbeat.Plan(fabric=SERVER, scheduling=offbeat.Prophet(1 << 10))) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
        for epoch in range(4):
            seen.append([])
            for step, (x, numbers) in enumerate(loader):
                seen[-1] += numbers.tolist()
                prepared(x).square().mean().backward()
                if epoch == 1 and step == 5 and run.rank == 0:
                    assert hides_steps(run)
                    run.swap(offbeat.Plan(scheduling=run.plan.scheduling))
                optimizer.step()
                optimizer.zero_grad()
            there.append(run.plan.is_served)
            assert hides_steps(run)
            run.synchronize()
            after.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        run.settle()
        return after, seen, there


@pytest.mark.timeout(120)
def test_leased_data_goes_over_with_a_scheduler_and_each_sample_is_computed_once_in_an_epoch() -> None:
    (mine, seen, there), (theirs, others, _) = run_workers(2, lease_and_hide, timeout_s=80)
    assert there == [True, True, False, False], "where a loop begins"
    # At a server who is through with a loop does not wait for the batches that another still has.
    together = [
        torch.equal(one, other) for one, other, is_served in zip(mine, theirs, there, strict=True) if not is_served
    ]
    assert together == [True, True]
    assert [sorted(one + other) for one, other in zip(seen, others, strict=True)] == [list(range(80))] * 4


def go_on(folder: Path, begin: bool) -> list[list[int]]:
    """Save in the middle of a loop, without the server that the job had begun with; go on with one."""
    seen: list[list[int]] = []
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(101.0).reshape(-1, 1))
    with offbeat.init(offbeat.Plan(sync=SSP(3), fabric=SERVER)) as run:
        prepared, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-6), DataLoader(data, batch_size=5, shuffle=True)
        )
        path = folder / f"{run.rank}.pt"
        if not begin:
            run.load_state_dict(torch.load(path, weights_only=False))
        for epoch in range(0 if begin else 1, 2 if begin else 3):
            seen.append([])
            for index, (x,) in enumerate(loader):
                if begin and run.rank == 0 and epoch == 0 and index == 2:
                    run.swap(offbeat.Plan())
                seen[-1] += x.flatten().int().tolist() if run.has_data else []
                prepared(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if begin and epoch == 1 and index == 4:
                    torch.save(run.state_dict(), path)
                    break
        run.settle()
    return seen


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_place_in_data_that_was_saved_without_the_server_is_gone_on_from_with_one(tmp_path: Path) -> None:
    (mine, other), (again, others) = (run_workers(2, go_on, tmp_path, begin, timeout_s=90) for begin in (True, False))
    assert sorted(mine[0] + other[0]) == list(range(101))
    assert len(mine[1]) == len(other[1]) == 25
    assert sorted(mine[1] + other[1] + again[0] + others[0]) == list(range(101))
    assert sorted(again[1] + others[1]) == list(range(101))


# -- what cannot be ----------------------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    """An optimizer that no server knows."""


def refused(made: type[torch.optim.SGD], *servers: ParameterServer) -> tuple[list[str], str, float]:
    """Rank r of the two wants the r-th server, or both the only one."""
    said = listen()
    model = nn.Linear(3, 3)
    with offbeat.init(offbeat.Plan(), timeout=timedelta(seconds=1)) as run:
        prepared, optimizer = run.prepare(model, made(model.parameters(), lr=0.1))
        for step in range(5):
            if step == 1:
                run.swap(fabric=servers[run.rank % len(servers)])
            prepared(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.mean(1.0) == 1.0
        return said, repr(run.plan.fabric), float(model.weight.detach().sum())


@pytest.mark.parametrize(
    ("made", "servers", "says"),
    [
        (Own, (SERVER,), "Cannot hold Own at a parameter server"),
        (torch.optim.SGD, (ParameterServer(addresses=("127.0.0.1:1",)),), "127.0.0.1:1"),
        (torch.optim.SGD, (SERVER, ParameterServer(patience_s=7.0)), "for 2 others at once"),
    ],
    ids=["an optimizer of one's own", "nobody there", "two at once"],
)
def test_what_cannot_be_is_refused_and_the_workers_go_on(
    made: type[torch.optim.SGD], servers: tuple[ParameterServer, ...], says: str
) -> None:
    one, other = run_workers(2, refused, made, *servers)
    assert [fabric for _, fabric, _ in (one, other)] == ["ProcessGroup()"] * 2
    assert one[2] == other[2]
    assert any(text.startswith("The plan stays as it is. ") and says in text for text in one[0]), one[0]


def refused_in(folder: Path) -> list[str]:
    """What says in the run's folder, and to the launcher, that there is a server, once it has turned out otherwise."""
    os.environ["OFFBEAT_OUTLIVES"] = str(folder / "outlives")
    model = nn.Linear(3, 3)
    with offbeat.init(offbeat.Plan(), timeout=timedelta(seconds=1), run_dir=folder) as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(5):
            if step == 1:
                run.swap(fabric=ParameterServer(addresses=("127.0.0.1:1",)))
            prepared(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert run.mean(1.0) == 1.0
        assert not run.plan.is_served
        return [name for name in ("server.json", "outlives") if (folder / name).exists()]


def test_of_a_server_that_nobody_reached_nothing_is_left(tmp_path: Path) -> None:
    """Else whoever looks at the job, joins it or swaps its policy would look for that server."""
    assert run_workers(2, refused_in, tmp_path) == [[], []]


def stay(folder: Path) -> tuple[list[str], str, float]:
    """Rank 1 is done early, so that the others cannot leave the server."""
    refusals: list[str] = []
    model = nn.Linear(3, 3)
    with offbeat.init(offbeat.Plan(sync=SSP(1), fabric=SERVER)) as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2 if run.rank == 1 else 6):
            prepared(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if step == 0 and run.rank == 1:
                (folder / "leaves").touch()
        while run.rank == 0 and not refusals:
            try:
                run.swap(offbeat.Plan())
                optimizer.step()
            except PlanError as error:
                refusals.append(str(error))
        return refusals, repr(run.plan), float(model.weight.detach().sum())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_is_left_stays_at_the_server(tmp_path: Path) -> None:
    (refusals, plan, _), _ = run_workers(2, stay, tmp_path, timeout_s=110)
    assert "rank 0 takes part now" in refusals[0] or "rank 1 is gone" in refusals[0]
    assert "fabric=ParameterServer(" in plan


def lose_one(folder: Path) -> tuple[list[str], str, int]:
    """Rank 2 dies where all have agreed to leave the server, before it comes to the border."""
    model = nn.Linear(3, 3)
    with offbeat.init(offbeat.Plan(sync=ASP(), fabric=SERVER)) as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in steps_of(run, folder):
            prepared(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if run.rank == 0 and step == 5:
                run.swap(offbeat.Plan())
                (folder / "agreed").touch()
        run.settle()
        return [], repr(run.plan), run.step


def steps_of(run: offbeat.Run, folder: Path) -> Iterator[int]:
    for step in range(20):
        if run.rank == 2 and step == 2:
            while not (folder / "agreed").exists():
                server = run._session.server
                assert server is not None
                server.plans.sync_point.wait(offbeat.run.run._TIMEOUT / 100)
            os._exit(1)
        yield step


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_if_one_is_lost_before_the_border_the_others_stay(tmp_path: Path) -> None:
    results = run_workers(3, lose_one, tmp_path, timeout_s=110, faulty=2)
    for _, plan, steps in results[:2]:
        assert "fabric=ParameterServer(" in plan
        assert "sync=ASP()" in plan
        assert steps == 20


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resume(server: ParameterServer, folder: Path, begin: int, end: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(20, 5)
    with offbeat.init(offbeat.Plan()) as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
        path = folder / f"{run.rank}.pt"
        if begin:
            saved = torch.load(path, weights_only=False)
            model.load_state_dict(saved["model"])
            run.load_state_dict(saved["run"])
        for step in range(begin, end):
            if step == max(2, begin):
                run.swap(fabric=server)
            prepared(torch.randn(4, 20, generator=torch.Generator().manual_seed(7 * step + run.rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 7:
                torch.save({"model": model.state_dict(), "run": run.state_dict()}, path)
        run.settle()
        return model.weight.detach().clone(), run.plan.is_served


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_checkpoint_made_after_a_swap_is_gone_on_from_with_the_first_plan(tmp_path: Path) -> None:
    with a_server() as one, a_server() as other:
        whole = run_workers(2, resume, one, tmp_path, 0, 12, timeout_s=90)
        again = run_workers(2, resume, other, tmp_path, 8, 12, timeout_s=90)
    assert [served for _, served in whole + again] == [True] * 4
    for weight, _ in whole + again:
        assert torch.equal(weight, whole[0][0])
