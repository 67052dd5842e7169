"""Steps that go as predicted keep their schedule; what has moved is found, and is told by each worker of its own."""

from __future__ import annotations

import dataclasses

import pytest

from offbeat.engine.schedule_monitor import BlockTimes, ScheduleMonitor, StepTaken, agreed, to_text
from offbeat.errors import DisagreementError
from offbeat.scheduling import BackwardProfile, Prophet, Schedule, play
from tests.scheduling.test_replanning import profile

PLANNED = profile(bandwidth=8e6)
SCHEDULE = Prophet(1 << 14).schedule(PLANNED)


def watch(planned: BackwardProfile = PLANNED) -> ScheduleMonitor:
    return ScheduleMonitor(planned, SCHEDULE)


def taken(
    real: BackwardProfile,
    schedule: Schedule = SCHEDULE,
    *,
    samples: int = 32,
    workers: int = 2,
    at_s: float = 1000.0,
) -> StepTaken:
    """A step as it goes where the profile is this one."""
    played = play(real, schedule)
    ready = [max(real.gradients[one.gradient].ready_s for one in block.slices) for block in schedule.blocks]
    blocks = [
        BlockTimes(at_s + max(ready[: i + 1]), at_s + issued_s, at_s + done_s, True)
        for i, (issued_s, done_s) in enumerate(zip(played.issued, played.done, strict=True))
    ]
    return StepTaken(blocks, at_s, at_s + real.backward_s, real.forward_s, samples, workers)


def go(watching: ScheduleMonitor, real: BackwardProfile, steps: int, **step: int) -> str:
    """The reason for another schedule behind so many steps."""
    for _ in range(steps):
        if watching.watches_gradients:
            for one in real.gradients:
                watching.gradient_is_complete(one.name, one.ready_s)
        watching.step_taken(taken(real, SCHEDULE, **step))
    return watching.trigger.reason


def test_a_step_as_predicted_changes_nothing() -> None:
    watching = watch()
    assert go(watching, PLANNED, 100) == ""
    assert watching.measured().bandwidth == pytest.approx(8e6, rel=0.01)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.3, 2.0])
def test_a_link_that_changes_is_told_within_ten_steps(factor: float) -> None:
    watching = watch()
    go(watching, PLANNED, 20)
    real = dataclasses.replace(PLANNED, bandwidth=8e6 * factor)
    assert "MB of gradients in a second" in go(watching, real, 10)
    assert watching.measured().bandwidth == pytest.approx(8e6 * factor, rel=0.1)


def test_a_few_percent_are_not_told() -> None:
    assert go(watch(), dataclasses.replace(PLANNED, bandwidth=8.8e6), 100) == ""


def test_gradients_that_are_later_are_told_and_measured() -> None:
    watching = watch()
    go(watching, PLANNED, 20)
    real = profile(bandwidth=8e6, ready_s=0.03)
    assert "later" in go(watching, real, 6)
    go(watching, real, 6)
    assert watching.measured().gradients[0].ready_s == pytest.approx(0.18)
    assert watching.measured().backward_s == pytest.approx(0.18)


def test_a_worker_that_is_faster_than_the_slowest_has_nothing_to_tell() -> None:
    assert go(watch(), profile(bandwidth=8e6, ready_s=0.012), 100) == ""


@pytest.mark.parametrize(("step", "why"), [({"samples": 48}, "48 samples, and not 32"), ({"workers": 3}, "3 workers")])
def test_another_batch_and_other_workers_are_told(step: dict[str, int], why: str) -> None:
    watching = watch()
    go(watching, PLANNED, 10)
    assert go(watching, PLANNED, 1, **step) == "", "such as the last batch of an epoch"
    assert go(watching, PLANNED, 10) == ""
    assert why in go(watching, PLANNED, 5, **step)


def test_a_clock_that_is_set_back_changes_nothing() -> None:
    watching = watch()
    go(watching, PLANNED, 10)
    step = taken(PLANNED)
    blocks = [one._replace(done_s=one.done_s - 5000.0) for one in step.blocks]
    watching.step_taken(step._replace(blocks=blocks, forward_s=0.0))
    assert go(watching, PLANNED, 20) == ""
    assert watching.measured().trouble == ""


def test_the_slowest_of_all_workers_counts() -> None:
    both = agreed({0: to_text(PLANNED), 1: to_text(profile(bandwidth=5e6))})
    assert both.bandwidth == 5e6


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (to_text(dataclasses.replace(PLANNED, bandwidth=0.0)), "rank 3 has told a bandwidth of 0.0 bytes"),
        (to_text(dataclasses.replace(PLANNED, bandwidth=-2.0)), "rank 3 has told a bandwidth of -2.0"),
        (to_text(dataclasses.replace(PLANNED, latency_s=-1.0)), "rank 3 has told a latency of -1.0 s"),
        (to_text(dataclasses.replace(PLANNED, backward_s=float("nan"))), "rank 3 has told cannot be read"),
        (to_text(dataclasses.replace(PLANNED, gradients=PLANNED.gradients[1:])), "rank 3 has 5 gradients"),
        ("", "rank 3 has told cannot be read"),
    ],
)
def test_a_worker_that_tells_what_cannot_be_is_named(told: str, why: str) -> None:
    with pytest.raises(DisagreementError, match=why):
        agreed({0: to_text(PLANNED), 3: told})
