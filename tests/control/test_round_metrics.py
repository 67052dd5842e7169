"""What a controller is told where all meet in exchanges: from how long each of them computed, and from nothing else."""

from __future__ import annotations

import random

import pytest

from offbeat.control import RoundMetrics
from offbeat.sync import BSP, LocalSGD

BACK_S = 4.0


def test_all_wait_for_the_last_one_and_what_is_sent_is_nobodys_waiting() -> None:
    book = RoundMetrics()
    for second in range(8):  # a tenth of each is for the exchange
        book.hear(float(second), {0: [0.9], 1: [0.45], 2: [0.0]}, samples=1, looks_back_s=BACK_S)
    metrics = book.metrics(BSP(), 8)
    assert metrics.readings[-1].waited_s == pytest.approx({0: 0.0, 1: 7 * 0.45, 2: 7 * 0.9}), "the first is not counted"
    assert metrics.waiting(2.0) == pytest.approx(0.45)
    assert metrics.imbalance(2.0) == pytest.approx(0.45)
    assert metrics.computing_s == pytest.approx({0: 0.9, 1: 0.45, 2: 0.0})
    assert metrics.steps == 8


def test_what_would_be_waited_in_every_step_is_known_where_they_meet_seldom() -> None:
    book = RoundMetrics()
    for round_ in range(8):  # each is late in every other step
        book.hear(3.0 * round_, {0: [1.0, 2.0], 1: [2.0, 1.0]}, samples=2, looks_back_s=BACK_S)
    metrics = book.metrics(LocalSGD(2), 16)
    assert metrics.waiting(3.0) == 0.0
    assert metrics.imbalance(3.0) == pytest.approx(1 / 4), "of four seconds three would be computed in"


def test_steps_are_those_of_now_and_times_those_of_the_last_exchange() -> None:
    book = RoundMetrics(at_s=1.0)
    assert book.metrics(BSP(), 3).steps == 3
    book.hear(2.0, {0: [1.0], 1: [1.0]}, samples=1, looks_back_s=BACK_S)
    metrics = book.metrics(BSP(), 9)
    assert (metrics.steps, metrics.now_s, metrics.held_s) == (9, 2.0, 1.0)
    assert metrics.waiting(0.5) is None


def test_who_comes_is_counted_from_its_second_round_on_and_who_is_lost_no_more() -> None:
    book = RoundMetrics()
    for second in range(3):
        book.hear(float(second), {0: [1.0], 1: [1.0]}, samples=1, looks_back_s=BACK_S)
    book.hear(12.0, {0: [1.0], 1: [1.0], 5: [9.0]}, samples=1, looks_back_s=BACK_S)  # it has started meanwhile
    assert sum(book.metrics(BSP(), 4).readings[-1].waited_s.values()) == 0.0
    book.hear(14.0, {0: [1.0], 5: [2.0]}, samples=1, looks_back_s=BACK_S)
    metrics = book.metrics(BSP(), 5)
    assert metrics.readings[-1].waited_s == {0: 1.0, 5: 0.0}
    assert metrics.waiting(2.0) == pytest.approx(1 / 4)


def test_of_a_policy_the_fastest_pace_is_known_when_another_decides() -> None:
    book = RoundMetrics()
    for number, second in enumerate([0, 1, 2, 3, 4, 5, 6, 20, 21]):
        book.hear(float(second), {0: [0.5], 1: [0.5]}, samples=32, looks_back_s=BACK_S)
        assert (book.metrics(BSP(), number).pace(BSP(), 60.0) is None) == (number < 6)
    book.swapped(BSP(), 21.0, by_controller=True)
    metrics = book.metrics(LocalSGD(4), 9)
    assert metrics.pace(BSP(), 60.0) == 32.0
    assert metrics.pace(LocalSGD(4), 60.0) is None
    assert metrics.swaps == (21.0,)


def test_readings_are_as_old_as_they_are_asked_for_and_no_more() -> None:
    book, chance, now_s = RoundMetrics(), random.Random(1), 0.0
    for _ in range(5000):
        now_s += chance.uniform(0.001, 0.05)
        book.hear(now_s, {0: [0.01], 1: [0.02]}, samples=1, looks_back_s=BACK_S)
        metrics = book.metrics(BSP(), 1)
        assert len(metrics.readings) < 60
        assert all(here.at_s < there.at_s for here, there in zip(metrics.readings, metrics.readings[1:], strict=False))
        assert (metrics.waiting(BACK_S) is not None) == (now_s - metrics.readings[0].at_s >= BACK_S)
    assert metrics.readings[0].at_s > now_s - BACK_S - 0.2
