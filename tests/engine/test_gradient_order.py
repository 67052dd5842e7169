"""In which order buckets are filled: as gradients come, and behind them those that got none."""

from __future__ import annotations

import torch

from offbeat.engine.gradient_order import GradientOrder


def test_the_last_arrival_counts_and_who_got_no_gradient_follows_backwards() -> None:
    order = GradientOrder({name: torch.zeros(1) for name in "abcde"})
    for name in "dbdc":
        order.note(name)
    assert order.mine == ["b", "d", "c", "e", "a"]
