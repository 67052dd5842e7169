"""Local steps with a server: the same parameters as without one."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.fabric import FabricSpec, ParameterServer, ProcessGroup
from offbeat.sync import LocalSGD, OuterSGD, Policy
from tests.resume_check import is_the_same_when_resumed
from tests.workers import run_workers

pytestmark = pytest.mark.timeout(180)  # two jobs in a test, with up to three servers each
SERVER = ParameterServer(block_bytes=4096)
WORLD, STEPS = 2, 11
NESTEROV = OuterSGD(lr=0.7, momentum=0.9)
HEAVY_BALL = OuterSGD(lr=0.5, momentum=0.5, nesterov=False)
State = dict[str, torch.Tensor]


def model() -> nn.Module:
    """Convolutions in another memory order, so that elements of a parameter do not lie as its shape says."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 3))
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def batches(rank: int, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(steps)
    ]


def heavy(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    first, *others = net.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.003}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.01)


def plain(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05)


CASES = {
    "average": (LocalSGD(3), heavy),
    "every step": (LocalSGD(1), adamw),
    "after": (LocalSGD(2, after=3), heavy),
    "after, adamw": (LocalSGD(3, after=4), adamw),
    "after, nothing kept": (LocalSGD(3, after=4), plain),
    "nesterov": (LocalSGD(2, outer=NESTEROV), heavy),
    "heavy ball, after": (LocalSGD(3, after=2, outer=HEAVY_BALL), adamw),
}


def train(name: str, fabric: FabricSpec) -> list[State]:
    """Parameters and momenta at every third step, and after `settle` in the middle and twice at the end."""
    policy, make = CASES[name]
    net = model()
    seen: list[State] = []
    with offbeat.init(offbeat.Plan(sync=policy, fabric=fabric)) as run:
        replica, optimizer = run.prepare(net, make(net))
        for step, (x, y) in enumerate(batches(int(os.environ["RANK"]))):
            if step % 3 == 2:
                seen.append(copy.deepcopy(net.state_dict()))
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6:
                run.settle()
                seen.append(copy.deepcopy(net.state_dict()))
        for _ in range(2):
            run.settle()
            seen.append(copy.deepcopy(net.state_dict()))
        if policy.after < STEPS:
            kept = [optimizer.state[p] for p in net.parameters()]
            seen.append({f"{i}.{key}": value for i, one in enumerate(kept) for key, value in one.items()})
        assert run.step == STEPS
    return seen


LONG = {"every step", "after, nothing kept", "heavy ball, after"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in CASES]
)
def test_a_server_changes_no_bit(name: str) -> None:
    """With two workers the order of sums is the same."""
    without, served = run_workers(WORLD, train, name, ProcessGroup()), run_workers(WORLD, train, name, SERVER)
    for mine, theirs in zip(without, served, strict=True):
        assert len(mine) == len(theirs)
        for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            assert here.keys() == there.keys()
            for key, tensor in here.items():
                assert torch.equal(tensor, there[key]), (number, key, (tensor - there[key]).abs().max())
    settled, again = served[0][-3:-1]
    assert all(torch.equal(settled[key], again[key]) for key in settled), "settling twice moves nothing"
    assert all(torch.equal(settled[key], served[1][-3][key]) for key in settled), "all are equal"


def interrupted(stop: int) -> bool:
    """Between two averages, and with a new server."""
    plan = offbeat.Plan(sync=LocalSGD(4, outer=NESTEROV), fabric=SERVER)
    return is_the_same_when_resumed(plan, model, heavy, batches, stop)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_resumed_between_two_averages_is_the_uninterrupted_one() -> None:
    assert run_workers(WORLD, interrupted, 6, timeout_s=110) == [True] * WORLD


@pytest.mark.slow
def test_with_three_workers_only_the_order_of_sums_differs() -> None:
    name = "heavy ball, after"
    (without, *_), (served, *_) = (run_workers(3, train, name, fabric) for fabric in (ProcessGroup(), SERVER))
    for here, there in zip(without, served, strict=True):
        for key, tensor in here.items():
            torch.testing.assert_close(tensor, there[key], rtol=1e-3, atol=1e-4)


def uneven(fabric: FabricSpec) -> torch.Tensor:
    """Rank 1's batches have three times as many samples: its change weighs three times as much."""
    rank = int(os.environ["RANK"])
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    data = [torch.ones(3 if rank else 1, 1).double()] * 4
    with offbeat.init(offbeat.Plan(sync=LocalSGD(2), fabric=fabric)) as run:
        replica, optimizer, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), data)
        for x in loader:
            (replica(x) * (-1.0 if rank else 1.0)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.weight.detach()


@pytest.mark.parametrize("fabric", [SERVER, ProcessGroup()], ids=repr)
def test_a_change_weighs_as_many_samples_as_it_was_made_from(fabric: FabricSpec) -> None:
    for weight in run_workers(WORLD, uneven, fabric):
        assert float(weight) == pytest.approx(2 * (2 * 3 - 2 * 1) / 4)


def asks_in_between() -> tuple[State, State, float]:
    """Rank 1 has less data, and asks for a mean while rank 0 goes on for three rounds."""
    rank = int(os.environ["RANK"])
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    with offbeat.init(offbeat.Plan(sync=LocalSGD(2), fabric=SERVER)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))

        def go(steps: int) -> None:
            for _ in range(steps):
                replica(torch.ones(1, 1).double()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        go(8 if rank == 0 else 3)
        mean = run.mean(float(rank))
        before = copy.deepcopy(net.state_dict())
        run.settle()
    return before, dict(net.state_dict()), mean


def test_local_steps_outlive_what_the_others_bring_meanwhile() -> None:
    first, second = run_workers(WORLD, asks_in_between)
    # The first round moves both to -2; rank 0 goes on alone to -8. Rank 1 has made one step of its own: it is at -9.
    assert [float(one[0]["weight"]) for one in (first, second)] == [-8.0, -9.0]
    # Rank 1's change of 1 counts alone, since rank 0 has made no step since.
    assert [float(one[1]["weight"]) for one in (first, second)] == [-9.0, -9.0]
    assert first[2] == second[2] == 0.5


def poisoned(policy: Policy) -> tuple[State, State]:
    """Rank 1's third gradient is NaN."""
    rank = int(os.environ["RANK"])
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    plan = offbeat.Plan(sync=policy, fabric=SERVER, nonfinite="skip")
    with offbeat.init(plan, timeout=timedelta(seconds=5)) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        for step in range(4):
            x = torch.full((1, 2), float("nan") if (rank, step) == (1, 2) else 1.0)
            replica(x).sum().backward()
            if (rank, step) == (1, 2):
                assert net.weight.grad is not None
                assert bool(torch.isnan(net.weight.grad).all()), "the fault has fired"
            optimizer.step()
            optimizer.zero_grad()
        run.settle()
    return dict(net.state_dict()), {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (offbeat.BSP(), -4.0),  # rank 0's gradient counts alone in that step
        (LocalSGD(4), -(4 * 4 + 3 * 3) / 7),  # rank 1 makes three steps, and counts for three
        (LocalSGD(2, after=3), -(3 + (1 + 1) / 2)),
    ],
    ids=repr,
)
def test_nan_is_left_out(policy: Any, expected: float) -> None:
    for state, _ in run_workers(WORLD, poisoned, policy):
        assert state["weight"].tolist() == [pytest.approx([expected, expected], rel=1e-6)]
