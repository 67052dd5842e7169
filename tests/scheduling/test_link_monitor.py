"""The link is followed through noise, outliers and clocks that are set."""

from __future__ import annotations

import math
import random

import pytest

from offbeat.scheduling import LinkMonitor

SIZES = (1 << 17, 1 << 18, 1 << 19, 1 << 20)


def seen(link: LinkMonitor, count: int, *, latency_s: float, bandwidth: float, noise: float = 0.02) -> None:
    """Exchanges in which every third finds the link idle."""
    for i in range(count):
        draw = random.Random(i)
        size, was_idle = SIZES[i % len(SIZES)], i % 3 == 0
        seconds = (latency_s if was_idle else 0.0) + size / bandwidth
        link.observe(size, seconds * (1 + noise * draw.uniform(-1, 1)), was_idle=was_idle)


def test_what_is_right_stays() -> None:
    link = LinkMonitor(0.004, 20e6, 0.001)
    seen(link, 200, latency_s=0.004, bandwidth=20e6)
    assert link.bandwidth == pytest.approx(20e6, rel=0.03)
    assert link.latency_s == pytest.approx(0.004, rel=0.3)


@pytest.mark.parametrize("factor", [0.1, 0.5, 0.8, 1.25, 4.0])
def test_a_link_that_changes_is_followed(factor: float) -> None:
    link = LinkMonitor(0.004, 20e6, 0.0)
    seen(link, 60, latency_s=0.004, bandwidth=20e6)
    seen(link, 100, latency_s=0.008, bandwidth=20e6 * factor)
    assert link.bandwidth == pytest.approx(20e6 * factor, rel=0.05)


def test_latency_and_bandwidth_are_told_apart() -> None:
    link = LinkMonitor(0.001, 20e6, 0.0)
    seen(link, 300, latency_s=0.02, bandwidth=20e6)
    assert link.latency_s == pytest.approx(0.02, rel=0.1)
    assert link.bandwidth == pytest.approx(20e6, rel=0.03)


def test_outliers_do_not_count() -> None:
    link = LinkMonitor(0.0, 20e6, 0.0)
    counted = []
    for i in range(200):
        is_late = i % 5 == 4
        size = SIZES[i % len(SIZES)]
        counted.append(link.observe(size, size / 20e6 * (8.0 if is_late else 1.0), was_idle=False))
    assert link.bandwidth == pytest.approx(20e6, rel=0.01)
    assert not any(counted[9::5])


@pytest.mark.parametrize("seconds", [0.0, -3.0, math.nan, math.inf, -math.inf])
def test_a_clock_that_is_set_does_not_count(seconds: float) -> None:
    link = LinkMonitor(0.001, 20e6, 0.0)
    assert not any(link.observe(1 << 20, seconds, was_idle=was_idle) for was_idle in (False, True) for _ in range(50))
    assert (link.latency_s, link.bandwidth) == (0.001, 20e6)


@pytest.mark.parametrize("seconds", [1e-12, 1e-6, 1e3, 1e9])
def test_whatever_is_seen_it_stays_a_link(seconds: float) -> None:
    link = LinkMonitor(0.0, 20e6, 0.0)
    for i in range(500):
        link.observe(1 << 20, seconds * (1 + i % 7), was_idle=i % 2 == 0)
    assert link.latency_s >= 0
    assert 0 < link.bandwidth < math.inf


def test_small_exchanges_say_what_each_takes_at_least() -> None:
    link = LinkMonitor(0.0, 20e6, 0.004)
    for _ in range(20):
        link.observe(1 << 10, 0.002, was_idle=False)
    assert link.gap_s == 0.002
    assert link.bandwidth == 20e6


def test_where_nothing_is_said_of_latency_one_exchange_does_not_throw_it_over() -> None:
    link = LinkMonitor(0.004, 20e6, 0.0)
    for _ in range(2000):
        link.observe(1 << 20, (1 << 20) / 20e6, was_idle=False)
    link.observe(1 << 20, 1.1 * (0.004 + (1 << 20) / 20e6), was_idle=True)
    assert link.latency_s < 0.012
