"""safetensors saves a model that a server keeps, and loads it, as it does any other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import offbeat
from tests.workers import run_workers

if TYPE_CHECKING:
    from pathlib import Path


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2, dtype=torch.bfloat16))


def saved_and_loaded(folder: Path) -> tuple[bool, bool]:
    safetensors: Any = pytest.importorskip("safetensors.torch")
    model, path = network(), folder / f"{os.environ['RANK']}.safetensors"
    with offbeat.init(offbeat.Plan(fabric=offbeat.ParameterServer())) as run:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        (model[2](model[1](model[0](torch.ones(4, 3)))).sum() + next(model[3].parameters()).sum()).backward()
        optimizer.step()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        safetensors.save_model(model, str(path))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        missing, unexpected = safetensors.load_model(model, str(path))
        run.settle()
    is_same = all(torch.equal(tensor, state[name]) for name, tensor in safetensors.load_file(path).items())
    return is_same and len(safetensors.load_file(path)) == len(state), not missing and not unexpected


def whole_storages() -> bool:
    """What safetensors asks of each tensor, where it is not installed."""
    model = network()
    with offbeat.init(offbeat.Plan(fabric=offbeat.ParameterServer())) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return all(
            p.untyped_storage().nbytes() == p.nbytes and p.untyped_storage().data_ptr() == p.data_ptr()
            for p in model.parameters()
        )


def test_each_parameter_has_a_storage_of_its_own() -> None:
    assert run_workers(2, whole_storages) == [True, True]


def test_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    assert run_workers(2, saved_and_loaded, tmp_path) == [(True, True)] * 2
