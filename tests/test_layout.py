"""Which parameters lie in which bucket."""

from __future__ import annotations

import itertools
import random

import torch

from offbeat.layout import arrange, arrange_fragments, partition


def test_the_first_bucket_is_small_so_that_sending_begins_early() -> None:
    parameters = {name: torch.zeros(1 << 18) for name in "abcde"}  # 1 MiB each
    layout = arrange(parameters, bucket_bytes=2 << 20)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["e"], ["d", "c"], ["b", "a"]]


def test_fragments_are_stretches_the_largest_of_which_is_as_small_as_can_be() -> None:
    chance = random.Random(0)
    for _ in range(200):
        sizes, count = [chance.randrange(1, 30) for _ in range(chance.randrange(1, 9))], chance.randrange(1, 6)
        parts = partition(sizes, count)
        assert list(itertools.chain(*parts)) == list(range(len(sizes)))
        assert [len(part) > 0 for part in parts] == [True] * min(count, len(sizes)) + [False] * (count - len(sizes))
        cuts = itertools.combinations_with_replacement(range(len(sizes) + 1), count - 1)
        ways = ([0, *cut, len(sizes)] for cut in cuts)
        best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(way)) for way in ways)
        assert max(sum(sizes[i] for i in part) for part in parts) == best


def test_one_fragment_is_laid_out_as_the_model() -> None:
    parameters = {name: torch.zeros(1 << 18) for name in "abcde"}
    (whole,) = arrange_fragments(parameters, 1, bucket_bytes=2 << 20)
    assert whole == arrange(parameters, bucket_bytes=2 << 20).buckets
    parts = arrange_fragments(parameters, 3, bucket_bytes=2 << 20)
    assert [[slot.name for bucket in part for slot in bucket.slots] for part in parts] == [
        ["b", "a"],
        ["d", "c"],
        ["e"],
    ]
    assert [bucket.index for part in parts for bucket in part] == list(range(sum(map(len, parts))))
