"""What a server makes of the contributions of one update, and the kinds in which they come."""

from __future__ import annotations

import pytest
import torch

from offbeat.errors import PeerError
from offbeat.protocol.training import CastPayload, DensePayload
from offbeat.server.aggregator import BlockContribution, WeightedMean
from offbeat.server.pushed_block import PushedBlock, payload_of, receive


def contributions(weights: tuple[float, ...], dtype: torch.dtype = torch.float32) -> list[BlockContribution]:
    torch.manual_seed(0)
    payload = payload_of(torch.empty(0, dtype=dtype), "float32")
    parts = [PushedBlock(payload, torch.randn(1000).to(dtype)) for _ in weights]
    return [BlockContribution(i, weight, part) for i, (weight, part) in enumerate(zip(weights, parts, strict=True))]


def test_equal_weights_are_multiplied_before_they_are_added_as_in_data_parallel_training() -> None:
    brought = contributions((8.0, 8.0, 8.0))
    a, b, c = (one.part.body for one in brought)
    mean = WeightedMean().combine(brought, torch.float32)
    assert mean is not None
    assert torch.equal(mean, a * (1 / 3) + b * (1 / 3) + c * (1 / 3))


def test_weights_count_by_samples_and_what_weighs_nothing_is_not_looked_at() -> None:
    brought = contributions((3.0, 0.0, 1.0))
    brought[1].part.body.fill_(float("nan"))
    mean = WeightedMean().combine(brought, torch.float32)
    assert mean is not None
    assert torch.equal(mean, brought[0].part.body * 0.75 + brought[2].part.body * 0.25)
    assert WeightedMean().combine(brought[1:2], torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_kept_as_they_came_and_added_in_the_type_of_the_block(dtype: torch.dtype) -> None:
    brought = contributions((1.0, 1.0), dtype)
    assert brought[0].part.payload == CastPayload(str(dtype).removeprefix("torch."))
    mean = WeightedMean().combine(brought, torch.float32)
    a, b = (one.part.body for one in brought)
    assert a.dtype == dtype
    assert mean is not None
    assert torch.equal(mean, a.float() * 0.5 + b.float() * 0.5)


def test_nothing_that_was_brought_is_changed() -> None:
    brought = contributions((1.0, 2.0))
    before = [one.part.body.clone() for one in brought]
    WeightedMean().combine(brought, torch.float32)
    assert all(torch.equal(one.part.body, was) for one, was in zip(brought, before, strict=True))


@pytest.mark.parametrize(
    ("payload", "size_bytes", "says"),
    [
        (DensePayload(), 39, "Cannot take 39 bytes as block 7: it has 40"),
        (CastPayload("float16"), 40, "Cannot take 40 bytes as block 7: it has 20"),
        (CastPayload("int64"), 80, "Cannot take a gradient of type 'int64'"),
    ],
)
def test_a_body_of_another_size_gets_no_memory(
    payload: DensePayload | CastPayload, size_bytes: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.zeros(10)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: pytest.fail("allocated"))
    with pytest.raises(PeerError, match=says):
        receive(payload, values, 7, size_bytes)


def test_a_body_is_as_large_as_its_kind_says() -> None:
    values = torch.zeros(10)
    assert receive(DensePayload(), values, 0, 40).body.dtype == torch.float32
    assert receive(CastPayload("bfloat16"), values, 0, 20).body.dtype == torch.bfloat16
