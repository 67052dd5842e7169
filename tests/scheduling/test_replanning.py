"""A schedule is asked for when something has moved for long enough, and not again and again where that is of no use."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from offbeat.safe_read import UnreadableError
from offbeat.scheduling import (
    FIFO,
    BackwardProfile,
    GradientTimes,
    MadeSchedule,
    Prophet,
    ReduceScatterGather,
    ReplanTrigger,
    can_be_worth_it,
    is_worth_it,
    play,
    slowest,
)

if TYPE_CHECKING:
    from offbeat.scheduling import Scheduler


def profile(bandwidth: float = 25e6, ready_s: float = 0.02) -> BackwardProfile:
    gradients = tuple(GradientTimes(f"layer{i}", 1 << 16, 4, "float32", (6 - i) * ready_s, 0.008) for i in range(6))
    return BackwardProfile(gradients, 6 * ready_s, 0.0005, bandwidth, 0.0005)


def asked(trigger: ReplanTrigger, steps: int) -> list[int]:
    """The steps in which it wants a schedule, where something has moved in all of them and no schedule is worth it."""
    found = []
    for step in range(steps):
        trigger.observe({"bandwidth": "it has halved"})
        if trigger.reason:
            found.append(step)
            trigger.decided(is_new=False)
    return found


def test_five_steps_in_a_row() -> None:
    trigger = ReplanTrigger()
    for has_moved in (True, True, True, True, False, True, True, True, True):
        trigger.observe({"bandwidth": "it has halved" if has_moved else "", "batch": ""})
        assert not trigger.reason
    assert trigger.is_suspicious
    trigger.observe({"bandwidth": "it has halved", "batch": ""})
    assert trigger.reason == "it has halved"


def test_what_was_not_worth_it_is_asked_for_ever_more_rarely() -> None:
    steps = asked(ReplanTrigger(), 2000)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert steps[0] == 4
    assert gaps == sorted(gaps)
    assert len(steps) < 12


def test_a_new_schedule_ends_the_quiet() -> None:
    trigger = ReplanTrigger()
    asked(trigger, 500)
    trigger.decided(is_new=True)
    assert asked(trigger, 5) == [4]


def test_a_schedule_for_half_the_bandwidth_is_worth_it_and_the_same_one_is_not() -> None:
    before, now = profile(), profile(bandwidth=8e6)
    assert is_worth_it(now, Prophet().schedule(now), instead_of=Prophet().schedule(before))
    assert not is_worth_it(now, Prophet().schedule(now), instead_of=Prophet().schedule(now))


def test_nobody_is_asked_where_no_schedule_can_be_worth_it() -> None:
    """What is worth it can be; and a schedule at the bound cannot be bettered, whatever has moved."""
    before, now = profile(), profile(bandwidth=8e6)
    assert can_be_worth_it(now, instead_of=Prophet().schedule(before))
    fast = profile(bandwidth=2.5e9)
    assert not can_be_worth_it(fast, instead_of=Prophet().schedule(before))


def test_of_workers_the_slowest_counts() -> None:
    both = slowest([profile(bandwidth=9e6), profile(ready_s=0.03)])
    assert both.bandwidth == 9e6
    assert both.backward_s == pytest.approx(0.18)
    assert both.gradients[0].ready_s == pytest.approx(0.18)


IN_TWO_ROUNDS = ReduceScatterGather(1 << 18)


def made(by: Scheduler = FIFO(1 << 19)) -> MadeSchedule:  # noqa: B008
    one = profile()
    return MadeSchedule(step=7, scheduler=repr(by), profile=one, schedule=by.schedule(one))


@pytest.mark.parametrize("by", [FIFO(1 << 19), IN_TWO_ROUNDS])
def test_a_schedule_comes_back_from_its_bytes(by: Scheduler) -> None:
    assert MadeSchedule.from_bytes(made(by).to_bytes()) == made(by)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"version":1', b'"version":2', "it is of version 2, and this offbeat reads version 1"),
        (b'"bandwidth":25000000.0', b'"bandwidth":0.0', "a bandwidth of 0.0 bytes"),
        (b'"bandwidth":25000000.0', b'"bandwidth":-1', "a bandwidth of -1"),
        (b'"ready_s":0.02', b'"ready_s":-0.02', "layer5 is complete after -0.02 s"),
        (b'"gradient":5', b'"gradient":9', "a block holds no gradient, or one that is not there"),
        (b'"gradient":5', b'"gradient":4', "a gradient is not in it whole, and once"),
        (b'"stop":65536', b'"stop":65535', "a gradient is not in it whole, and once"),
        (b'"after":[0', b'"after":[1', "waits for one that comes later"),
        (b'"after"', b'"before"', "missing required field `after`"),
        (b"{", b"", "Expected `object`"),
    ],
)
def test_a_damaged_one_is_refused_in_words(old: bytes, new: bytes, why: str) -> None:
    data = made().to_bytes()
    assert old in data
    with pytest.raises(UnreadableError, match=why):
        MadeSchedule.from_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize(
    ("gathers", "after", "why"),
    [
        ((5, 4, 3, 2, 1, 1), ..., "not every block is gathered once"),
        ((6, 4, 3, 2, 1, 0), ..., "not every block is gathered once"),
        ((5, 4, 3, 2, 1), ..., "not every block is gathered once"),
        (..., (0,) * 6, "it says of 6 operations when they are issued, and has 12"),
        (..., (0,) * 6 + (6,) * 7, "it says of 13 operations when they are issued, and has 12"),
        (..., (0,) * 6 + (5,) + (6,) * 5, "a block is gathered before it is reduced"),
        (..., (0,) * 6 + (7,) + (6,) * 5, "an operation waits for one that comes later"),
        (..., (-1,) + (0,) * 5 + (6,) * 6, "an operation waits for one that comes later"),
    ],
)
def test_a_damaged_second_round_is_refused_in_words(gathers: Any, after: Any, why: str) -> None:
    whole = made(IN_TWO_ROUNDS)
    schedule = whole.schedule
    assert schedule.gathers == (5, 4, 3, 2, 1, 0)
    changed = {"gathers": gathers, "after": after}
    damaged = dataclasses.replace(schedule, **{name: new for name, new in changed.items() if new is not ...})
    with pytest.raises(UnreadableError, match=why):
        MadeSchedule.from_bytes(msgspec.structs.replace(whole, schedule=damaged).to_bytes())


@pytest.mark.parametrize("by", [FIFO(1 << 19), IN_TWO_ROUNDS])
def test_whatever_bit_is_another_it_can_be_played_or_is_refused(by: Scheduler) -> None:
    data = made(by).to_bytes()
    for bit in range(0, 8 * len(data), 5):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = MadeSchedule.from_bytes(flipped)
        except UnreadableError:
            continue
        assert len(play(found.profile, found.schedule).done) == len(found.schedule.after)
