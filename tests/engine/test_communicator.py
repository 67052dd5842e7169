"""Who counts the bytes that are sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.engine.communicator import Communicator
from offbeat.payload import Sum


class Fabric:
    """A fabric on which each exchange sends 100 bytes."""

    rank, world = 0, 2

    def start(self, payload: Sum) -> Any:
        return SimpleNamespace(sent_bytes=100)


@pytest.mark.parametrize("is_apart", [False, True])
def test_what_another_thread_sends_is_counted_when_the_one_that_trains_says_so(is_apart: bool) -> None:
    metrics = SimpleNamespace(sent_bytes=0, now_s=lambda: 0.0)
    context: Any = SimpleNamespace(waiter=None, metrics=metrics)
    fabric: Any = Fabric()
    communicator = Communicator(fabric, context, is_apart=is_apart)
    for _ in range(2):
        communicator.start(Sum(torch.ones(1)))
    assert metrics.sent_bytes == (0 if is_apart else 200)
    for _ in range(2):
        communicator.tell()
        assert metrics.sent_bytes == 200
