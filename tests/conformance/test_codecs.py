"""Every codec, and proof that the check finds what it looks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.codec import Cast, Dense
from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.payload import Gather, Sum, Total
from offbeat.testing import check_codec

if TYPE_CHECKING:
    from offbeat.layout import Bucket


def test_dense() -> None:
    check_codec(Dense())
    check_codec(Dense(), world=1)


@pytest.mark.parametrize(("dtype", "rtol"), [("bf16", 2**-6), ("fp16", 2**-9)])
def test_cast(dtype: Any, rtol: float) -> None:
    check_codec(Cast(dtype), rtol=rtol, atol=rtol)


def test_cast_sends_half_the_bytes_and_says_what_they_hold() -> None:
    grad = torch.randn(100)
    rounded = grad.bfloat16().float()
    exchange = Cast("bf16").exchange(grad.clone(), {}, keep_sent=True)
    payload = next(exchange)
    assert isinstance(payload, Sum)
    assert payload.size_bytes == 200
    with pytest.raises(StopIteration) as end:
        exchange.send(Total(payload.tensor.clone(), 1.0))
    assert torch.equal(end.value.value.sent, rounded)
    assert not torch.equal(rounded, grad)


class _Wrong(Dense):
    """Dense, but for what a subclass breaks."""

    def exchange(self, grad: torch.Tensor, state: State, *, keep_sent: bool = False) -> Exchange:
        reply = yield Sum(grad.clone())
        assert isinstance(reply, Total)
        return self.end(reply, grad if keep_sent else None, state)

    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor / reply.weight, sent)


class LosesSome(_Wrong):
    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor * 0.9 / reply.weight, sent)


class ForgetsWeight(_Wrong):
    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor, sent)


class Secretive(_Wrong):
    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor / reply.weight, None)


class Undeclared(_Wrong):
    @property
    def needs(self) -> frozenset[type]:
        return frozenset({Gather})


class WritesEarly(_Wrong):
    def init(self, bucket: Bucket) -> State:
        return {bucket.slots[0].name: {"count": torch.zeros(1)}}

    def exchange(self, grad: torch.Tensor, state: State, *, keep_sent: bool = False) -> Exchange:
        next(iter(state.values()))["count"] += 1
        return (yield from super().exchange(grad, state, keep_sent=keep_sent))


class KeysByIndex(_Wrong):
    def init(self, bucket: Bucket) -> State:
        return {"0": {}}


class Unlike(_Wrong):
    """Workers end with different updates."""

    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor / reply.weight + torch.rand(1), sent)


@pytest.mark.parametrize(
    ("codec", "says"),
    [
        (LosesSome(), "conservation"),
        (ForgetsWeight(), "divided by it"),
        (Secretive(), "did not say what it sent"),
        (Undeclared(), "does not declare"),
        (WritesEarly(), "written before the last"),
        (KeysByIndex(), "parameter names"),
        (Unlike(), "different updates"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_check_finds(codec: Dense, says: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=says):
        check_codec(codec)
