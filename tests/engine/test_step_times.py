"""How long each worker computes, as it is told in the tail of an exchange."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.diagnosis.wait import BlockingWait
from offbeat.engine import MetricsFile, StepMetrics
from offbeat.engine.step_times import StepTimes, folded

if TYPE_CHECKING:
    from collections.abc import Sequence


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 12))
def test_what_is_too_much_is_in_the_first_and_nothing_is_lost(own: list[int], steps: int) -> None:
    told = folded(own, steps)
    assert sum(told) == sum(own)
    assert len(told) == min(len(own), steps)
    assert told[1:] == own[len(own) - len(told) + 1 :]


def ends(own: Sequence[Sequence[float]], ranks: int) -> list[StepTimes]:
    return [StepTimes(rank, ranks, lambda own=own[rank]: own, are_told=True) for rank in range(len(own))]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_hear_what_each_has_said(dtype: torch.dtype) -> None:
    said = [[0.25, 0.5], [1.0, 0.125], [2.0, 4.0]]
    workers = ends(said, 3)
    places = [torch.zeros(workers[0].room(every=2), dtype=dtype) for _ in workers]
    for worker, place in zip(workers, places, strict=True):
        worker.write(place)
    for worker in workers:
        assert worker.read(sum(places[1:], places[0])) == dict(enumerate(said))
        assert worker.read(places[0] + places[2]) == {0: said[0], 2: said[2]}, "one is lost"


def test_who_has_no_place_says_nothing_and_where_nobody_wants_to_know_there_is_none() -> None:
    outside = StepTimes(3, 3, lambda: [1.0, 2.0], are_told=True)
    place = torch.zeros(outside.room(every=2))
    outside.write(place)
    assert not place.any()
    assert StepTimes(0, 3, lambda: [1.0], are_told=False).room() == 0


class Ticking:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def unix_s(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds


def meter(clock: Any) -> StepMetrics:
    return StepMetrics(0, clock, MetricsFile(None), BlockingWait(clock=clock, timeout=timedelta(seconds=5)))


def test_the_present_step_is_told_as_far_as_it_is_and_its_rest_the_next_time() -> None:
    clock = Ticking()
    its = meter(clock)
    clock.at_s += 1.0
    assert its.take_own() == [1.0]
    clock.at_s += 0.5  # of the same step, such as a second exchange
    assert its.take_own() == [0.5]
    its.compute_done()
    clock.at_s += 7.0  # an exchange
    its._waiter.waited_s += 7.0
    its.exchange_done(0, [], 1.0)
    for step in (1, 2):
        clock.at_s += 2.0
        its.compute_done()
        its.exchange_done(step, [], 1.0)
    clock.at_s += 3.0
    assert its.take_own() == [0.0, 2.0, 2.0, 3.0]
    assert folded([0.0, 2.0, 2.0, 3.0], 3) == [2.0, 2.0, 3.0]


def test_two_models_have_one_step() -> None:
    clock = Ticking()
    its = meter(clock)
    for step in range(2):
        for model in (0, 1):
            clock.at_s += 1.0
            its.compute_done()
            its.exchange_done(step, [], 1.0, model=model)
    assert its.take_own() == [2.0, 2.0, 0.0]


def test_thousands_of_steps_are_kept_in_few_numbers() -> None:
    clock = Ticking()
    its = meter(clock)
    for step in range(3000):
        clock.at_s += 1.0
        its.compute_done()
        its.exchange_done(step, [], 1.0)
    told = its.take_own()
    assert len(told) < 300
    assert sum(told) == 3000
