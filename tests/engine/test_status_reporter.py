"""The thread that says how the training goes: right, about once a second, and in nobody's way."""

from __future__ import annotations

import math
import threading
import time

import pytest

import offbeat
from offbeat.engine import status_reporter as status_module
from offbeat.engine.status_reporter import StatusReporter, happenings, named_values, shortened
from offbeat.protocol.worker_status import TrainingStatus, read_status


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "_EVERY_S", 0.02)


class Told:
    """Takes statuses."""

    def __init__(self) -> None:
        self.all: list[TrainingStatus] = []
        self.news = threading.Event()

    def take(self, status: TrainingStatus, data: bytes) -> None:
        assert read_status(data) == status
        self.all.append(status)
        self.news.set()

    def next(self) -> TrainingStatus:
        self.news.clear()
        assert self.news.wait(5)
        return self.all[-1]


def test_rates_are_those_of_the_last_seconds() -> None:
    began_s, told = time.monotonic(), Told()

    def collect() -> TrainingStatus:
        past_s = time.monotonic() - began_s
        steps = round(100 * past_s)
        return TrainingStatus(step=steps, samples=16 * steps, epochs=past_s / 10, computed_s=0.004 * steps)

    reporter = StatusReporter(collect, lambda: [told.take])
    while len(told.all) < 8:
        told.next()
    reporter.close()
    last = told.all[-1]
    assert last.steps_per_s == pytest.approx(100, rel=0.4)
    assert last.samples_per_s == pytest.approx(16 * last.steps_per_s)
    assert last.epochs_per_s == pytest.approx(0.1, rel=0.4)
    assert last.computing_s == pytest.approx(0.004)


def test_what_goes_wrong_here_ends_nothing_and_is_tried_again() -> None:
    told, raised = Told(), threading.Event()

    def collect() -> TrainingStatus:
        if not raised.is_set():
            raised.set()
            raise RuntimeError("the dictionary changed")
        return TrainingStatus(step=3)

    reporter = StatusReporter(collect, lambda: [told.take])
    assert told.next().step == 3
    reporter.close()


def test_nothing_is_said_that_would_be_refused() -> None:
    """A server cuts off whoever says what cannot be."""
    told, made = Told(), threading.Event()

    def collect() -> TrainingStatus:
        made.set()
        return TrainingStatus(waited_s=math.inf)

    reporter = StatusReporter(collect, lambda: [told.take])
    assert made.wait(5)
    reporter.close()
    assert not told.all


def test_it_is_said_for_the_last_time_at_the_end() -> None:
    told, left = Told(), False
    reporter = StatusReporter(lambda: TrainingStatus(left=left), lambda: [told.take])
    told.next()
    left = True
    reporter.close()
    count = len(told.all)
    assert told.all[-1].left
    reporter.close()
    time.sleep(0.1)
    assert len(told.all) == count


def test_long_things_are_cut() -> None:
    assert list(named_values({"accuracy": 0.5, "x" * 65: 1.0, "loss": 0.1})) == ["loss", "accuracy"]
    assert len(named_values({str(number): 0.0 for number in range(99)})) == 16
    (told,) = happenings([(1.0, "step 3: rank 0 has waited\n  rank 1 on x is late")])
    assert (told.time_s, told.text) == (1.0, "step 3: rank 0 has waited")
    assert shortened("x" * 400) == "x" * 255 + "…"


def test_how_long_a_run_is_to_be() -> None:
    with offbeat.init() as run:
        run.expect(epochs=12)
        assert (run._session.status.collect().total_epochs, run._session.status.collect().total_steps) == (12.0, 0)
        run.expect(steps=300)
        assert (run._session.status.collect().total_epochs, run._session.status.collect().total_steps) == (0.0, 300)
        for wrong in ({}, {"epochs": 0}, {"steps": -3}, {"epochs": 3, "steps": 4}, {"epochs": math.nan}):
            with pytest.raises(ValueError, match="give one of them, as a number above 0"):
                run.expect(**wrong)
        assert run._session.status.collect().epochs == -1, "no loader was prepared"
