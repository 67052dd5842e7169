"""The page of last words: cheap to write, safe to read."""

from __future__ import annotations

import os
import time

import pytest

from offbeat.diagnosis.status_page import PAGE_BYTES, PageState, StatusPage


@pytest.fixture
def page() -> StatusPage:
    return StatusPage()


def test_what_is_said_is_read(page: StatusPage) -> None:
    page.say("exchanging", step=7, bucket=1, buckets=3, stamp=9, operation=b"all-reduce")
    other = StatusPage(os.dup(page.fd))
    state = other.read()
    assert (state.phase, state.step, state.bucket, state.buckets, state.stamp) == ("exchanging", 7, 1, 3, 9)
    assert state.operation == "all-reduce"
    assert abs(time.monotonic() - state.since_s) < 1
    other.close()
    page.close()


def test_fresh(page: StatusPage) -> None:
    assert page.read() == PageState(step=0, bucket=0)
    assert page.text() == ""


def test_long_texts_are_cut(page: StatusPage) -> None:
    page.say("waiting", step=1, operation=("é" * 200).encode())
    assert page.read().operation.startswith("éé")
    page.last_words("raised", "é" * 10_000 + "the end")
    assert page.text().endswith("the end")
    assert len(page.text().encode()) <= 8192
    assert page.read().phase == "raised"
    assert page.read().step == 1


def test_a_page_gone_wild_is_still_read(page: StatusPage) -> None:
    os.pwrite(page.fd, b"\xff" * PAGE_BYTES, 0)
    state = page.read()
    assert isinstance(state.phase, str)
    assert len(page.text()) <= 8192


def test_a_writer_that_died_half_way_is_read(page: StatusPage) -> None:
    page.say("computing", step=3)
    os.pwrite(page.fd, (5).to_bytes(8, "little"), 0)  # odd: in the middle of writing
    assert page.read().step == 3


def test_to_say_something_takes_microseconds(page: StatusPage) -> None:
    rounds = 20_000
    began_s = time.process_time()
    for step in range(rounds):
        page.say("exchanging", step=step, bucket=1, buckets=3, operation=b"all-reduce")
    assert (time.process_time() - began_s) / rounds < 20e-6
