"""When control closes the sums that wait for late workers."""

from __future__ import annotations

from offbeat.switch.sum_watch import SumWatch

WAIT_S = 0.8


def looked(watch: SumWatch, unsettled: list[int], *, from_s: float, to_s: float) -> list[tuple[float, list[int]]]:
    """What is closed, and when, in looks every 5 ms."""
    found = []
    for tick in range(round(from_s * 200), round(to_s * 200)):
        now_s = tick / 200
        if watch.is_due(WAIT_S, now_s) and (over := watch.look(unsettled, WAIT_S, now_s)):
            found.append((now_s, over))
    return found


def test_an_exchange_is_closed_once_it_has_waited_for_long_enough() -> None:
    watch = SumWatch()
    assert looked(watch, [4], from_s=10.0, to_s=10.4) == []
    found = looked(watch, [4, 7], from_s=10.4, to_s=11.4)
    assert found[0][1] == [4]
    assert 10.8 <= found[0][0] <= 10.8 + WAIT_S / 4
    assert next(at_s for at_s, over in found if 7 in over) >= 11.2
    assert all(over[0] == 4 for _, over in found), "the oldest first"


def test_one_that_is_settled_meanwhile_begins_anew() -> None:
    watch = SumWatch()
    looked(watch, [4], from_s=10.0, to_s=10.7)
    looked(watch, [], from_s=10.7, to_s=11.0)
    assert looked(watch, [4], from_s=11.0, to_s=11.7) == []


def test_nobody_is_left_out_since_the_switch_itself_stood_still() -> None:
    watch = SumWatch()
    looked(watch, [4], from_s=10.0, to_s=10.3)
    assert looked(watch, [4], from_s=20.0, to_s=20.2) == []
    assert looked(watch, [4], from_s=20.2, to_s=21.0) != []


def test_a_job_that_waits_for_nobody_is_not_looked_at() -> None:
    assert not SumWatch().is_due(0.0, 10.0)
