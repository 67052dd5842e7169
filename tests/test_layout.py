"""Which parameters lie in which bucket."""

from __future__ import annotations

import torch

from offbeat.layout import arrange


def test_the_first_bucket_is_small_so_that_sending_begins_early() -> None:
    parameters = {name: torch.zeros(1 << 18) for name in "abcde"}  # 1 MiB each
    layout = arrange(parameters, bucket_bytes=2 << 20)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["e"], ["d", "c"], ["b", "a"]]
