"""Schedulers keep their promises, and come to what is known of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from offbeat.errors import PlanError
from offbeat.scheduling import (
    FIFO,
    BackwardProfile,
    Credit,
    GradientSlice,
    GradientTimes,
    MergedGradient,
    Priority,
    Prophet,
    ReduceScatterGather,
    Schedule,
    ScheduledBlock,
    lower_bound_s,
    play,
)
from offbeat.scheduling.prophet import bursts_of
from offbeat.testing import check_scheduler
from offbeat.testing.scheduler import random_profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.scheduling import Scheduler

BY_URGENCY = [Prophet(), Prophet(least_bytes=1), Priority(), Priority(50_000), Credit(), Credit(50_000, 200_000)]
AS_COMPLETE = [
    FIFO(), FIFO(1), MergedGradient(), ReduceScatterGather(), ReduceScatterGather(1), ReduceScatterGather(25 << 20)
]  # fmt: skip


@pytest.mark.parametrize("scheduler", [*BY_URGENCY, *AS_COMPLETE], ids=repr)
def test_it_keeps_the_promises(scheduler: Scheduler) -> None:
    check_scheduler(scheduler, by_urgency=scheduler in BY_URGENCY)


@pytest.mark.parametrize("scheduler", [*BY_URGENCY, *AS_COMPLETE], ids=repr)
def test_no_step_is_shorter_than_the_bound(scheduler: Scheduler) -> None:
    for seed in range(100):
        profile = random_profile(random.Random(seed))
        assert play(profile, scheduler.schedule(profile)).step_s >= lower_bound_s(profile) * (1 - 1e-9)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "1"])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (FIFO, "bucket_bytes"),
        (Priority, "slice_bytes"),
        (Credit, "slice_bytes"),
        (Credit, "credit_bytes"),
        (Prophet, "least_bytes"),
        (ReduceScatterGather, "bucket_bytes"),
    ],
)
def test_a_size_that_holds_nothing_is_refused(kind: Callable[..., Scheduler], field: str, size: Any) -> None:
    with pytest.raises(PlanError, match=f"Cannot schedule with {field} = {size!r}.* at `plan.scheduling.{field}`"):
        kind(**{field: size})


class LosesOne:
    """Forgets the last element of the first gradient."""

    def schedule(self, profile: BackwardProfile) -> Schedule:
        whole = [GradientSlice(i, 0, one.numel) for i, one in enumerate(profile.gradients)]
        return Schedule.of_blocks_under_way([ScheduledBlock((one,)) for one in whole[1:]])


class InReverse:
    """Sends the least urgent first, when all is complete."""

    def schedule(self, profile: BackwardProfile) -> Schedule:
        whole = [ScheduledBlock((GradientSlice(i, 0, one.numel),)) for i, one in enumerate(profile.gradients)]
        last = max(range(len(whole)), key=lambda i: profile.gradients[i].ready_s)
        return Schedule.of_blocks_under_way([whole.pop(last), *reversed(whole)], 1)


@pytest.mark.parametrize(
    ("scheduler", "why"), [(LosesOne(), "elements of"), (InReverse(), "less urgent ones go first")]
)
def test_what_breaks_a_promise_is_found(scheduler: Scheduler, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check_scheduler(scheduler)


class InTwoRounds:
    """Sends each gradient by itself, in two rounds."""

    needs_reduce_scatter = True

    def schedule(self, profile: BackwardProfile) -> Schedule:
        blocks = [ScheduledBlock((GradientSlice(i, 0, profile.gradients[i].numel),)) for i in profile.arrivals]
        return self.changed(Schedule.of_two_rounds(blocks))

    def changed(self, schedule: Schedule) -> Schedule:
        return schedule


class GathersInReverse(InTwoRounds):
    def changed(self, schedule: Schedule) -> Schedule:
        count = len(schedule.blocks)
        return Schedule(schedule.blocks, (*[0] * count, *[count] * count), schedule.gathers[::-1])


class GathersTooSoon(InTwoRounds):
    def changed(self, schedule: Schedule) -> Schedule:
        return Schedule(schedule.blocks, (0,) * 2 * len(schedule.blocks), schedule.gathers)


class GathersAllButOne(InTwoRounds):
    def changed(self, schedule: Schedule) -> Schedule:
        count = len(schedule.blocks)
        if count == 1:
            return schedule
        return Schedule(schedule.blocks, (*[0] * count, *[count] * (count - 1)), schedule.gathers[1:])


class SaysNothingOfGathers(InTwoRounds):
    needs_reduce_scatter = False


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        (GathersInReverse(), "in the order in which the forward pass needs them"),
        (GathersTooSoon(), "gathered before it is reduced"),
        (GathersAllButOne(), "not every block is gathered once"),
        (SaysNothingOfGathers(), "without needs_reduce_scatter"),
    ],
)
def test_a_second_round_that_breaks_a_promise_is_found(scheduler: Scheduler, why: str) -> None:
    check_scheduler(InTwoRounds(), by_urgency=False)
    with pytest.raises(AssertionError, match=why):
        check_scheduler(scheduler, by_urgency=False)


def bursts(
    sizes: list[int], ready_s: list[float], *, latency_s: float = 0.0, bandwidth: float = 1e6, gap_s: float = 0.0
) -> BackwardProfile:
    """Gradients of these sizes in kB, complete at these times, of which each layer takes 10 ms forward."""
    gradients = tuple(
        GradientTimes(f"g{i}", 250 * size, 4, "float32 cpu", at_s, 0.01)
        for i, (size, at_s) in enumerate(zip(sizes, ready_s, strict=True))
    )
    return BackwardProfile(gradients, max(ready_s), latency_s, bandwidth, gap_s)


def test_a_block_fits_the_pause_and_the_rest_comes_behind_what_is_more_urgent() -> None:
    """100 kB are complete at once, 40 ms before the rest: 40 kB fit, and the last layers wait till the end."""
    profile = bursts([10, 10, 50, 50], [0.04, 0.04, 0.0, 0.0])
    assert bursts_of(profile) == [[3, 2], [1, 0]]
    schedule = Prophet(least_bytes=1000).schedule(profile)
    assert schedule.blocks[0].slices == (GradientSlice(2, 0, 10_000),)
    order = [one.gradient for block in schedule.blocks[1:] for one in block.slices]
    assert order == sorted(order), "behind the last burst in the order of the forward pass"
    assert play(profile, schedule).step_s == pytest.approx(lower_bound_s(profile), rel=0.02)


def test_gradients_that_come_one_by_one_make_bursts_of_some_latencies() -> None:
    profile = bursts([10] * 50, [0.001 * i for i in reversed(range(50))], latency_s=0.002)
    assert 2 < len(bursts_of(profile)) < 25


def test_merging_waits_for_a_gradient_that_is_nearer_than_a_latency() -> None:
    profile = bursts([10, 10, 10], [0.05, 0.001, 0.0], latency_s=0.002)
    found = [[one.gradient for one in block.slices] for block in MergedGradient().schedule(profile).blocks]
    assert found == [[2, 1], [0]]


def test_slices_that_wait_for_each_other_pay_each_latency() -> None:
    """What Prophet is for: no tuning, where a slice at a time collapses as latencies grow."""
    profile = bursts([100] * 8, [0.1 * i for i in reversed(range(8))], latency_s=0.05)
    slow, fast = (play(profile, one.schedule(profile)).step_s for one in (Priority(20_000), Prophet()))
    assert fast < 0.6 * slow


def test_slices_smaller_than_the_link_can_take_are_not_sent() -> None:
    """A ring has phases, however small what goes around: where slices are too small, these are all there is."""
    profile = bursts([100] * 8, [0.1 * i for i in reversed(range(8))], gap_s=0.05)
    slow, fast = (play(profile, one.schedule(profile)).step_s for one in (Credit(20_000, 80_000), Prophet()))
    assert fast < 0.7 * slow
    assert fast < 1.1 * lower_bound_s(profile)


def test_the_link_does_not_idle_where_pauses_are_shorter_than_the_least_block() -> None:
    profile = bursts([40] * 40, [0.03 * i for i in reversed(range(40))])
    step_s = play(profile, Prophet(least_bytes=80_000).schedule(profile)).step_s
    assert step_s < 1.08 * lower_bound_s(profile)


def test_two_rounds_hide_a_half_behind_each_pass() -> None:
    """To reduce a block takes 50 ms, and to gather it: all but the last are reduced when backward ends."""
    profile = bursts([100] * 4, [0.3, 0.2, 0.1, 0.0], latency_s=0.001)
    schedule = ReduceScatterGather(bucket_bytes=100_000).schedule(profile)
    assert [[one.gradient for one in block.slices] for block in schedule.blocks] == [[3], [2], [1], [0]]
    assert schedule.gathers == (3, 2, 1, 0)
    assert schedule.after == (0, 0, 0, 0, 4, 3, 2, 1)
    played = play(profile, schedule)
    assert played.issued[:4] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert played.done[:4] == pytest.approx([0.051, 0.151, 0.251, 0.351])
    assert played.done[4:] == pytest.approx([0.402, 0.452, 0.502, 0.552])
    assert played.begins == pytest.approx([0.402, 0.452, 0.502, 0.552])
    assert played.step_s == pytest.approx(0.562)
    assert schedule.describe(profile).splitlines()[3:5] == ["behind 0: g0[0:25000]", "behind 4: gather of block 3"]


def test_blocks_of_two_rounds_are_of_the_size_that_is_the_fastest() -> None:
    for seed in range(50):
        profile = random_profile(random.Random(seed))
        own, fixed = (
            play(profile, one.schedule(profile)).step_s for one in (ReduceScatterGather(), ReduceScatterGather(1 << 25))
        )
        assert own <= 1.003 * fixed
