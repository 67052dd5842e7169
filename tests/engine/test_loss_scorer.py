"""Losses at a validator: where each contribution leads, by hand, and that nothing is left of finding it out."""

from __future__ import annotations

import math
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from offbeat.clock import WallClock
from offbeat.diagnosis.wait import BlockingWait, WaitContext
from offbeat.engine.loss_scorer import LossScorer
from offbeat.engine.prepared_model import PreparedModel
from offbeat.engine.trusted_loss import TrustedLoss
from offbeat.errors import ModelError
from offbeat.layout import arrange
from offbeat.protocol.loss_scores import ScoreContributions
from offbeat.robust import Zeno
from offbeat.server.blocks import cut
from offbeat.server.client.model_state import ModelState
from offbeat.server.client.requests import PulledParameters, ServerRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

PUSHES = ((0, 4), (2, 4))


class Noisy(nn.Module):
    """Two parameters, a buffer that counts, and noise."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((3,), 7.0)), nn.Parameter(torch.full((5,), 8.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self) -> torch.Tensor:
        self.seen += 1
        self.seen = self.seen.clone()
        return self.a.sum() + 100 * self.b.sum() + 1000 * self.seen + torch.rand(())


class FakeClient:
    """A server that has parameters and contributions: of 0 everywhere ones, of 2 everywhere twos.

    Args:
        left: so many of them are sent before the update is judged.
    """

    def __init__(self, model: PreparedModel, left: int = 99) -> None:
        self.layout = arrange(model.parameters, bucket_bytes=1 << 20)
        self.blocks = cut(self.layout, 16)
        values = [torch.zeros(b.numel) for b in self.blocks]
        self.own = ModelState(0, self.blocks, [0] * len(self.blocks), values)
        self.request: ServerRequest[PulledParameters] = ServerRequest()
        self.told: list[tuple[float, ...]] = []
        self._left = left

    def state(self, model: int) -> ModelState:
        return self.own

    def fetch_contribution(
        self, model: int, version: int, push: tuple[int, int] | None, landing: Sequence[torch.Tensor]
    ) -> ServerRequest[bool]:
        request: ServerRequest[bool] = ServerRequest()
        self._left -= 1
        for place in landing:
            place.fill_(10.0 if push is None else 1.0 + push[0] / 2)
        if self._left < 0:
            self.request.finish(PulledParameters(1, ()))
        request.finish(self._left >= 0)
        return request

    def tell_losses(self, asked: ScoreContributions, losses: Sequence[float]) -> None:
        self.told.append(tuple(losses))
        self.request.finish(PulledParameters(1, ()))


class Validator:
    """A validator whose loss is what `Noisy` computes; its groups have the learning rates 0.5 and 0.25."""

    def __init__(self, left: int = 99) -> None:
        self.model = Noisy()
        parameters = dict(self.model.named_parameters())
        groups: list[Any] = [{"params": [self.model.a], "lr": 0.5}, {"params": [self.model.b], "lr": 0.25}]
        prepared: Any = PreparedModel(0, self.model, parameters, torch.optim.SGD(groups), None)  # type: ignore[arg-type]
        self.client = FakeClient(prepared, left)
        self.loss = TrustedLoss()
        self.loss.function = self.model
        waiter = BlockingWait(clock=WallClock(), timeout=timedelta(seconds=5))
        context: Any = SimpleNamespace(waiter=waiter, trusted_loss=self.loss)
        client: Any = self.client
        self.scorer = LossScorer(prepared, self.client.layout, self.client.blocks, client, context)

    def score(self, **how: Any) -> list[tuple[float, ...]]:
        self.client.own.to_score.append(ScoreContributions(0, 7, 1, PUSHES, **how))
        self.scorer.wait(self.client.request, WaitContext("the next parameters", through_server=True))
        return self.client.told


@pytest.mark.parametrize(
    ("how", "moves"),
    [
        ({}, (0.5, 0.25)),
        ({"rate": 0.5}, (0.25, 0.125)),
        ({"change": True}, (1.0, 1.0)),
        ({"change": True, "rate": 0.5}, (0.5, 0.5)),
    ],
)
def test_each_contribution_leads_where_its_update_would(how: dict[str, Any], moves: tuple[float, float]) -> None:
    torch.manual_seed(3)
    noise = float(torch.rand(()))
    torch.manual_seed(3)
    (losses,) = Validator().score(**how)
    a, b = moves
    expected = [3 * (10 - a * k) + 500 * (10 - b * k) + 1000 + noise for k in (0, 1, 2)]
    assert losses == pytest.approx(expected), "all with the same noise, and one more batch seen than before"


def test_a_contribution_that_leads_where_there_is_no_loss_does_not_end_the_validator() -> None:
    validator = Validator()
    model, own = validator.model, validator.loss.function
    assert own is not None

    def raises() -> torch.Tensor:
        if float(model.a.detach().flatten()[0]) < 9.2:  # where the second leads
            raise ValueError("all elements of input should be between 0 and 1")
        return own()  # type: ignore[return-value]

    validator.loss.function = raises
    (losses,) = validator.score()
    assert [math.isfinite(loss) for loss in losses] == [True, True, False]


def test_a_loss_that_cannot_be_computed_at_all_is_the_scripts_own_fault() -> None:
    validator = Validator()

    def raises() -> torch.Tensor:
        raise ValueError("no")

    validator.loss.function = raises
    with pytest.raises(ValueError, match="no"):
        validator.score()


def test_nothing_is_left_of_it() -> None:
    validator = Validator()
    model = validator.model
    own, seen, drawn = [p.data_ptr() for p in model.parameters()], model.seen, torch.get_rng_state()
    assert validator.score()
    assert [p.data_ptr() for p in model.parameters()] == own
    assert model.a.tolist() == [7.0] * 3
    assert model.b.tolist() == [8.0] * 5
    assert model.seen is seen
    assert float(seen) == 0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in model.parameters())


def test_an_update_that_is_judged_meanwhile_is_given_up() -> None:
    for left in range(3):
        assert Validator(left).score() == []


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda: torch.zeros(4), "Cannot judge by a loss of shape [4]: a single number is needed. Return its mean in"),
        (lambda: 1 / 0, "division by zero"),
    ],
)
def test_a_loss_that_fails_leaves_the_parameters_where_they_were(loss: Any, says: str) -> None:
    validator = Validator()
    validator.loss.function = loss
    own = [p.data_ptr() for p in validator.model.parameters()]
    with pytest.raises((ModelError, ZeroDivisionError)) as caught:
        validator.score()
    assert says in str(caught.value)
    assert [p.data_ptr() for p in validator.model.parameters()] == own


def test_a_number_is_a_loss_too() -> None:
    validator = Validator()
    validator.loss.function = lambda: 2.5
    assert validator.score() == [(2.5, 2.5, 2.5)]


def test_without_a_loss_it_is_said_what_to_add() -> None:
    with pytest.raises(ModelError, match=r"call run\.score_by\(lambda: loss_function\(model\(x\), y\)\)"):
        TrustedLoss().check(Zeno(1))
