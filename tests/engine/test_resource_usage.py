"""What a worker uses of its machine."""

from __future__ import annotations

import time

import pytest

from offbeat.engine.resource_usage import EVERY_S, ResourceSampler


def test_it_counts_this_process_and_what_was_sent_since_the_last_look() -> None:
    now_s, sent = 100.0, 0
    sampler = ResourceSampler(lambda: now_s, lambda: sent)
    assert sampler.sample() is None, "there is no rate yet"
    ballast = bytearray(64 << 20)
    used_s = time.process_time() + 0.2
    while time.process_time() < used_s:
        pass
    now_s, sent = now_s + 2 * EVERY_S, 3000
    first = sampler.sample()
    assert first is not None
    assert first.cpu_cores >= 0.2 / (2 * EVERY_S) * 0.9, "in ticks of 10 ms"
    assert first.memory_bytes > len(ballast)
    assert first.sent_bytes_per_s == pytest.approx(1500)


def test_whoever_asks_again_within_a_second_hears_the_same() -> None:
    now_s, looks = 0.0, 0

    def sent() -> int:
        nonlocal looks
        looks += 1
        return 0

    sampler = ResourceSampler(lambda: now_s, sent)
    now_s = EVERY_S
    assert sampler.sample() is sampler.sample() is not None
    assert looks == 2, "one look at the beginning and one now"
