"""Scripts that read or write weights between `optimizer.step()` and the forward pass find what DDP has there."""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import offbeat
from tests.parity.jobs import MLP, is_ahead, vectors, wrapped
from tests.workers import listen, run_workers

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 16  # of which seven are learnt from
PLAN = offbeat.Plan(scheduling=offbeat.Prophet(least_bytes=1 << 10))


class Script:
    """A training script that comes to no weights but by its modules.

    Attributes:
        seen: what it has found in the weights of each step.
    """

    stays_ahead = True  # of the forward pass, to the end
    tells = ""  # a part of what offbeat says about it
    make: Callable[[], nn.Module] = MLP

    def __init__(self) -> None:
        self.net = self.make()
        self.seen: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Act before the loop."""

    def loss(self, replica: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(replica(x), y)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Use weights after the optimizer's step."""


class Saves(Script):
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.save(self.net, file := io.BytesIO())
        file.seek(0)
        self.seen.append(torch.load(file, weights_only=False).state_dict())


class Pickles(Script):
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(pickle.loads(pickle.dumps(self.net)).state_dict())


class Copies(Script):
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(copy.deepcopy(self.net).state_dict())


class CopiesOptimizer(Script):
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        kept = copy.deepcopy(optimizer)
        self.seen.append([*kept.param_groups[0]["params"], *(one["momentum_buffer"] for one in kept.state.values())])


class Averages(Script):
    def begin(self) -> None:
        self.mean = AveragedModel(self.net)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.mean.update_parameters(self.net)
        self.seen.append(copy.deepcopy(self.mean.state_dict()))


class AveragesTogether(Script):
    tells = "uses 0.weight (_foreach_lerp_) before a module that reads it begins its forward pass"

    def begin(self) -> None:
        self.mean = [p.detach().clone() for p in self.net.parameters()]

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.mean, list(self.net.parameters()), 0.1)
        self.seen.append([one.clone() for one in self.mean])


class Clamps(Script):
    tells = "uses 0.weight (data) before a module that reads it begins its forward pass"

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        for p in self.net.parameters():
            p.data.clamp_(-0.05, 0.05)


class ClampsViews(Script):
    """The views were made before."""

    stays_ahead = False
    tells = "uses the memory of 0.weight (aten.clamp_.default) through another tensor"

    def begin(self) -> None:
        self.views: list[torch.Tensor] = []

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.views = self.views or [p.data for p in self.net.parameters()]
        for view in self.views:
            view.clamp_(-0.05, 0.05)


class LeavesTorch(Script):
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        first, *rest = self.net.parameters()
        self.seen.append(torch.from_numpy(first.detach().numpy().copy()))
        self.seen.append(torch.tensor([p.tolist()[0] for p in rest if p.dim() == 1]))


class Perturbs(Script):
    """Adversarial weights, as in SAM's relatives."""

    def loss(self, replica: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        moved = {name: p + 0.01 * torch.ones_like(p) for name, p in self.net.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y) + super().loss(replica, x, y)


class ReadsChild(nn.Module):
    """It reads a child's weight before it calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.head = nn.Linear(20, 20), nn.Linear(20, 5)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        x_BD = F.linear(x_BD, self.child.weight)
        return torch.as_tensor(self.head(self.child(torch.tanh(x_BD))))


class ParentReads(Script):
    make = ReadsChild


class Encoder(nn.Module):
    """Without gradients torch has other kernels for it, unless a weight is of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(20, 5)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.encoder(x_BD[:, None]).mean(1)))


class Evaluates(Script):
    make = Encoder

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.net.eval()
        with torch.no_grad():
            self.seen.append(self.net(torch.ones(3, 20)))
        self.net.train()


SCRIPTS = {kind.__name__: kind for kind in Script.__subclasses__()}


def train(kind: type[Script], system: str) -> dict[str, Any]:
    """What a script comes to."""
    torch.manual_seed(1)
    script = kind()
    optimizer = torch.optim.SGD(script.net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + int(os.environ["RANK"]))
    with wrapped(system, script.net, optimizer, plan=PLAN) as replica:
        for _ in range(STEPS):
            script.loss(replica, *vectors(generator)).backward()
            optimizer.step()
            script.after_step(optimizer)
            optimizer.zero_grad()
        ahead = system != "ddp" and is_ahead(replica)
        return {"state": script.net.state_dict(), "seen": script.seen, "ahead": ahead}


def all_of() -> dict[str, Any]:
    """Each script with DDP and with a scheduler, and what was said about it."""
    store = f"file://{os.environ['OFFBEAT_STORE']}"
    dist.init_process_group(
        "gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    told, made = listen(), {}
    try:
        for name, kind in SCRIPTS.items():
            told.clear()
            made[name] = (train(kind, "ddp"), train(kind, "offbeat"), list(told))
        return made
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    return run_workers(2, all_of)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SCRIPTS)
def test_weights_are_those_of_ddp(name: str, made: list[dict[str, Any]]) -> None:
    kind = SCRIPTS[name]
    for rank, results in enumerate(made):
        theirs, ours, told = results[name]
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
        torch.testing.assert_close(ours["seen"], theirs["seen"], rtol=0, atol=0)
        assert ours["ahead"] == kind.stays_ahead
        if kind.tells and not rank:
            (text,) = [text for text in told if kind.tells in text]
            assert f"{__file__}:" in text
