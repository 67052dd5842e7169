"""Whatever goes wrong on the communication thread is told to whoever waits for it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from offbeat.engine.communication_thread import CommunicationThread, InFlight


class Broken(InFlight):
    """What is under way fails when it is looked at, in a way that nobody has foreseen."""

    def issue(self) -> None:
        pass

    def look(self) -> bool:
        raise RuntimeError("the device is lost")

    def finish(self) -> None:
        raise AssertionError("it is not to be waited for any more")


def test_what_fails_while_it_is_looked_at_is_told_to_who_waits() -> None:
    thread, first, second = CommunicationThread((0, 0)), Broken(), Broken()
    thread.issue(first)
    with pytest.raises(RuntimeError, match="the device is lost"):
        first.wait(timedelta(seconds=20))
    thread.issue(second)
    with pytest.raises(Exception, match="the device is lost"):
        second.wait(timedelta(seconds=20))
    thread.close()
