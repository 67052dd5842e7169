"""From all-reduce that outlives its workers to a server and back: whoever is there goes over, and nothing is lost."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.audit import verify
from offbeat.engine.server_session import ServerSession
from offbeat.engine.server_sync import ServerSync
from offbeat.errors import PlanError
from offbeat.fabric import ParameterServer
from offbeat.sync import ASP, SSP
from tests.sum_model import LR, Adding, added
from tests.training.test_join import rank_here, wait_for
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

SERVER = ParameterServer(block_bytes=4096)
ELASTIC = offbeat.Plan(fabric=offbeat.Elastic())
WORLD = 4


def cross(early: int, late: int) -> tuple[float, float, list[str]]:
    """One may be lost before the server, one at it. The weight at the end, what it should be, and what was said."""
    said = listen()
    with offbeat.init(ELASTIC, timeout=timedelta(seconds=3)) as run:
        model = Adding(run, 30)
        for _ in range(3):
            model.step()
        if run.rank == early:
            os._exit(1)
        for _ in range(3):  # the others go on without it
            model.step()
        run.swap(sync=ASP(), fabric=SERVER)
        while not run.plan.is_served:
            model.step()
        for _ in range(5):
            model.step()
        if run.rank == late:
            os._exit(1)
        for _ in range(5):
            model.step()
        while run.plan.is_served:
            try:
                run.swap(ELASTIC)
                while run.plan.is_served:
                    model.step()
            except PlanError as error:  # another is being asked yet
                said.append(str(error))
                model.step()
        # What was lost with a worker is not looked at here: from now on each gradient counts.
        begun, before = model.steps, model.value
        for _ in range(5):
            model.step()
        run.swap(sync=SSP(2), fabric=SERVER)
        while not run.plan.is_served:
            model.step()
        for _ in range(5):
            model.step()
        run.settle()
        there = [rank for rank in range(WORLD) if rank not in (early, late)]
        return model.value, before + added(there, model.steps, begun), said


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (0, 2),
        *(pytest.param(*lost, marks=pytest.mark.slow) for lost in ((2, 0), (1, WORLD), (WORLD, 1), (WORLD, WORLD))),
    ],
)
def test_whoever_is_there_goes_to_a_server_and_back(early: int, late: int) -> None:
    results = run_workers(WORLD, cross, early, late, faulty={early, late} - {WORLD})
    left = [results[rank] for rank in range(WORLD) if rank not in (early, late)]
    assert len({value for value, _, _ in left}) == 1
    for value, expected, _ in left:
        assert value == pytest.approx(expected, rel=1e-9)
    said = list(itertools.chain(*(said for _, _, said in left)))
    moved = [text for text in said if "decides when workers may go on" in text]
    told = ["on Elastic(), not" in text for text in moved]
    if late == 0:  # what it had said before went with it
        assert told == [True, False], moved
    else:
        assert told == [False, True, False], moved
        assert any(f"Rank {early} died" in text for text in said) == (early < WORLD)
    assert any(f"Rank {late} had gone while there was a server" in text for text in said) == (late < WORLD)


def lose_first(where: str, folder: Path) -> tuple[float, list[str]]:
    """The first worker is lost while all go over to a server; the others then do so once more."""
    said, steps = listen(), 0
    model = nn.Linear(30, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    data = DataLoader(TensorDataset(torch.arange(600.0).reshape(-1, 1)), batch_size=1)
    with offbeat.init(ELASTIC, timeout=timedelta(seconds=3), run_dir=folder, history=folder / "history") as run:
        _, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5), data)
        if run.rank == 0:
            owner, name = LOST[where]
            setattr(owner, name, lambda *_, **__: os._exit(1))

        def step() -> None:
            nonlocal steps
            steps += 1
            model.weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        while not run.plan.is_served:
            for _ in itertools.islice(loader, 20):
                if steps in (3, 50):
                    run.swap(sync=SSP(4), fabric=SERVER)
                if not run.plan.is_served:
                    assert model.weight.detach().unique().item() == pytest.approx(plain(steps))
                step()
        assert steps > 50
        run.settle()
        return float(model.weight.detach().unique().item()), said


LOST: dict[str, tuple[type, str]] = {
    "before it opens the model": (ServerSync, "__init__"),
    "before it brings the model": (ServerSync, "load_state_dict"),
    "before it says that it has": (ServerSession, "take_over"),
}


def plain(steps: int) -> float:
    """Where SGD is after so many steps with a gradient of 1."""
    weight, momentum = 0.0, 0.0
    for _ in range(steps):
        momentum = 0.5 * momentum + 1.0
        weight -= LR * momentum
    return weight


@pytest.mark.parametrize(
    "where",
    [
        "before it brings the model",
        pytest.param("before it opens the model", marks=pytest.mark.slow),
        pytest.param("before it says that it has", marks=pytest.mark.slow),
    ],
)
def test_the_others_stay_where_they_are_if_the_first_is_lost_on_its_way(where: str, tmp_path: Path) -> None:
    results = run_workers(3, lose_first, where, tmp_path, faulty=0)
    told = [text for text in results[1][1] if "The plan stays as it is." in text or "decides when" in text]
    assert "Rank 0, which brings it to the server, is gone." in told[0], told
    assert "SSP(bound=4) decides when workers may go on" in told[1], told
    assert len({weight for weight, _ in results[1:]}) == 1
    verdict = verify(tmp_path / "history")
    assert verdict.holds, verdict.violations


def go_along(folder: Path) -> tuple[float, list[str]]:
    """A third one joins two, goes over to a server with them, and comes back."""
    said = listen()
    if rank_here() == 2:
        wait_for(folder / "begun")
    model = nn.Linear(3, 1, bias=False).double()
    with offbeat.init(ELASTIC, timeout=timedelta(seconds=3)) as run:
        prepared, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9))

        def step() -> None:
            prepared(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        (folder / "begun").touch()
        wants = run.rank == 0
        while not run.plan.is_served:
            if wants and any("Rank 2 has joined" in text for text in said):
                wants = False
                run.swap(sync=ASP(), fabric=SERVER)
            step()
        for _ in range(5):
            step()
        if run.rank == 2:
            run.swap(ELASTIC)
        while run.plan.is_served:
            step()
        for _ in range(3):
            step()
        return float(model.weight.detach().sum()), said


@pytest.mark.slow
def test_who_has_joined_goes_along(tmp_path: Path) -> None:
    results = run_workers(2, go_along, tmp_path, newcomers=1)
    assert len({value for value, _ in results}) == 1
    moved = [text for text in results[0][1] if "decides when workers may go on" in text]
    assert ["on Elastic(), not" in text for text in moved] == [False, True], moved


def compute(lost: int) -> list[list[int]]:
    """Which samples this worker has computed, by loop: the first begins without a server, the third without."""
    seen: list[list[int]] = []
    data = TensorDataset(torch.arange(240.0).reshape(-1, 1))
    model = nn.Linear(1, 1)
    with offbeat.init(ELASTIC, timeout=timedelta(seconds=3)) as run:
        prepared, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-9), DataLoader(data, batch_size=5, shuffle=True)
        )
        for epoch in range(4):
            seen.append([])
            for index, (x,) in enumerate(loader):
                if run.rank == 1 and index == 2 and epoch == 0:
                    run.swap(sync=SSP(3), fabric=SERVER)
                if run.rank == 1 and index == 5 and epoch == 1:
                    run.swap(ELASTIC)
                if run.rank == lost and epoch == 2 and index == 1:
                    os._exit(1)
                seen[-1] += x.flatten().int().tolist() if run.has_data else []
                prepared(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not run.plan.is_served
    return seen


@pytest.mark.slow
def test_leased_data_goes_over_and_each_sample_is_computed_once_in_an_epoch() -> None:
    results = run_workers(3, compute, 2, faulty=2)
    for epoch in (3,):  # of the others the lost one cannot tell
        seen = Counter(itertools.chain(*(results[rank][epoch] for rank in (0, 1))))
        assert seen == Counter(range(240)), epoch
    whole = run_workers(3, compute, 3)
    for epoch in range(4):
        assert Counter(itertools.chain(*(one[epoch] for one in whole))) == Counter(range(240)), epoch
