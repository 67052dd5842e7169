"""Strangers fill no log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.wire.rate_limited_log import RateLimitedLog

if TYPE_CHECKING:
    import pytest


def test_of_a_crowd_the_first_are_told_of_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    refusals = RateLimitedLog(lambda: now_s)
    for number in range(1000):
        now_s += 0.01
        refusals.log(f"stranger {number}: it did not prove who it is")
    assert [record.getMessage() for record in caplog.records] == [
        *(f"Refused stranger {number}: it did not prove who it is" for number in range(9)),
        "Refused stranger 9: it did not prove who it is; others within 60 s are only counted",
    ]
    caplog.clear()
    now_s += 60.0
    refusals.log("another: it took too long")
    assert [record.getMessage() for record in caplog.records] == [
        "Refused 990 others since the last one that was logged",
        "Refused another: it took too long",
    ]
    caplog.clear()
    now_s += 60.0
    refusals.log("one more: it took too long")
    assert [record.getMessage() for record in caplog.records] == ["Refused one more: it took too long"]


def test_a_reason_that_is_a_sentence_goes_on_without_its_full_stop(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RateLimitedLog(lambda: 100.0)
    for _ in range(10):
        refusals.log("a:1: it does not speak the protocol (it began with b'GET').")
    said = [record.getMessage() for record in caplog.records]
    assert said[8] == "Refused a:1: it does not speak the protocol (it began with b'GET')."
    assert said[9] == (
        "Refused a:1: it does not speak the protocol (it began with b'GET'); others within 60 s are only counted"
    )
