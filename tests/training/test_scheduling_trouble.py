"""Steps that are hidden behind the next one where modules, workers and data are not as they were learnt."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.errors import OffbeatError
from tests.stalled_thread import stall
from tests.training.test_scheduling import is_ahead, network, plan
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.slow
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


def struck_in_turns() -> tuple[int, list[float], list[bool]]:
    """What becomes of workers that train two models in turns while another is killed with blocks of both on their way:
    their number of steps, the parameters, and whether both were ahead.
    """
    torch.manual_seed(4)
    maker, judge = (
        nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 20)),
        nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 1)),
    )
    made = dataclasses.replace(plan("elastic"), scheduling=offbeat.Priority(slice_bytes=400))
    with offbeat.init(made, timeout=timedelta(seconds=TIMEOUT_S)) as run:
        (makes, makers), (judges, judging) = (
            run.prepare(one, torch.optim.SGD(one.parameters(), lr=0.05))[:2] for one in (maker, judge)
        )
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(STEPS):
            made_up = makes(torch.randn(5, 8, generator=generator))
            judging.zero_grad()
            judges(made_up.detach()).square().mean().backward()
            judging.step()
            makers.zero_grad()
            both: list[Any] = [one._gradients for one in run._session.models.synchronizers]
            if run.rank == 1 and step == STRIKES_AT:
                for gradients in both:
                    stall(gradients._thread, after=0)
            (judges(made_up) - 1).square().mean().backward()  # it reaches both
            if run.rank == 1 and step == STRIKES_AT:  # before the optimizer's step, behind which there may be a vote
                assert all(gradients._flight is not None for gradients in both)
                os.kill(os.getpid(), signal.SIGKILL)
            makers.step()
        run.synchronize()
        sums = [float(p.double().sum()) for model in (maker, judge) for p in model.parameters()]
        return step + 1, sums, [gradients.is_ahead for gradients in both]


@pytest.mark.slow
def test_two_models_of_elastic_workers_go_on_without_who_fails_with_blocks_of_both_on_their_way() -> None:
    """Two threads of each notice it, and wait for the same new generation."""
    first, _, last = run_workers(3, struck_in_turns, faulty=1)
    assert first == last
    assert first[0] == STEPS
    assert first[2] == [True, True]


def recomputes() -> tuple[list[list[torch.Tensor]], bool, list[str]]:
    """Buffers behind each step of a model that begins to compute a BatchNorm again in backward, when it is ahead."""
    told, net, was_ahead = listen(), network(), False
    with offbeat.init(plan_of(True)) as run:
        replica, optimizer = run.prepare(Recomputing(net), torch.optim.SGD(net.parameters(), lr=0.1))
        generator, buffers = torch.Generator().manual_seed(run.rank), []
        for step in range(STEPS):
            was_ahead = was_ahead or is_ahead(run)
            replica(torch.randn(5, 16, generator=generator), step >= STRIKES_AT).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.synchronize()
            buffers.append([buffer.clone() for buffer in net.buffers()])
        assert not is_ahead(run)
        return buffers, was_ahead, told


class Recomputing(nn.Module):
    """A network whose first layers may be computed a second time in backward."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
        x = checkpoint(self.net[:3], x, use_reentrant=False) if again else self.net[:3](x)
        return torch.as_tensor(self.net[3:](x))


def test_buffers_that_backward_begins_to_write_to_are_equal_all_the_same() -> None:
    (mine, was_ahead, told), (theirs, _, said) = run_workers(2, recomputes)
    assert was_ahead
    for one, other in zip(mine, theirs, strict=True):
        assert all(map(torch.equal, one, other))
    assert any("net.1." in text and "wait for the gradients after backward" in text for text in (*told, *said))


def counted(folder: Path) -> None:
    net = network()
    with offbeat.init(plan_of(True), run_dir=folder) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(STEPS):
            replica(torch.ones(5, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_each_step_counts_the_bytes_of_the_blocks_that_have_landed_in_it(tmp_path: Path) -> None:
    """The thread that carries blocks counts for itself: no byte is lost between it and the thread that trains."""
    run_workers(2, counted, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    *_, layout = (one["buckets"] for one in records if one["kind"] == "layout")
    # Of two workers each sends half of a sum twice: the gradients, and a trailer of five numbers and one per parameter.
    size_bytes = sum(bucket["size_bytes"] + 4 * (5 + len(bucket["parameters"])) for bucket in layout)
    for rank in range(2):
        sent = [one["bytes_sent"] for one in records if one["rank"] == rank and "waits" in one]
        assert len(sent) > 5
        assert sent[1:] == [size_bytes] * (len(sent) - 1)  # in the first there is what tells the bandwidth


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


@pytest.mark.slow
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


@pytest.mark.slow
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
