"""What a swap cost: who had to wait longer than with the slower of both policies, and how the loss went over it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from offbeat.lab.recorder import Line, MeasuredStep
from offbeat.lab.swap_cost import course, handovers, swaps

if TYPE_CHECKING:
    from collections.abc import Sequence

AGREED = "decides when workers may go on, not BSP() any more: why not (agreed upon within 250.0 ms; plan a, was b)."


def lines(took_s: Sequence[float], losses: Sequence[float | None], begin_s: float) -> list[Line]:
    """What a worker's recorder wrote that took so long for each step."""
    return [
        MeasuredStep(index, step_s, 0.0, 1, begin_s + sum(took_s[: index + 1]), loss)
        for index, (step_s, loss) in enumerate(zip(took_s, losses, strict=True))
    ]


def test_swaps_are_those_that_all_ranks_tell_of() -> None:
    told = [
        (5.0, f"SSP(bound=8) {AGREED}"),
        (9.0, "From step 12 on ASP() decides when workers may go on (it took 8 ms)"),
    ]
    later = [(5.25, told[0][1])]
    first, second = swaps([[(1.0, "Cannot swap: two at once"), *told], later])
    assert (first.policy, first.begin_s, first.end_s, first.agreed_s) == ("SSP(bound=8)", 5.0, 5.25, 0.25)
    assert (second.policy, second.begin_s, second.end_s, second.agreed_s) == ("ASP()", 9.0, 9.0, 0.008)
    assert swaps([]) == swaps([[], told]) == []


def test_a_swap_costs_what_its_longest_step_takes_more_than_with_the_slower_policy() -> None:
    """20 steps of 1 s; one of 3 s in which it is swapped, one of 2 s behind it; then 20 of 0.5 s, with another loss."""
    now_s, clock_s = time.time(), time.perf_counter()
    took_s = [1.0] * 20 + [3.0, 2.0] + [0.5] * 20
    losses = [9.0] * 10 + [2.0] * 10 + [50.0, 50.0] + [1.5] * 10 + [0.0] * 10
    workers = [lines(took_s, losses, clock_s), lines([1.0] * 42, losses, clock_s)]
    text = f"ASP() {AGREED}"
    swapped = swaps([[(now_s + 22.0, text)], [(now_s + 20.9, text)]])
    (cost,) = handovers("row", 1, swapped, workers)
    assert (cost.row, cost.repeat, cost.policy, cost.agreed_s) == ("row", 1, "ASP()", 0.25)
    assert cost.time_s == pytest.approx(20.9, abs=0.01), "when the first had taken it up"
    assert cost.longer_s == pytest.approx(2.0), "3 s, not 1 s"
    assert cost.loss_before == 2.0, "of the last ten steps before"
    assert cost.loss_after is not None
    assert cost.loss_after < 10, "of the first ten behind the one behind"
    assert "2000 ms more than usual, loss 2.000 before" in cost.words


def test_a_swap_outside_the_measured_steps_has_no_cost() -> None:
    now_s, clock_s = time.time(), time.perf_counter()
    workers = [lines([1.0] * 5, [None] * 5, clock_s)]
    for moment_s in (-10.0, 5.5):
        assert handovers("row", 0, swaps([[(now_s + moment_s, f"ASP() {AGREED}")]]), workers) == []
    (cost,) = handovers("row", 0, swaps([[(now_s + 2.5, f"ASP() {AGREED}")]]), workers)
    assert (cost.longer_s, cost.loss_before, cost.loss_after) == (0.0, None, None)
    assert handovers("row", 0, swaps([[(now_s, f"ASP() {AGREED}")]]), [[]]) == []


def test_the_course_of_the_loss_is_the_mean_of_those_that_took_the_step() -> None:
    one, other = lines([1.0] * 3, [3.0, 2.0, 1.0], 0.0), lines([1.0] * 2, [1.0, None], 0.0)
    assert course([one, other]) == [2.0, 2.0, 1.0]
    assert course([lines([1.0], [None], 0.0)]) == []
