"""What a worker says of its training: bounded, checked by whoever hears it, and honest about what is not known."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from offbeat.diagnosis.status_page import PAGE_BYTES, StatusPage
from offbeat.protocol.worker_status import MOST_BYTES, StatusEvent, TrainingStatus, pack_status, read_status

FULL = TrainingStatus(
    host="h" * 64,
    step=1 << 50,
    values={f"{number}{'n' * 62}": float(number) for number in range(16)},
    policy="p" * 256,
    fabric="f" * 256,
    events=tuple(StatusEvent(1e9, "e" * 320) for _ in range(4)),
)


def test_what_is_said_is_heard() -> None:
    assert read_status(pack_status(FULL)) == FULL
    told = read_status(pack_status(TrainingStatus(values={"loss": math.nan})))
    assert told is not None
    assert math.isnan(told.values["loss"]), "which is worth knowing"
    assert len(pack_status(FULL)) <= MOST_BYTES


def test_one_that_is_too_long_goes_without_its_events() -> None:
    long = msgspec.structs.replace(FULL, events=tuple(StatusEvent(1e9, "\U0001f600" * 1600) for _ in range(4)))
    assert pack_status(long) == pack_status(msgspec.structs.replace(FULL, events=()))


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "h" * 65},
        {"step": -1},
        {"step": 1 << 60},
        {"models": 0},
        {"here_s": math.inf},
        {"epochs": math.nan},
        {"values": {str(number): 0.0 for number in range(17)}},
        {"values": {"n" * 65: 0.0}},
        {"events": tuple(StatusEvent(1e9, "") for _ in range(5))},
        {"events": (StatusEvent(1e9, "e" * 321),)},
        {"policy": "p" * 257},
    ],
    ids=str,
)
def test_what_cannot_be_is_nothing(changes: dict[str, Any]) -> None:
    assert read_status(msgspec.msgpack.encode(msgspec.structs.replace(FULL, **changes))) is None


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5000, b"\x81\xa4host\xa2\xff\xfe"], ids=range(4))
def test_nonsense_is_nothing(data: bytes) -> None:
    assert read_status(data) is None


def test_what_is_left_is_told_only_where_it_is_known() -> None:
    assert TrainingStatus(step=10, epochs=1.5).left_s is None
    assert TrainingStatus(step=10, epochs=1.5, epochs_per_s=0.25).epoch_left_s == 2.0
    assert TrainingStatus(epochs=1.5, total_epochs=4, epochs_per_s=0.5).left_s == 5.0
    assert TrainingStatus(epochs=1.5, total_epochs=4).left_s is None, "it stands still"
    assert TrainingStatus(epochs=4.5, total_epochs=4).left_s == 0.0
    assert TrainingStatus(step=10, total_steps=30, steps_per_s=4.0).left_s == 5.0
    assert TrainingStatus(total_epochs=4, epochs_per_s=0.5).left_s is None, "no loader says how far it is"


def test_it_is_on_the_page() -> None:
    page = StatusPage()
    assert page.status() is None
    page.say_status(pack_status(FULL))
    assert read_status(page.status() or b"") == FULL
    page.say("computing", step=3)
    page.say_status(pack_status(TrainingStatus(step=4)))
    assert read_status(page.status() or b"") == TrainingStatus(step=4), "of a longer one nothing is left"
    page.close()


def test_half_of_one_on_the_page_is_nothing() -> None:
    page = StatusPage()
    page.say_status(pack_status(FULL))
    page._memory[-MOST_BYTES : -MOST_BYTES + 3] = b"abc"
    assert page.status() is None
    page._memory[:] = b"\xff" * PAGE_BYTES
    assert page.status() is None
    page.close()
