"""The promises of every codec, checked."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat.codec import OneRoundCodec, Turn
from offbeat.layout import Bucket, arrange
from offbeat.payload import Gather, Gathered, GatheredPart, Payload, Sum, Total
from offbeat.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.codec import Codec, Exchanged, State

_MOST_ROUNDS = 100


def check_codec(codec: Codec, *, world: int = 3, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Check that `codec` keeps what every codec promises.

    Args:
        codec: a frozen description.
        world: how many workers to play.
        rtol, atol: how closely the update must match what the workers say they sent; set them to the codec's own
            precision (bf16: 2**-7).

    Raises:
        AssertionError: naming the rule that is broken.
    """
    for shapes in (((3,), (17,), (4,)), ((1,),), ((257,),), ((8, 12), (12,), (2, 3, 4))):
        bucket = _bucket(shapes)
        _check_state(codec, bucket)
        _check_update(codec, bucket, world, rtol, atol)
        _check_turn(codec, bucket, world)
        _check_restart(codec, bucket, world)
        _check_partial(codec, bucket, world, rtol, atol)
        _check_left_out(codec, bucket, world, rtol, atol)
        _check_steps(codec, bucket, world, rtol, atol)
        _check_zero(codec, bucket, world)
        if isinstance(codec, OneRoundCodec) and type(codec).exchange is OneRoundCodec.exchange:
            _check_decode(codec, bucket, world, rtol, atol)
    _check_promises(codec)


def _bucket(shapes: Iterable[tuple[int, ...]]) -> Bucket:
    parameters = {f"layer{i}.weight": torch.zeros(shape) for i, shape in enumerate(shapes)}
    (bucket,) = arrange(parameters, bucket_bytes=1 << 20).buckets
    return bucket


def _gradients(bucket: Bucket, world: int, seed: int = 0) -> list[torch.Tensor]:
    """One gradient [D] per worker, already multiplied by 1/world."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(bucket.numel, generator=generator) / world for _ in range(world)]


def _check_state(codec: Codec, bucket: Bucket) -> None:
    state = codec.init(bucket)
    names = {slot.name for slot in bucket.slots}
    assert set(state) <= names, f"{codec!r}: init() must key state by the bucket's parameter names, not {set(state)}"
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            assert isinstance(tensor, torch.Tensor), f"{codec!r}: state {name}/{key} is no tensor, it cannot be saved"


def _check_update(codec: Codec, bucket: Bucket, world: int, rtol: float, atol: float) -> None:
    gradients = _gradients(bucket, world)
    results = _exchange(codec, bucket, gradients, [codec.init(bucket) for _ in range(world)], keep_sent=True)
    again = _exchange(codec, bucket, gradients, [codec.init(bucket) for _ in range(world)], keep_sent=True)
    first = results[0].update
    assert first.shape == gradients[0].shape, f"{codec!r}: the update has shape {list(first.shape)}, not the gradient's"
    assert first.dtype == gradients[0].dtype, f"{codec!r}: the update is {first.dtype}, not the gradient's dtype"
    assert all(torch.equal(r.update, first) for r in results), f"{codec!r}: the workers end with different updates"
    assert torch.equal(first, again[0].update), f"{codec!r}: the same gradients gave another update"
    sent = []
    for result in results:
        assert result.sent is not None, f"{codec!r}: asked with keep_sent, it did not say what it sent"
        sent.append(result.sent)
    total = torch.stack(sent).sum(0)
    assert torch.allclose(first, total, rtol=rtol, atol=atol), (
        f"{codec!r}: conservation: the update differs from the sum of what was sent by {(first - total).abs().max()}"
    )


def _check_restart(codec: Codec, bucket: Bucket, world: int) -> None:
    """An exchange that is thrown away before its last reply leaves no trace in the state."""
    gradients = _gradients(bucket, world, seed=1)
    expected = _exchange(codec, bucket, gradients, [codec.init(bucket) for _ in range(world)])
    rounds = _rounds(codec, gradients, bucket)
    for stop in range(rounds):
        states = [codec.init(bucket) for _ in range(world)]
        before = [_copy(state) for state in states]
        _exchange(codec, bucket, gradients, states, stop_after=stop)
        for state, was in zip(states, before, strict=True):
            assert _equal(state, was), f"{codec!r}: state was written before the last of {rounds} replies"
        results = _exchange(codec, bucket, gradients, states)
        assert torch.equal(results[0].update, expected[0].update), f"{codec!r}: an abandoned exchange changed the next"


def _check_partial(codec: Codec, bucket: Bucket, world: int, rtol: float, atol: float) -> None:
    """Check that the update is the mean over those workers that take part, if only some do."""
    gradients = _gradients(bucket, world, seed=2)[: max(1, world - 1)]
    weight = len(gradients) / world
    partial = _exchange(
        codec, bucket, gradients, [codec.init(bucket) for _ in gradients], keep_sent=True, weight=weight
    )
    total = torch.stack([r.sent for r in partial if r.sent is not None]).sum(0) / weight
    assert torch.allclose(partial[0].update, total, rtol=rtol, atol=atol), (
        f"{codec!r}: with weight {weight:.3f} the update is not the sum of what was sent divided by it"
    )


def _check_left_out(codec: Codec, bucket: Bucket, world: int, rtol: float, atol: float) -> None:
    """Check that of a worker that came too late for an update nothing was sent, and the next update is as it should be.

    Its gradient may come with the next one: then both say so in `sent`. Of what is gathered nobody is left out.
    """
    if Gather in codec.needs:
        return
    states = [codec.init(bucket) for _ in range(world)]
    for seed, late in ((3, 0), (4, None)):
        gradients = _gradients(bucket, world, seed)
        weight = 1.0 if late is None else max(1, world - 1) / world
        results = _exchange(codec, bucket, gradients, states, keep_sent=True, weight=weight, left_out=late)
        assert late is None or not results[late].sent.any(), (  # type: ignore[union-attr]
            f"{codec!r}: it says that it has sent something to an update that was made without it"
        )
        total = torch.stack([r.sent for r in results if r.sent is not None]).sum(0) / weight
        assert torch.allclose(results[-1].update, total, rtol=rtol, atol=atol), (
            f"{codec!r}: without a late worker the update is not the sum of what the others sent"
        )


def _check_turn(codec: Codec, bucket: Bucket, world: int) -> None:
    """Check that random numbers are those of the turn: other draws on a worker change nothing."""
    gradients = _gradients(bucket, world, seed=5)
    expected = _exchange(codec, bucket, gradients, [codec.init(bucket) for _ in range(world)])[0].update
    before = RngState.capture()
    try:
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)
        drawn = RngState.capture()
        got = _exchange(codec, bucket, gradients, [codec.init(bucket) for _ in range(world)])[0].update
        after = RngState.capture()
    finally:
        before.restore()
    assert torch.equal(got, expected), f"{codec!r}: what it sends depends on the process's own random numbers"
    is_untouched = torch.equal(drawn.cpu, after.cpu) and drawn.python == after.python
    assert is_untouched, f"{codec!r}: it draws from the process's own random numbers"


def _check_steps(codec: Codec, bucket: Bucket, world: int, rtol: float, atol: float) -> None:
    """Check that over many steps, in some of which a worker has no data, every update is the mean of what was sent.

    In the middle the state goes through a checkpoint.
    """
    states = [codec.init(bucket) for _ in range(world)]
    for step in range(8):
        gradients = _gradients(bucket, world, seed=10 + step)
        if world > 1 and step in (3, 6):
            gradients[-1].zero_()
        weight = (world - 1) / world if world > 1 and step in (3, 6) else 1.0
        if step == 4:
            again = _copy(states[0])
            expected = _exchange(codec, bucket, gradients, [_copy(one) for one in states], step=step)[0].update
            for name, tensors in codec.init(bucket).items():
                for key, tensor in tensors.items():
                    tensor.copy_(again[name][key])
            got = _exchange(codec, bucket, gradients, [again, *map(_copy, states[1:])], step=step)[0].update
            assert torch.equal(got, expected), f"{codec!r}: with the state of a checkpoint the update is another"
        results = _exchange(codec, bucket, gradients, states, keep_sent=True, weight=weight, step=step)
        total = torch.stack([r.sent for r in results if r.sent is not None]).sum(0) / weight
        assert torch.allclose(results[0].update, total, rtol=rtol, atol=atol), (
            f"{codec!r}: in step {step} the update is not the mean of what was sent"
        )
        assert results[0].weight == weight, f"{codec!r}: it does not hand on what all workers weigh"


def _check_decode(codec: OneRoundCodec, bucket: Bucket, world: int, rtol: float, atol: float) -> None:
    """Check that what one worker encoded, decoded by itself, is what it says it has sent."""
    gradients = _gradients(bucket, world, seed=6)
    results = _exchange(codec, bucket, gradients, [{} for _ in gradients], keep_sent=True)
    for rank, (gradient, result) in enumerate(zip(gradients, results, strict=True)):
        turn, before = Turn(bucket, 0, rank, world), gradient.clone()
        tensors = codec.encode(gradient, turn)
        assert torch.equal(gradient, before), f"{codec!r}: encode() changed the gradient"
        shapes = tuple((one.dtype, tuple(one.shape)) for one in tensors)
        expected = codec.encoded_shapes(bucket.numel, bucket.dtype, Turn(bucket, 0, rank, world))
        assert shapes == expected, f"{codec!r}: it encodes as {shapes}, and says {expected}"
        codec.check_encoded(tensors, bucket.numel)
        decoded = codec.decode(tensors, Turn(bucket, 0, rank, world), torch.full_like(gradient, math.nan))
        assert result.sent is not None
        if not getattr(codec, "vote", False):
            assert torch.allclose(decoded, result.sent, rtol=rtol, atol=atol), (
                f"{codec!r}: decoded by itself, what rank {rank} encoded is not what it says it has sent"
            )
        total = torch.ones_like(gradient)
        codec.accumulate_(total, tensors, turn)
        assert torch.allclose(total, 1 + decoded, rtol=rtol, atol=max(atol, 1e-6)), (
            f"{codec!r}: accumulate_() adds something else than decode() returns"
        )


def _check_promises(codec: Codec) -> None:
    """Check the bounds on the error, and the bytes, on many vectors of one worker."""
    promises, bucket = codec.promises, _bucket(((40, 48),))
    errors, sizes, means = [], [], []
    trials = 200
    (fixed,) = _gradients(bucket, 1, seed=50)
    for trial in range(trials):
        # One vector again and again, whose mean is looked at; those before it are of heavier tails.
        gradient = fixed if trial >= trials // 2 else _gradients(bucket, 1, seed=trial)[0] ** 3
        exchange = codec.exchange(gradient.clone(), codec.init(bucket), Turn(bucket, trial), keep_sent=True)
        payload, size = next(exchange), 0
        while True:
            size += payload.size_bytes
            (reply,) = _reply([payload], 1.0, None)
            try:
                payload = exchange.send(reply)
            except StopIteration as stop:
                sent = stop.value.sent
                break
        sizes.append(size)
        errors.append(float((sent - gradient).square().sum() / gradient.square().sum()))
        if gradient is fixed:
            means.append(sent)
    mean_error, mean_size = sum(errors) / trials, sum(sizes) / trials
    if promises.contraction is not None:
        most = 1 - promises.contraction
        assert mean_error <= most * 1.05 + 1e-4, f"{codec!r}: it loses {mean_error:.3f} of the square, above {most:.3f}"
    if promises.variance is not None:
        assert mean_error <= promises.variance * 1.1 + 1e-6, (
            f"{codec!r}: its variance is {mean_error:.3f} of the square, above {promises.variance:.3f}"
        )
        off = float((torch.stack(means).mean(0) - fixed).square().sum() / fixed.square().sum())
        most = 3 * promises.variance / len(means) + 1e-6
        assert off <= most, (
            f"{codec!r}: it promises no bias; the mean of {len(means)} differs by {off:.2e} of the square"
        )
    expected = codec.payload_bytes(bucket)
    assert abs(mean_size - expected) <= 0.02 * expected + 1, (
        f"{codec!r}: it brings {mean_size:.0f} bytes into an exchange, and promises {expected:.0f}"
    )


def _check_zero(codec: Codec, bucket: Bucket, world: int) -> None:
    zeros = [torch.zeros(bucket.numel) for _ in range(world)]
    (first, *_) = _exchange(codec, bucket, zeros, [codec.init(bucket) for _ in range(world)])
    assert not first.update.any(), f"{codec!r}: zero gradients gave an update that is not zero"


def _rounds(codec: Codec, gradients: list[torch.Tensor], bucket: Bucket) -> int:
    count = [0]
    _exchange(codec, bucket, gradients, [codec.init(bucket) for _ in gradients], count=count)
    return count[0]


def _exchange(
    codec: Codec,
    bucket: Bucket,
    gradients: list[torch.Tensor],
    states: list[State],
    *,
    keep_sent: bool = False,
    weight: float = 1.0,
    stop_after: int | None = None,
    count: list[int] | None = None,
    left_out: int | None = None,
    step: int = 0,
) -> list[Exchanged]:
    """Play all workers of one exchange, one of whom may come too late; none of them touches `gradients`."""
    world = len(gradients)
    generators = [
        codec.exchange(gradient.clone(), state, Turn(bucket, step, rank, world), keep_sent=keep_sent)
        for rank, (gradient, state) in enumerate(zip(gradients, states, strict=True))
    ]
    payloads = [next(generator) for generator in generators]
    for round_ in range(_MOST_ROUNDS):
        if count is not None:
            count[0] = round_ + 1
        kinds = {type(payload) for payload in payloads}
        assert len(kinds) == 1, f"{codec!r}: in one round the workers yielded different kinds of payload: {kinds}"
        assert kinds <= codec.needs, f"{codec!r}: it yielded {kinds.pop().__name__}, which `needs` does not declare"
        if stop_after == round_:
            for generator in generators:
                generator.close()
            return []
        replies = _reply(payloads, weight, left_out)
        results, payloads = [], []
        for generator, reply in zip(generators, replies, strict=True):
            try:
                payloads.append(generator.send(reply))
            except StopIteration as stop:
                results.append(stop.value)
        assert not (results and payloads), f"{codec!r}: some workers ended after round {round_ + 1}, others went on"
        if results:
            return results
    raise AssertionError(f"{codec!r}: no end after {_MOST_ROUNDS} rounds")


def _reply(payloads: list[Payload], weight: float, left_out: int | None) -> list[Total | Gathered]:
    if isinstance(payloads[0], Sum):
        inside = [p.tensor for rank, p in enumerate(payloads) if isinstance(p, Sum) and rank != left_out]
        total = torch.stack(inside).sum(0) if inside else torch.zeros_like(payloads[0].tensor)
        return [Total(total.clone(), weight, includes_own=rank != left_out) for rank in range(len(payloads))]
    parts = [p.tensors for p in payloads if isinstance(p, Gather)]
    return [
        Gathered([GatheredPart(rank, tuple(t.clone() for t in part)) for rank, part in enumerate(parts)], weight)
        for _ in payloads
    ]


def _copy(state: State) -> State:
    return {name: {key: tensor.clone() for key, tensor in tensors.items()} for name, tensors in state.items()}


def _equal(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(
        state[name].keys() == other[name].keys()
        and all(torch.equal(state[name][key], other[name][key]) for key in state[name])
        for name in state
    )
