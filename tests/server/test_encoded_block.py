"""Blocks that a codec has encoded, on their way to a shard: they come as they were, and nothing else is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from offbeat import GRBS, QSGD, RandomK, Sign, TopK
from offbeat.errors import PeerError
from offbeat.layout import arrange
from offbeat.protocol.training import EncodedPayload
from offbeat.server.blocks import cut
from offbeat.server.encoded_block import BlockCodec, EncodedBlock
from offbeat.server.pushed_block import EncodedReader, receive

if TYPE_CHECKING:
    from offbeat.codec import OneRoundCodec

CODECS: list[OneRoundCodec] = [GRBS(4, 4), QSGD(8), QSGD(2), Sign(), TopK(0.1), RandomK(0.2), RandomK(0.2, "private")]
LAYOUT = arrange({"a": torch.zeros(301), "b": torch.zeros(7, 50)}, bucket_bytes=1 << 20)
BLOCKS = cut(LAYOUT, 1000)


def pushed(codec: OneRoundCodec, block: int, step: int = 3, worker: int = 2) -> tuple[torch.Tensor, EncodedBlock]:
    """A gradient, and what the worker sends of it."""
    grad = torch.randn(BLOCKS[block].numel, generator=torch.Generator().manual_seed(block))
    here = BlockCodec(codec, BLOCKS, seed=7)
    return grad, here.encode(grad, here.turn(block, worker, step, change=False))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_shard_decodes_what_a_worker_has_encoded(codec: OneRoundCodec) -> None:
    """It knows neither the gradient nor what is in the other blocks."""
    for block in BLOCKS:
        grad, encoded = pushed(codec, block.index)
        there = EncodedReader(BlockCodec(codec, [block], seed=7), block.index, 2)
        got = receive(encoded.payload, torch.zeros(block.numel), block.index, len(encoded.body), there)
        assert got.body.dtype == torch.uint8
        got.body.copy_(encoded.body)
        got.check()
        decoded = got.decode(torch.float32)
        turn = BlockCodec(codec, BLOCKS, seed=7).turn(block.index, 2, encoded.payload.step, change=False)
        expected = codec.decode(codec.encode(grad, turn), turn, torch.empty(block.numel))
        assert torch.equal(decoded, expected)
        assert decoded.any()
        assert len(encoded.body) < 4 * block.numel


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("size_bytes", [0, 8, 1 << 40])
def test_another_size_is_refused_before_memory_is_allocated(
    codec: OneRoundCodec, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, encoded = pushed(codec, 0)
    reader = EncodedReader(BlockCodec(codec, BLOCKS, seed=7), 0, 2)
    values = torch.zeros(BLOCKS[0].numel)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("memory was allocated"))
    with pytest.raises(PeerError, match=f"Cannot take {size_bytes} bytes as block 0: it has {len(encoded.body)}"):
        receive(encoded.payload, values, 0, size_bytes, reader)


def test_a_plan_whose_workers_push_each_element_takes_no_encoded_block() -> None:
    with pytest.raises(PeerError, match="with this plan workers push each element"):
        receive(EncodedPayload(0), torch.zeros(10), 0, 40)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([0, 1 << 30], "Cannot decode indices 0 to 1073741824: there are 217 elements"),
        ([-1, 5], "Cannot decode indices -1 to 5"),
        ([5, 5], "Cannot decode indices that do not ascend"),
        ([9, 5], "Cannot decode indices that do not ascend"),
    ],
)
def test_indices_beyond_the_block_are_refused_when_they_come(indices: list[int], says: str) -> None:
    codec = TopK(2 / 217)
    _, encoded = pushed(codec, 0)
    assert BLOCKS[0].numel == 217
    reader = EncodedReader(BlockCodec(codec, BLOCKS, seed=7), 0, 2)
    got = receive(encoded.payload, torch.zeros(217), 0, len(encoded.body), reader)
    got.body.copy_(encoded.body)
    got.body[:8] = torch.tensor(indices, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(PeerError, match=says):
        got.check()


def test_blocks_of_one_contribution_and_of_two_workers_are_drawn_by_what_lies_in_them() -> None:
    """All workers draw the same blocks of one gradient, and other ones of the next."""
    shared = GRBS(4, 4)
    drawn = [pushed(shared, 0, step, worker)[1].body for step, worker in ((3, 0), (3, 1), (4, 0))]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    private = RandomK(0.2, "private")
    assert not torch.equal(pushed(private, 0, 3, 0)[1].body, pushed(private, 0, 3, 1)[1].body)
