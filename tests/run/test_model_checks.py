"""What differs between workers is found at prepare, before it can put a number into the wrong place."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import DisagreementError, ModelError, PlanError
from tests.parity import jobs
from tests.workers import run_workers


class Parts(nn.Module):
    """Two frozen layers of the same shape, a buffer, a trained layer."""

    def __init__(self, what: str, odd: bool) -> None:
        super().__init__()
        names = ["f", "g"][:: -1 if odd and what == "order of frozen layers" else 1]
        for name in names:
            self.add_module(name, nn.Linear(3, 3).requires_grad_(False))
        if odd and what == "size of a frozen layer":
            self.g = nn.Linear(3, 4).requires_grad_(False)
        self.register_buffer("table", torch.zeros(3 if odd and what == "size of a buffer" else 2))
        if odd and what == "one buffer more":
            self.register_buffer("more", torch.zeros(1))
        if odd and what == "dtype of a buffer":
            self.register_buffer("table", torch.zeros(2, dtype=torch.float64))
        self.conv = nn.Conv2d(3, 4, 3)
        if odd and what == "memory format":
            self.conv = self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if odd and what == "a frozen parameter":
            self.conv.bias.requires_grad_(False)  # type: ignore[union-attr]


DIFFERENCES = {
    "order of frozen layers": "'f.weight",
    "size of a frozen layer": "'g.weight [3, 3]",
    "size of a buffer": "'table [2]",
    "dtype of a buffer": "'table [2] float32",
    "one buffer more": "'more [1]",
    "memory format": "'conv.weight [4, 3, 3, 3]",
    "a frozen parameter": "'conv.bias [4] float32 frozen'",
}


def prepare_parts(what: str) -> str:
    model = Parts(what, odd=os.environ["RANK"] == "1")
    with offbeat.init() as run, pytest.raises(DisagreementError) as caught:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_models_that_differ_anywhere(what: str) -> None:
    for text in run_workers(3, prepare_parts, what):
        assert "rank 1 against rank 0" in text
        assert DIFFERENCES[what] in text


def different_data() -> str:
    odd = os.environ["RANK"] == "1"
    data = TensorDataset(torch.zeros(12 if odd else 8, 20))
    model = jobs.MLP()
    with offbeat.init() as run, pytest.raises(DisagreementError) as caught:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2, shuffle=True))
    return str(caught.value)


def test_shares_of_different_wholes() -> None:
    for text in run_workers(2, different_data):
        assert "The data differs between workers" in text
        assert "'8 samples'" in text


def different_seeds() -> str:
    with pytest.raises(DisagreementError) as caught:
        offbeat.init(seed=5 if os.environ["RANK"] == "1" else 1 << 63)
    return str(caught.value)


def test_seeds_are_compared_where_no_loader_is_prepared() -> None:
    for text in run_workers(3, different_seeds):
        assert text == (
            "The seed differs between workers: rank 1 against rank 0. First difference: rank 1 has '5', rank 0 has "
            "'9223372036854775808'. Give offbeat.init(seed=...) the same number on every worker."
        )


# -- what one worker alone can get wrong ---------------------------------------------------------------------------


@pytest.fixture
def run() -> Any:
    with offbeat.init() as run:
        yield run


def test_the_wrong_order_of_arguments(run: offbeat.Run) -> None:
    model = jobs.MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in ((optimizer, model), (model, [torch.zeros(1)], optimizer)):
        with pytest.raises(ModelError, match=r"the order is prepare\(model, optimizer, loader\)"):
            run.prepare(*wrong)


def test_a_parameter_of_two_models(run: offbeat.Run) -> None:
    encoder = nn.Linear(4, 4)
    first, second = nn.Sequential(encoder, nn.Linear(4, 2)), nn.Sequential(nn.Linear(2, 2), encoder)
    run.prepare(first, torch.optim.SGD(first.parameters(), lr=0.1))
    with pytest.raises(ModelError, match=r"Cannot prepare 1\.weight twice: it is 0\.weight of a model"):
        run.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))


def unfrozen_later() -> str:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with offbeat.init() as run:
        replica, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model[0].requires_grad_(True)
        replica(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ModelError) as caught:
            optimizer.step()
        return str(caught.value)


def test_a_gradient_that_nobody_averages() -> None:
    assert all(
        "a parameter of shape [2, 2] has a gradient that was not averaged" in t for t in run_workers(2, unfrozen_later)
    )


@pytest.mark.parametrize("seed", [None, "7", 0.5, 1 << 64, -(1 << 63) - 1])
def test_what_is_no_seed(seed: Any) -> None:
    with pytest.raises(PlanError, match="as a seed: it must be a whole number of at most 64 bits"):
        offbeat.init(seed=seed)


@pytest.mark.parametrize("value", ["abc", torch.ones(3)])
def test_what_is_no_number_cannot_be_logged(run: offbeat.Run, value: Any) -> None:
    with pytest.raises(ValueError, match=r"Cannot take ('abc'|a tensor of shape \[3\]) for note: a single number"):
        run.log(note=value)


def test_a_mean_of_a_loss_needs_no_detach(run: offbeat.Run) -> None:
    assert run.mean(torch.tensor(2.0, requires_grad=True)) == 2.0
