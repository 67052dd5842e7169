"""Steps that are hidden behind the next one where modules, workers and data are not as they were learnt."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from tests.training.test_scheduling import is_ahead, network, plan
from tests.workers import listen, run_workers

STEPS = 16  # of which seven are learnt from
STRIKES_AT = 11
TIMEOUT_S = 600.0  # of which nobody may be in need: a test has less


class Branches(nn.Module):
    """Two layers in an order that is told, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.last = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order:
            x = torch.tanh({"a": self.first, "b": self.second}[name](x))
        return torch.as_tensor(self.last(x))


def plan_of(hides: bool) -> offbeat.Plan:
    return offbeat.Plan(scheduling=offbeat.Priority(slice_bytes=400) if hides else None)


def branched(hides: bool, skips_on: int | None) -> tuple[list[torch.Tensor], bool]:
    """The parameters of a loop that turns the order around, and then leaves a layer out, on one worker or on all."""
    net = Branches()
    with offbeat.init(plan_of(hides)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(STEPS):
            order = "ba" if step in (9, 10, 13) else "ab"
            if step == STRIKES_AT and skips_on in (None, run.rank):
                order = "a"
            replica(torch.randn(5, 9, generator=generator), order).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.clone() for p in net.state_dict().values()], hides and is_ahead(run)


@pytest.mark.parametrize("skips_on", [None, 0, 1])
def test_modules_run_in_another_order_or_not_at_all(skips_on: int | None) -> None:
    hidden, usual = run_workers(2, branched, True, skips_on), run_workers(2, branched, False, skips_on)
    for (mine, was_ahead), (theirs, _) in zip(hidden, usual, strict=True):
        assert was_ahead
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, mine, hidden[0][0]))


def struck(fabric: str, how: str) -> tuple[str, int, list[float]]:
    """What becomes of a worker while another one fails with blocks on their way: the error, its steps and weights."""
    net = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    made = dataclasses.replace(plan(fabric), scheduling=offbeat.Priority(slice_bytes=1 << 16))
    steps = 0
    try:
        with offbeat.init(made, timeout=timedelta(seconds=TIMEOUT_S)) as run:
            replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
            for step in range(STEPS):
                strikes = run.rank == 1 and step == STRIKES_AT
                if strikes and how == "forward":
                    raise ValueError("raised in a forward pass")
                loss = replica(torch.ones(2, 200)).square().mean()
                if strikes and how == "backward":
                    next(net[3].parameters()).register_hook(lambda _: 1 / 0)
                loss.backward()
                optimizer.step()
                if strikes and how == "kill":
                    assert run._session.models.synchronizers[0]._gradients._flight is not None  # type: ignore[attr-defined]
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                steps += 1
            assert is_ahead(run)
            return "", steps, [float(p.double().sum()) for p in net.state_dict().values()]
    except OffbeatError as error:
        return str(error), steps, []


@pytest.mark.parametrize("how", [pytest.param("forward", marks=pytest.mark.slow), "backward", "kill"])
def test_who_fails_with_blocks_on_their_way_ends_all_soon_and_is_named(how: str) -> None:
    for said, steps, _ in (run_workers(3, struck, "group", how, faulty=1)[rank] for rank in (0, 2)):
        assert "ank 1" in said, said
        assert STRIKES_AT <= steps <= STRIKES_AT + 2


@pytest.mark.parametrize("how", [pytest.param("forward", marks=pytest.mark.slow), "backward", "kill"])
def test_elastic_workers_go_on_without_who_fails_with_blocks_on_their_way(how: str) -> None:
    first, _, last = run_workers(3, struck, "elastic", how, faulty=1)
    assert first[:2] == last[:2] == ("", STEPS)
    assert first[2] == last[2], "replicas are equal"


def uneven(hides: bool) -> tuple[list[torch.Tensor], bool]:
    """One worker is done before the others, within `join`, twice."""
    net = network()
    with offbeat.init(plan_of(hides)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        generator = torch.Generator().manual_seed(run.rank)
        was_ahead = False
        for steps in (12, 5):
            with replica.join():
                for _ in range(steps + 3 * run.rank):
                    replica(torch.randn(5, 16, generator=generator)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                was_ahead = hides and is_ahead(run)
        return [p.clone() for p in net.state_dict().values()], was_ahead


def test_uneven_inputs_come_to_the_same() -> None:
    hidden, usual = run_workers(2, uneven, True), run_workers(2, uneven, False)
    for (mine, was_ahead), (theirs, _) in zip(hidden, usual, strict=True):
        assert was_ahead
        assert all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, hidden[0][0], hidden[1][0]))


def loaded(hides: bool) -> list[torch.Tensor]:
    """A model that is set back by its own `load_state_dict`, right behind a step."""
    net = network()
    with offbeat.init(plan_of(hides)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3))
        start = copy.deepcopy(net.state_dict())
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(STEPS):
            replica(torch.randn(5, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (9, 12):
                net.load_state_dict(start)
        assert not hides or is_ahead(run)
        return [p.clone() for p in net.state_dict().values()]


def test_a_state_that_is_loaded_is_not_stepped_by_the_step_before() -> None:
    hidden, usual = run_workers(2, loaded, True), run_workers(2, loaded, False)
    assert all(
        torch.equal(mine, its)
        for one, other in zip(hidden, usual, strict=True)
        for mine, its in zip(one, other, strict=True)
    )


def compiled(how: str, hides: bool) -> tuple[list[torch.Tensor], bool, list[str]]:
    """A model that is compiled: as a whole, a part of it, a part by TorchScript, or around what `prepare` returned."""
    told, net = listen(), network()
    with offbeat.init(plan_of(hides)) as run:
        if how == "part":
            net[3].compile(backend="aot_eager")
        if how == "scripted":
            net[3] = torch.jit.script(net[3])
        model: Any = torch.compile(net, backend="aot_eager") if how == "whole" else net
        replica, optimizer = run.prepare(model, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        called = torch.compile(replica, backend="aot_eager") if how == "replica" else replica
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(STEPS):
            called(torch.randn(5, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.clone() for p in net.state_dict().values()], hides and is_ahead(run), told


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "how", ["part", "scripted", *(pytest.param(how, marks=pytest.mark.slow) for how in ("whole", "replica"))]
)
def test_a_compiled_model_is_waited_for_behind_backward(how: str) -> None:
    """What is hung on a module once it is compiled does not run: nobody would wait there for parameters."""
    hidden, usual = (run_workers(2, compiled, how, hides, timeout_s=100) for hides in (True, False))
    for (mine, was_ahead, told), (theirs, _, _) in zip(hidden, usual, strict=True):
        assert not was_ahead
        assert all(map(torch.equal, mine, theirs))
        assert any("the model is compiled" in text for text in told) or told == []
    assert any("the model is compiled" in text for _, _, told in hidden for text in told)
