"""Every codec, and proof that the check finds what it looks for."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from offbeat.codec import (
    GRBS,
    QSGD,
    Cast,
    Codec,
    Dense,
    ErrorFeedback,
    FixedPoint,
    PowerSGD,
    Promises,
    RandomK,
    Sign,
    TopK,
    Turn,
)
from offbeat.codec.codec import Exchange, Exchanged, State
from offbeat.errors import PeerError, PlanError
from offbeat.fabric import Elastic, ParameterServer, Switch
from offbeat.layout import arrange
from offbeat.payload import Gather, Sum, Total
from offbeat.plan import Plan
from offbeat.sync import KSync
from offbeat.testing import check_codec
from offbeat.testing.codec import _bucket, _exchange

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
    exchange = Cast("bf16").exchange(grad.clone(), {}, Turn(_bucket([(100,)])), keep_sent=True)
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


CODECS = [
    QSGD(8),
    QSGD(4),
    QSGD(2, 16),
    QSGD(2, is_random=False),
    Sign(),
    Sign(vote=True),
    TopK(0.1),
    TopK(1.0),
    RandomK(0.1),
    RandomK(0.1, "private"),
    RandomK(0.2, "private", is_unbiased=True),
    RandomK(0.2, is_unbiased=True),
    GRBS(4),
    GRBS(32),
    GRBS(1),
    PowerSGD(1),
    PowerSGD(4),
    FixedPoint(32),
    ErrorFeedback(GRBS(8)),
    ErrorFeedback(TopK(0.01)),
    ErrorFeedback(PowerSGD(2)),
    ErrorFeedback(Sign()),
    ErrorFeedback(QSGD(4, 64)),
    ErrorFeedback(QSGD(2, is_random=False)),
    ErrorFeedback(RandomK(0.1, "private")),
]


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codec(codec: Codec, world: int) -> None:
    check_codec(codec, world=world)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_fixed_point_of_few_bits(world: int) -> None:
    check_codec(FixedPoint(8), world=world, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", [*CODECS, FixedPoint(8), Dense(), Cast()], ids=repr)
def test_every_dtype_comes_back(codec: Codec, dtype: torch.dtype) -> None:
    parameters = {"a": torch.zeros(12, 20, dtype=dtype), "b": torch.zeros(20, dtype=dtype)}
    (bucket,) = arrange(parameters, bucket_bytes=1 << 20).buckets
    grad = torch.linspace(-1, 1, bucket.numel, dtype=dtype)
    (result,) = _exchange(codec, bucket, [grad], [codec.init(bucket)], keep_sent=True)
    assert result.sent is not None
    assert (result.update.dtype, result.sent.dtype) == (dtype, dtype)
    torch.testing.assert_close(result.update, result.sent, rtol=2**-6, atol=2**-6)
    assert result.update.any()


@pytest.mark.parametrize(
    "inner", [GRBS(8), TopK(0.05), PowerSGD(1), Sign(), QSGD(4, 64), FixedPoint(8), Dense()], ids=repr
)
def test_updates_and_residuals_add_up_to_the_gradients(inner: Codec) -> None:
    """Also where a worker has no data in some steps, so that all weigh less, and where one comes too late for some."""
    world, steps = 4, 40
    parameters = {"a": torch.zeros(12, 20, dtype=torch.float64), "b": torch.zeros(20, dtype=torch.float64)}
    (bucket,) = arrange(parameters, bucket_bytes=1 << 20).buckets
    codec = ErrorFeedback(inner)
    states = [codec.init(bucket) for _ in range(world)]
    generator = torch.Generator().manual_seed(3)
    given, updates = torch.zeros(bucket.numel, dtype=torch.float64), torch.zeros(bucket.numel, dtype=torch.float64)
    largest = 0.0
    for step in range(steps):
        gradients = [torch.randn(bucket.numel, generator=generator, dtype=torch.float64) / world for _ in range(world)]
        weight, late = 1.0, None
        if step % 5 == 3:
            gradients[step % world].zero_()
            weight = (world - 1) / world
        elif step % 7 == 2 and Gather not in codec.needs and codec.promises.rounds == 1:
            late, weight = step % world, (world - 1) / world
        given += torch.stack(gradients).sum(0)
        results = _exchange(codec, bucket, gradients, states, weight=weight, left_out=late, step=step)
        updates += results[0].update * weight
        left = sum(torch.cat([one["residual"] for one in state.values()]) for state in states)
        assert isinstance(left, torch.Tensor)
        torch.testing.assert_close(updates + left, given, rtol=1e-9, atol=1e-9)
        largest = max(largest, float(left.norm()))
    assert largest < 60 * float(given.norm()) / steps, "the residual stays within bounds"


@pytest.mark.slow
def test_blocks_are_those_of_the_turn_whatever_else_is_drawn() -> None:
    """Of 10,000 steps all ranks draw the same, each its own block as often as any other."""
    bucket = _bucket([(1000,), (37,)])
    drawn = torch.zeros(bucket.numel)
    ones = torch.arange(bucket.numel, dtype=torch.float32)
    for step in range(10_000):
        if step % 100 == 0:
            torch.manual_seed(step)  # of one rank alone
        (mine,) = GRBS(16).encode(ones, Turn(bucket, step, 0, 2, seed=7))
        if step % 50 == 0:
            (other,) = GRBS(16).encode(ones, Turn(bucket, step, 1, 2, seed=7))
            assert torch.equal(mine, other)
        drawn[mine.long()] += 1
    assert 10_000 / 16 * 0.75 < float(drawn.min()) <= float(drawn.max()) < 10_000 / 16 * 1.25
    for different in (Turn(bucket, 1), Turn(bucket, 0, seed=1), Turn(bucket, purpose="reset")):
        assert not torch.equal(*(GRBS(16).encode(ones, turn)[0] for turn in (different, Turn(bucket))))


@pytest.mark.parametrize(
    ("codec", "tensors", "says"),
    [
        (TopK(0.1), (torch.tensor([0, 99], dtype=torch.int32), torch.ones(2)), "there are 10 elements"),
        (TopK(0.1), (torch.tensor([-1, 2], dtype=torch.int32), torch.ones(2)), "there are 10 elements"),
        (TopK(0.1), (torch.tensor([3, 3], dtype=torch.int32), torch.ones(2)), "do not ascend"),
        (TopK(0.1), (torch.tensor([3], dtype=torch.int32), torch.ones(2)), "as many of both"),
        (TopK(0.1), (torch.tensor([3]), torch.ones(1)), "as many of both"),
        (RandomK(0.2), (torch.ones(3),), "2 of torch.float32 are sent"),
        (GRBS(4), (torch.ones(9),), "the same seed"),
        (QSGD(8, 8), (torch.ones(1, 8, dtype=torch.uint8), torch.ones(1)), "2 groups of 8"),
        (Sign(), (torch.ones(1, dtype=torch.uint8), torch.ones(1)), "signs of 10 elements"),
    ],
)
def test_what_nobody_encodes_is_not_decoded(codec: Any, tensors: tuple[torch.Tensor, ...], says: str) -> None:
    with pytest.raises(PeerError, match=says):
        codec.accumulate_(torch.zeros(10), tensors, Turn(_bucket([(10,)])))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TopK(0), "Cannot send 0 of a gradient: the ratio is above 0 and at most 1, such as 0.01"),
        (lambda: TopK(1.5), "at most 1"),
        (lambda: RandomK(float("nan")), "at most 1"),
        (lambda: RandomK(0.1, "mine"), "choose 'shared' or 'private'"),  # type: ignore[arg-type]
        (lambda: GRBS(0.5), "1 or more - at `plan.codec.ratio`"),
        (lambda: GRBS(float("inf")), "1 or more"),
        (lambda: GRBS(4, 0), "one at least"),
        (lambda: QSGD(3), "choose 8, 4 or 2"),  # type: ignore[arg-type]
        (lambda: QSGD(8, 9), "a multiple of 4"),
        (lambda: PowerSGD(0), "1 at least"),
        (lambda: FixedPoint(16), "choose 8 or 32"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(QSGD(2)), "grow without end"),
        (lambda: ErrorFeedback(RandomK(0.1, is_unbiased=True)), "grow without end"),
        (lambda: Plan(codec=Sign(vote=True), fabric=ParameterServer()), "it takes the parts of all workers at once"),
        (lambda: Plan(codec=PowerSGD(), fabric=ParameterServer()), "it sends 2 rounds"),
        (lambda: Plan(codec=PowerSGD(), fabric=Elastic()), "one that joins later has none of it"),
        (lambda: Plan(codec=FixedPoint()).check_world(128), "a sum of more than 127 does not fit"),
    ],
)
def test_what_cannot_be_sent_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        make()


@pytest.mark.parametrize(("bits", "part"), [(8, 2**-18), (8, 1.4 / 65536), (8, 0.3), (2, 2**-18), (2, 0.3)])
def test_qsgd_is_unbiased_for_elements_far_below_the_largest_of_their_group(bits: Any, part: float) -> None:
    """An element of `part` of a level is sent as one level with that probability, whatever its sign."""
    codec, bucket = QSGD(bits), _bucket([(1 << 21,)])
    for sign in (1.0, -1.0):
        grad = torch.full((bucket.numel,), sign * part / codec.levels)
        grad[:: codec.group] = 1.0
        sent = trials = 0
        for step in range(4):
            turn = Turn(bucket, step)
            got = codec.decode(codec.encode(grad, turn), turn, torch.empty_like(grad)).view(-1, codec.group)[:, 1:]
            assert bool((got * sign >= 0).all())
            sent += int(got.count_nonzero())
            trials += got.numel()
        assert abs(sent - part * trials) < 5 * (part * (1 - part) * trials) ** 0.5, (sign, sent, part * trials)


@pytest.mark.parametrize("size", [1e-40, 1e-37, 1e-20, 1e37])
def test_qsgd_is_unbiased_at_any_scale(size: float) -> None:
    codec, bucket = QSGD(4, 64), _bucket([(1 << 18,)])
    grad = size * torch.rand(bucket.numel, generator=torch.Generator().manual_seed(1))
    turn = Turn(bucket)
    got = codec.decode(codec.encode(grad, turn), turn, torch.empty_like(grad))
    assert float(got.double().mean() / grad.double().mean()) == pytest.approx(1, abs=0.05 if size < 1e-39 else 0.01)


def test_what_is_not_finite_reaches_everyone() -> None:
    """Whoever looks for it finds it, on every rank alike; nobody's sum is of anything else instead."""
    bucket = _bucket([(64,)])
    for codec in (Dense(), Cast(), QSGD(8), Sign(), TopK(0.1), FixedPoint(8), GRBS(1)):
        grads = [torch.ones(64), torch.ones(64)]
        grads[1][5] = float("nan")
        results = _exchange(codec, bucket, grads, [{}, {}])
        assert not all(bool(torch.isfinite(r.update).all()) for r in results), codec
        assert torch.equal(*(torch.isfinite(r.update) for r in results)), codec


def test_what_was_not_sent_comes_with_the_next() -> None:
    """One worker of two; it comes too late for the second of its sums, and rounding leaves out something of each."""
    codec, bucket = ErrorFeedback(Cast("bf16")), _bucket([(3,), (5,)])
    state, sent, given = codec.init(bucket), torch.zeros(8), torch.zeros(8)
    assert set(state) == {"layer0.weight", "layer1.weight"}
    for number in range(6):
        grad = torch.arange(8) / 77 + number
        given += grad
        exchange = codec.exchange(grad.clone(), state, Turn(bucket, number), keep_sent=True)
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

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        reply = yield Sum(grad.clone())
        assert isinstance(reply, Total)
        return Exchanged(reply.tensor / reply.weight, grad if keep_sent else None, reply.weight)


class _Wrong(Dense):
    """Dense, but for what a subclass breaks."""

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        reply = yield Sum(grad.clone())
        assert isinstance(reply, Total)
        return self.end(reply, grad * reply.includes_own if keep_sent else None, state)

    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor / reply.weight, sent, reply.weight)


class LosesSome(_Wrong):
    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor * 0.9 / reply.weight, sent, reply.weight)


class ForgetsWeight(_Wrong):
    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor, sent, reply.weight)


class Secretive(_Wrong):
    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor / reply.weight, None, reply.weight)


class Undeclared(_Wrong):
    @property
    def needs(self) -> frozenset[type]:
        return frozenset({Gather})


class WritesEarly(_Wrong):
    def init(self, bucket: Bucket) -> State:
        return {bucket.slots[0].name: {"count": torch.zeros(1)}}

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        next(iter(state.values()))["count"] += 1
        return (yield from super().exchange(grad, state, turn, keep_sent=keep_sent))


class KeysByIndex(_Wrong):
    def init(self, bucket: Bucket) -> State:
        return {"0": {}}


_UNLIKE = itertools.count()


def _next() -> int:
    return next(_UNLIKE)


class Unlike(_Wrong):
    """Workers end with different updates."""

    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor / reply.weight + _next(), sent, reply.weight)


class ForgetsToHandOn(_Wrong):
    def end(self, reply: Total, sent: torch.Tensor | None, state: State) -> Exchanged:
        return Exchanged(reply.tensor / reply.weight, sent)


class DrawsAnything(GRBS):
    """Its blocks are those of the process's own generator, as in the authors' code."""

    def _drawn(self, numel: int, turn: Turn) -> tuple[int, Any, bool]:
        return 1, np.sort(np.random.permutation(numel)[: max(1, round(numel / self.ratio))]), False


class EncodesInPlace(TopK):
    def encode(self, grad: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        return super().encode(grad.mul_(0.9), turn)


class AddsTwice(TopK):
    def accumulate_(self, total: torch.Tensor, tensors: Any, turn: Turn) -> None:
        super().accumulate_(total, tensors, turn)
        total[tensors[0].long()] += tensors[1]


class DecodesOther(QSGD):
    """It decodes by itself what it decodes otherwise in an exchange."""

    def decode(self, tensors: Any, turn: Turn, out: torch.Tensor) -> torch.Tensor:
        return super().decode(tensors, turn, out).mul_(2)

    def accumulate_(self, total: torch.Tensor, tensors: Any, turn: Turn) -> None:
        total += super().decode(tensors, turn, torch.empty_like(total))


class PromisesTooMuch(TopK):
    @property
    def promises(self) -> Promises:
        return dataclasses.replace(super().promises, contraction=0.9)


class SaysItHasNoBias(TopK):
    @property
    def promises(self) -> Promises:
        return dataclasses.replace(super().promises, variance=1.0)


class SendsMore(GRBS):
    def payload_bytes(self, bucket: Bucket) -> float:
        return super().payload_bytes(bucket) / 2


class HidesItsState(ErrorFeedback):
    """A checkpoint does not hold all that it goes by."""

    def exchange(self, grad: torch.Tensor, state: State, turn: Turn, *, keep_sent: bool = False) -> Exchange:
        return (yield from super().exchange(grad.add_(_next()), state, turn, keep_sent=keep_sent))


@pytest.mark.parametrize(
    ("codec", "says"),
    [
        (ForgetsToHandOn(), "does not hand on"),
        (DrawsAnything(4), "different updates"),
        (EncodesInPlace(0.1), "changed the gradient"),
        (AddsTwice(0.1), "it loses"),
        (DecodesOther(), "decoded by itself|adds something else|conservation"),
        (PromisesTooMuch(0.1), "it loses"),
        (SaysItHasNoBias(0.1), "no bias|variance"),
        (SendsMore(4), "and promises"),
        (HidesItsState(TopK(0.1)), "the same gradients gave another"),
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
def test_the_check_finds(codec: Any, says: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=says):
        check_codec(codec)
