"""The promises of every codec, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.layout import Bucket, arrange
from offbeat.payload import Gather, GatheredPart, Payload, Reply, Sum, Total

if TYPE_CHECKING:
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
    for sizes in ((3, 17, 4), (1,), (257,)):
        bucket = _bucket(sizes)
        _check_state(codec, bucket)
        _check_update(codec, bucket, world, rtol, atol)
        _check_restart(codec, bucket, world)
        _check_partial(codec, bucket, world, rtol, atol)
        _check_left_out(codec, bucket, world, rtol, atol)
        _check_zero(codec, bucket, world)


def _bucket(sizes: tuple[int, ...]) -> Bucket:
    parameters = {f"layer{i}.weight": torch.zeros(size) for i, size in enumerate(sizes)}
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
    results = _exchange(codec, gradients, [codec.init(bucket) for _ in range(world)], keep_sent=True)
    again = _exchange(codec, gradients, [codec.init(bucket) for _ in range(world)], keep_sent=True)
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
    expected = _exchange(codec, gradients, [codec.init(bucket) for _ in range(world)])
    rounds = _rounds(codec, gradients, bucket)
    for stop in range(rounds):
        states = [codec.init(bucket) for _ in range(world)]
        before = [_copy(state) for state in states]
        _exchange(codec, gradients, states, stop_after=stop)
        for state, was in zip(states, before, strict=True):
            assert _equal(state, was), f"{codec!r}: state was written before the last of {rounds} replies"
        results = _exchange(codec, gradients, states)
        assert torch.equal(results[0].update, expected[0].update), f"{codec!r}: an abandoned exchange changed the next"


def _check_partial(codec: Codec, bucket: Bucket, world: int, rtol: float, atol: float) -> None:
    """Check that the update is the mean over those workers that take part, if only some do."""
    gradients = _gradients(bucket, world, seed=2)[: max(1, world - 1)]
    weight = len(gradients) / world
    partial = _exchange(codec, gradients, [codec.init(bucket) for _ in gradients], keep_sent=True, weight=weight)
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
        results = _exchange(codec, gradients, states, keep_sent=True, weight=weight, left_out=late)
        assert late is None or not results[late].sent.any(), (  # type: ignore[union-attr]
            f"{codec!r}: it says that it has sent something to an update that was made without it"
        )
        total = torch.stack([r.sent for r in results if r.sent is not None]).sum(0) / weight
        assert torch.allclose(results[-1].update, total, rtol=rtol, atol=atol), (
            f"{codec!r}: without a late worker the update is not the sum of what the others sent"
        )


def _check_zero(codec: Codec, bucket: Bucket, world: int) -> None:
    zeros = [torch.zeros(bucket.numel) for _ in range(world)]
    (first, *_) = _exchange(codec, zeros, [codec.init(bucket) for _ in range(world)])
    assert not first.update.any(), f"{codec!r}: zero gradients gave an update that is not zero"


def _rounds(codec: Codec, gradients: list[torch.Tensor], bucket: Bucket) -> int:
    count = [0]
    _exchange(codec, gradients, [codec.init(bucket) for _ in gradients], count=count)
    return count[0]


def _exchange(
    codec: Codec,
    gradients: list[torch.Tensor],
    states: list[State],
    *,
    keep_sent: bool = False,
    weight: float = 1.0,
    stop_after: int | None = None,
    count: list[int] | None = None,
    left_out: int | None = None,
) -> list[Exchanged]:
    """Play all workers of one exchange, one of whom may come too late; none of them touches `gradients`."""
    generators = [
        codec.exchange(gradient.clone(), state, keep_sent=keep_sent)
        for gradient, state in zip(gradients, states, strict=True)
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


def _reply(payloads: list[Payload], weight: float, left_out: int | None) -> list[Reply]:
    if isinstance(payloads[0], Sum):
        inside = [p.tensor for rank, p in enumerate(payloads) if isinstance(p, Sum) and rank != left_out]
        total = torch.stack(inside).sum(0) if inside else torch.zeros_like(payloads[0].tensor)
        return [Total(total.clone(), weight, includes_own=rank != left_out) for rank in range(len(payloads))]
    parts = [p.tensors for p in payloads if isinstance(p, Gather)]
    return [[GatheredPart(rank, tuple(t.clone() for t in part)) for rank, part in enumerate(parts)] for _ in payloads]


def _copy(state: State) -> State:
    return {name: {key: tensor.clone() for key, tensor in tensors.items()} for name, tensors in state.items()}


def _equal(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(
        state[name].keys() == other[name].keys()
        and all(torch.equal(state[name][key], other[name][key]) for key in state[name])
        for name in state
    )
