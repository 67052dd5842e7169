"""Checkpoints of a served job: stop and resume is the same as not to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import offbeat
from offbeat.errors import ModelError
from offbeat.fabric import ParameterServer
from offbeat.fabric.server.checkpoint import from_bytes, to_bytes
from offbeat.sync import BSP
from tests.parity import jobs
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


class Training:
    """A served job between two steps."""

    def __init__(self, kind: str, block_bytes: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        plan = offbeat.Plan(sync=BSP(), fabric=ParameterServer(block_bytes=block_bytes))
        self.run = offbeat.init(plan)
        model = jobs.MLP()
        self.model, self.optimizer = self.run.prepare(model, OPTIMIZERS[kind](model.parameters()))

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            chance = torch.Generator().manual_seed(100 * step + self.run.rank)
            x, y = torch.randn(4, 20, generator=chance), torch.randint(0, 5, (4,), generator=chance)
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.module.state_dict().items()}


def resume(kind: str) -> bool:
    """Five steps; or two, another server with other blocks and another model to begin with, and three more."""
    whole = Training(kind, 4096)
    whole.train(0, 5)
    expected = whole.parameters
    whole.run.close()
    half = Training(kind, 4096)
    half.train(0, 2)
    checkpoint: dict[str, Any] = {"model": half.parameters, "run": half.run.state_dict()}
    half.run.close()
    rest = Training(kind, 8192, seed=1)
    rest.model.module.load_state_dict(checkpoint["model"])
    rest.run.load_state_dict(checkpoint["run"])
    assert rest.run.step == 2
    rest.train(2, 5)
    result = rest.parameters
    rest.run.close()
    return all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stop_and_resume_is_the_same_as_not_to_stop(kind: str) -> None:
    assert run_workers(2, resume, kind, timeout_s=190) == [True, True]


def test_states_survive_the_way_through_bytes() -> None:
    states = {"a": {"step": torch.tensor(3.0), "mean": torch.randn(7)}}
    data = to_bytes(states)
    again = from_bytes(data)
    assert torch.equal(again["a"]["mean"], states["a"]["mean"])
    assert again["a"]["step"].ndim == 0
    for at in (5, len(data) // 2, len(data) - 5):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(ModelError, match="Cannot load the optimizer's state from this checkpoint"):
            from_bytes(bytes(damaged))


def dcp_round_trip(folder: str) -> tuple[int, bool]:
    """`Run` is Stateful; DCP reads into what a fresh run says of itself."""
    one = Training("adam", 4096)
    one.train(0, 2)
    save({"model": one.model.state_dict(), "run": one.run}, checkpoint_id=folder)
    one.train(2, 4)
    expected = one.parameters
    one.run.close()
    two = Training("adam", 4096, seed=1)
    state: dict[str, Any] = {"model": two.model.state_dict(), "run": two.run}
    load(state, checkpoint_id=folder)
    two.train(2, 4)
    result, step = two.parameters, two.run.step
    two.run.close()
    return step, all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.timeout(200)
def test_distributed_checkpoint(tmp_path: Path) -> None:
    assert run_workers(2, dcp_round_trip, str(tmp_path / "checkpoint"), timeout_s=190) == [(4, True), (4, True)]
