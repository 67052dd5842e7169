"""Where workers leave a server: at a place that none had passed, whatever threads do meanwhile."""

from __future__ import annotations

import threading
from datetime import timedelta

from offbeat.clock import WallClock
from offbeat.diagnosis.wait import BlockingWait
from offbeat.engine.sync_point import SyncPoint

WAITER = BlockingWait(clock=WallClock(), timeout=timedelta(seconds=5))


def passed(border: SyncPoint, most: int = 1000) -> int:
    """Places that are passed before the border."""
    return next(n for n in range(most) if border.is_here(WAITER))


def test_all_meet_where_none_has_been() -> None:
    borders = [SyncPoint() for _ in range(3)]
    for border, ahead in zip(borders, (2, 7, 0), strict=True):
        for _ in range(ahead):
            assert not border.is_here(WAITER)
    at = max(border.hold() for border in borders)
    for border in borders:
        border.settle(at)
    assert [passed(border) for border in borders] == [5, 0, 7]
    assert not any(border.is_here(WAITER) for border in borders), "once"


def test_no_place_is_passed_while_all_agree() -> None:
    border, seen = SyncPoint(), list[bool]()
    assert border.hold() == 0
    thread = threading.Thread(target=lambda: seen.append(border.is_here(WAITER)))
    thread.start()
    assert not border.done()
    assert not border.wait(timedelta(milliseconds=50))
    assert not seen
    border.settle(0)
    thread.join(5)
    assert seen == [True]


def test_who_was_held_goes_on_if_all_stay() -> None:
    border = SyncPoint()
    border.hold()
    border.settle()
    assert not any(border.is_here(WAITER) for _ in range(5))


def test_a_border_that_was_said_stays() -> None:
    border = SyncPoint()
    border.hold()
    border.settle(2)
    border.settle()  # such as of a plan that came later
    assert passed(border) == 2
