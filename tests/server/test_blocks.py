"""How a model's blocks are dealt to shards."""

from __future__ import annotations

import torch

from offbeat.layout import arrange
from offbeat.server.blocks import cut, deal


def test_every_shard_holds_as_much() -> None:
    blocks = cut(arrange({"a": torch.zeros(900)}, bucket_bytes=1 << 20), 400)
    assert len(blocks) == 9
    holders = deal(blocks, 3)
    assert [holders.count(shard) for shard in range(3)] == [3, 3, 3]
