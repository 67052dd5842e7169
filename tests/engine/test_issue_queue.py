"""The order in which buckets are issued, whatever is complete first."""

from __future__ import annotations

import random

import torch

from offbeat.engine.issue_queue import IssueQueue, first_in_first_out
from offbeat.layout import arrange


def test_first_in_first_out_is_the_order_of_the_layout() -> None:
    layout = arrange({str(i): torch.zeros(64) for i in range(5)}, bucket_bytes=64 * 4)
    assert list(first_in_first_out(layout)) == [bucket.index for bucket in layout.buckets]


def test_the_order_is_the_same_whatever_is_complete_first() -> None:
    chance = random.Random(3)
    for _ in range(200):
        order = chance.sample(range(6), 6)
        issued: list[int] = []
        queue = IssueQueue(order, issued.append)
        for _ in range(2):  # a second backward
            queue.restart()
            issued.clear()
            arrived = chance.sample(range(6), chance.randrange(7))
            for number, index in enumerate(arrived, 1):
                queue.add(index)
                assert issued == order[: len(issued)]
                assert set(issued) <= set(arrived[:number]), "what is not complete is held back"
                assert len(issued) == 6 or order[len(issued)] not in arrived[:number], "what can go goes"
                assert [queue.has_issued(one) for one in range(6)] == [one in issued for one in range(6)]
            queue.flush()
            assert issued == order
