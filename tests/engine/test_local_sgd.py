"""Local steps and averages, against a simulation of all workers in one process."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.sync import LocalSGD, OuterSGD
from tests.resume_check import is_the_same_when_resumed
from tests.workers import listen, run_workers

WORLD, STEPS = 2, 7
POLICIES = {
    "plain": LocalSGD(3),
    "late": LocalSGD(2, after=3),
    "outer": LocalSGD(2, outer=OuterSGD(lr=0.7, momentum=0.9)),
    "heavy ball": LocalSGD(3, outer=OuterSGD(lr=0.5, momentum=0.5, nesterov=False)),
    "delayed": LocalSGD(2, delay=1),
    "delayed, each step": LocalSGD(1, delay=1),
    "delayed, outer, late": LocalSGD(2, after=1, outer=OuterSGD(lr=0.7, momentum=0.9), delay=1),
    "fragments": LocalSGD(4, fragments=2),
    "delayed fragments": LocalSGD(4, outer=OuterSGD(lr=0.7, momentum=0.9), delay=1, fragments=2),
    "each parameter": LocalSGD(4, delay=1, fragments=4),
    "more than parameters": LocalSGD(6, outer=OuterSGD(), delay=1, fragments=6),
}
WEIGHTS_AND_BIASES = ["0.weight", "0.bias", "2.weight", "2.bias"]
FRAGMENTS = {
    1: [WEIGHTS_AND_BIASES],
    2: [WEIGHTS_AND_BIASES[:1], WEIGHTS_AND_BIASES[1:]],
    4: [[name] for name in WEIGHTS_AND_BIASES],
    6: [*([name] for name in WEIGHTS_AND_BIASES), [], []],
}


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (torch.randn(4, 6, generator=generator).double(), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(STEPS)
    ]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8)


def gradient_step(nets: list[nn.Module], data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for net, (x, y) in zip(nets, data, strict=True):
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()


Values = dict[str, torch.Tensor]


def simulate(policy: LocalSGD) -> tuple[list[Values], list[Values]]:
    """All workers in one loop; the definition, word for word. What each has, and what each has once all are settled."""
    nets = [model() for _ in range(WORLD)]
    optimizers = [optimizer_of(net) for net in nets]
    data = [batches(rank) for rank in range(WORLD)]
    anchor: dict[str, torch.Tensor] = {}
    momentum = {name: torch.zeros_like(p) for name, p in nets[0].named_parameters()}
    fragments = FRAGMENTS[policy.fragments]
    sent: dict[str, list[torch.Tensor]] = {}  # where each was, of what is on its way
    means: Values = {}
    own_steps = dict.fromkeys(momentum, 0)  # since the last average

    def send(names: list[str]) -> None:
        for name in names:
            sent[name] = [net.get_parameter(name).detach().clone() for net in nets]
            means[name] = torch.stack([anchor[name] - own for own in sent[name]]).mean(0)
            own_steps[name] = 0

    def land() -> None:
        for name, mean in means.items():
            if policy.outer is None:
                anchor[name] = anchor[name] - mean
            else:
                outer = policy.outer
                momentum[name] = outer.momentum * momentum[name] + mean
                ahead = mean + outer.momentum * momentum[name] if outer.nesterov else momentum[name]
                anchor[name] = anchor[name] - outer.lr * ahead
            for net, own in zip(nets, sent[name], strict=True):
                net.get_parameter(name).data.add_(anchor[name] - own)
        sent.clear()
        means.clear()

    for step in range(STEPS):
        gradient_step(nets, [data[rank][step] for rank in range(WORLD)])
        if policy.contributes(step) == "gradient":
            for ps in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([p.grad for p in ps]).mean(0)
                for p in ps:
                    p.grad = mean.clone()
        elif not anchor:
            anchor = {name: p.detach().clone() for name, p in nets[0].named_parameters()}
        for optimizer in optimizers:
            optimizer.step()
        if policy.contributes(step) != "gradient":
            own_steps.update({name: steps + 1 for name, steps in own_steps.items()})
        if policy.contributes(step) == "change":
            if policy.delay:
                land()
            interval = policy.every // policy.fragments
            send(fragments[(step - policy.after) // interval % policy.fragments])
            if not policy.delay:
                land()
    before = [copy.deepcopy(dict(net.state_dict())) for net in nets]
    land()
    send([name for name, steps in own_steps.items() if steps])
    land()
    return before, [dict(net.state_dict()) for net in nets]


def train(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    net = model()
    with offbeat.init(offbeat.Plan(sync=POLICIES[name])) as run:
        replica, optimizer, loader = run.prepare(net, optimizer_of(net), batches(int(os.environ["RANK"])))
        for x, y in loader:
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = copy.deepcopy(net.state_dict())
        run.settle()
        return before, dict(net.state_dict()), run.step


@pytest.mark.parametrize("name", POLICIES)
def test_local_steps_and_averages(name: str) -> None:
    expected = simulate(POLICIES[name])
    results = run_workers(WORLD, train, name)
    for (before, settled, steps), one, together in zip(results, *expected, strict=True):
        assert steps == STEPS
        for key, tensor in one.items():
            torch.testing.assert_close(before[key], tensor, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(settled[key], together[key], rtol=1e-10, atol=1e-12)
            assert torch.equal(settled[key], results[0][1][key]), "equal on all, to the bit, after settle"


def uneven() -> dict[str, torch.Tensor]:
    """Rank 1 has a third of the batches: its change weighs a third."""
    rank = int(os.environ["RANK"])
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    data = [torch.ones(1, 1).double()] * (3 if rank == 0 else 1)
    with offbeat.init(offbeat.Plan(sync=LocalSGD(3))) as run:
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
        replica, optimizer, loader = run.prepare(net, optimizer, data)
        for x in loader:
            (replica(x) * (1.0 if rank == 0 else -1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(net.state_dict())


def test_who_has_less_data_counts_less_and_does_not_coast() -> None:
    # Rank 0 goes -1, -1.5, -1.75; rank 1 goes +1 and then stands still, although its optimizer has momentum.
    expected = (3 * -4.25 + 1 * 1.0) / 4
    for state in run_workers(WORLD, uneven):
        assert float(state["weight"]) == pytest.approx(expected, rel=1e-6)


def interrupted(name: str, stop: int) -> bool:
    return is_the_same_when_resumed(offbeat.Plan(sync=POLICIES[name]), model, optimizer_of, batches, stop)


@pytest.mark.parametrize(
    ("name", "stop"),
    [("outer", 3), ("outer", 4), ("delayed, outer, late", 4), ("delayed fragments", 4), ("delayed fragments", 5)],
)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, stop: int) -> None:
    assert run_workers(WORLD, interrupted, name, stop) == [True] * WORLD


def overflowing() -> tuple[float, list[str]]:
    """Rank 1's gradients are finite, and its change is not."""
    told = listen()
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    with offbeat.init(offbeat.Plan(sync=LocalSGD(2), nonfinite="skip")) as run:
        replica, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=10.0))
        for _ in range(2):
            replica(torch.tensor([[3e38 if run.rank == 1 else 1.0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(net.weight), told


def test_a_change_that_overflows_is_left_out() -> None:
    (first, quiet), (second, told) = run_workers(2, overflowing)
    assert first == second == -20.0
    first_skips, skips = ([text for text in one if "NaN" in text] for one in (quiet, told))
    assert first_skips == []
    assert skips == ["step 1: the change of weight holds NaN or Inf on this worker; it is left out."]
