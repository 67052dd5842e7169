"""Where workers leave a server: at a place that none had passed, whatever threads do meanwhile."""

from __future__ import annotations

import threading
from datetime import timedelta

from offbeat.clock import WallClock
from offbeat.diagnosis.wait import BlockingWait
from offbeat.engine.sync_point import SyncPoint

WAITER = BlockingWait(clock=WallClock(), timeout=timedelta(seconds=5))


def passed(point: SyncPoint, most: int = 1000) -> int:
    """Places that are passed before the border."""
    return next(n for n in range(most) if point.reached(WAITER))


def test_all_meet_where_none_has_been() -> None:
    points = [SyncPoint() for _ in range(3)]
    for point, ahead in zip(points, (2, 7, 0), strict=True):
        for _ in range(ahead):
            assert not point.reached(WAITER)
    at = max(point.freeze()[0] for point in points)
    for point in points:
        point.resume(at)
    assert [passed(point) for point in points] == [5, 0, 7]
    assert not any(point.reached(WAITER) for point in points), "once"


def test_no_place_is_passed_while_all_agree() -> None:
    point, seen = SyncPoint(), list[bool]()
    assert point.freeze() == (0, 0)
    point.resume()
    assert not point.reached(WAITER, pushed=3)
    assert point.freeze() == (1, 3)
    thread = threading.Thread(target=lambda: seen.append(point.reached(WAITER)))
    thread.start()
    assert not point.done()
    assert not point.wait(timedelta(milliseconds=50))
    assert not seen
    point.resume(1)
    thread.join(5)
    assert seen == [True]


def test_who_was_held_goes_on_if_all_stay() -> None:
    point = SyncPoint()
    point.freeze()
    point.resume()
    assert not any(point.reached(WAITER) for _ in range(5))


def test_a_border_that_was_said_stays() -> None:
    point = SyncPoint()
    point.freeze()
    point.resume(2)
    point.resume()  # such as of a plan that came later
    assert passed(point) == 2
