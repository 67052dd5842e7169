"""The one primitive for every blocking wait, where there is nothing to wait for any more."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from offbeat.clock import WallClock
from offbeat.diagnosis.wait import BlockingWait, NullWitness, WaitContext
from offbeat.errors import NetworkError, WorkerLostError

if TYPE_CHECKING:
    from offbeat.diagnosis.wait import StallReport
    from offbeat.payload import Reply


class Died:
    """Of whom it is known why it cannot come."""

    text = "Rank 1 died."
    fatal = True
    is_on_its_way = False

    def to_json(self) -> dict[str, object]:
        return {"text": self.text}


class Knows(NullWitness):
    def investigate(self, awaited: WaitContext, waited_s: float, server: str) -> StallReport | None:
        return Died()


class Broken:
    """An exchange that has come to its end by an error, as one of Gloo's is while this worker still computes."""

    sent_bytes = 0

    def done(self) -> bool:
        return True

    def wait(self, timeout: timedelta) -> bool:
        raise NetworkError("The connection to another worker broke.")

    def result(self) -> Reply:
        raise AssertionError("It has none.")


def test_what_had_broken_before_it_was_waited_for_is_explained() -> None:
    waiter = BlockingWait(clock=WallClock(), timeout=timedelta(seconds=5), witness=Knows())
    with pytest.raises(WorkerLostError, match=r"Rank 1 died\."):
        waiter.wait(Broken(), WaitContext("all-reduce", step=3))
    assert isinstance(waiter.failure, WorkerLostError)


class Late:
    """An exchange that comes to its end once somebody has been told of it."""

    sent_bytes = 0

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def done(self) -> bool:
        return bool(self._told)

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(0.01)
        return bool(self._told)

    def result(self) -> Reply:
        return []


def test_at_a_server_one_goes_on_waiting_when_another_worker_is_lost() -> None:
    told: list[str] = []
    waiter = BlockingWait(clock=WallClock(), timeout=timedelta(seconds=0.1), witness=Knows(), tell=told.append)
    waiter.wait(Late(told), WaitContext("push", step=3, through_server=True))
    assert told == ["Rank 1 died."]
    told.clear()
    with pytest.raises(WorkerLostError, match=r"Rank 1 died\."):
        waiter.wait(Late(told), WaitContext("push", step=3))
    assert not told


class HeldUp(Late):
    """An exchange at a switch that waits for a worker."""

    trouble = "The switch waits for rank 2."


class NotesServer(NullWitness):
    """A witness that notes what is said to be wrong between the workers."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def investigate(self, awaited: WaitContext, waited_s: float, server: str) -> StallReport | None:
        self.noted.append(server)
        return None


def test_what_an_exchange_knows_of_its_switch_is_reported() -> None:
    told: list[str] = []
    witness = NotesServer()
    waiter = BlockingWait(clock=WallClock(), timeout=timedelta(seconds=0.1), witness=witness, tell=told.append)
    waiter.wait(HeldUp(told), WaitContext("all-reduce", step=3))
    assert witness.noted == ["The switch waits for rank 2."]
    assert "The switch waits for rank 2." in told[0]
