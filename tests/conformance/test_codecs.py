"""Every codec, and proof that the check finds what it looks for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offbeat.codec import Cast, Dense, ErrorFeedback
from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.errors import PlanError
from offbeat.fabric import Switch
from offbeat.payload import Gather, Sum, Total
from offbeat.plan import Plan
from offbeat.sync import KSync
from offbeat.testing import check_codec
from offbeat.testing.codec import _bucket

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


@pytest.mark.parametrize("codec", [ErrorFeedback(), ErrorFeedback(Cast("bf16"))], ids=repr)
def test_error_feedback(codec: ErrorFeedback) -> None:
    check_codec(codec, rtol=2**-6, atol=2**-6)


def test_what_was_not_sent_comes_with_the_next() -> None:
    """One worker of two; it comes too late for the second of its sums, and rounding leaves out something of each."""
    codec, bucket = ErrorFeedback(Cast("bf16")), _bucket((3, 5))
    state, sent, given = codec.init(bucket), torch.zeros(8), torch.zeros(8)
    assert set(state) == {"layer0.weight", "layer1.weight"}
    for number in range(6):
        grad = torch.arange(8) / 77 + number
        given += grad
        exchange = codec.exchange(grad.clone(), state, keep_sent=True)
        payload = next(exchange)
        assert isinstance(payload, Sum)
        with pytest.raises(StopIteration) as end:
            exchange.send(Total(payload.tensor.clone(), 1.0, includes_own=number != 1))
        assert bool(end.value.value.sent.any()) == (number != 1)
        sent += end.value.value.sent
    left = torch.cat([tensors["residual"] for tensors in state.values()])
    assert left.any(), "rounding has left something"
    torch.testing.assert_close(sent + left, given, rtol=0, atol=1e-5)
    codec.rescale_(state, 2.0)
    torch.testing.assert_close(torch.cat([tensors["residual"] for tensors in state.values()]), 2 * left)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ErrorFeedback(ErrorFeedback()), "it leaves none. Use Dense()"),
        (lambda: ErrorFeedback(Cast), "use a codec, such as Cast"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_fed_back_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make()


def test_a_plan_has_the_codec_that_it_needs() -> None:
    carrying = Plan(sync=KSync(2, "carry"), fabric=Switch("127.0.0.1:1"))
    assert carrying.codec == Dense()
    assert carrying.working_codec == ErrorFeedback()
    assert Plan(sync=KSync(2), fabric=Switch("127.0.0.1:1")).working_codec == Dense()
    wrapped = Plan(codec=ErrorFeedback(Cast("fp16")))
    assert Plan.from_toml(wrapped.to_toml()) == wrapped


class SaysItWasSent(Dense):
    """It does not look whether its part is in the sum."""

    def exchange(self, grad: torch.Tensor, state: State, *, keep_sent: bool = False) -> Exchange:
        reply = yield Sum(grad.clone())
        assert isinstance(reply, Total)
        return Exchanged(reply.tensor / reply.weight, grad if keep_sent else None)


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
        (SaysItWasSent(), "made without it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_check_finds(codec: Dense, says: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=says):
        check_codec(codec)
