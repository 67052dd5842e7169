"""What one thread lets a device do comes behind what the other has let it do, on whichever streams."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from offbeat.engine.communication_thread import CommunicationThread, InFlight

TIMEOUT = timedelta(seconds=20)


class Stream:
    """A stream that notes who has it do what.

    Args:
        log: what was done, in order: by which thread, what, and the event's number.
    """

    def __init__(self, log: list[tuple[str, str, int]]) -> None:
        self._log = log

    def record_event(self) -> Event:
        event = Event(sum(what == "record" for _, what, _ in self._log))
        self._log.append((threading.current_thread().name, "record", event.number))
        return event

    def wait_event(self, event: Event) -> None:
        self._log.append((threading.current_thread().name, "wait", event.number))


class Event:
    def __init__(self, number: int) -> None:
        self.number, self.device = number, torch.device("cuda", 0)


class Noted(InFlight):
    """It notes where it is begun and ended."""

    def __init__(self, log: list[tuple[str, str, int]]) -> None:
        super().__init__()
        self._log = log

    def issue(self) -> None:
        self._log.append((threading.current_thread().name, "issue", 0))

    def finish(self) -> None:
        self._log.append((threading.current_thread().name, "finish", 0))


def test_each_thread_has_the_device_wait_for_what_the_other_had_it_do(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str, int]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log))
    thread, one = CommunicationThread((0,), (torch.device("cuda", 0),)), Noted(log)
    thread.issue(one)
    thread.finish()
    assert one.wait(TIMEOUT)
    one.take_up()
    thread.close()
    here, there = threading.current_thread().name, "offbeat-communication"
    assert log == [
        (here, "record", 0),
        (there, "wait", 0),
        (there, "issue", 0),
        (there, "finish", 0),
        (there, "record", 1),
        (here, "wait", 1),
    ]


class Doubled(InFlight):
    """A tensor times two, made on the thread's stream, where that takes long."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor, self.doubled = tensor, torch.zeros_like(tensor)

    def issue(self) -> None:
        torch.cuda._sleep(100_000_000)
        self.doubled.copy_(self.tensor)

    def finish(self) -> None:
        torch.cuda._sleep(100_000_000)
        self.doubled.mul_(2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_packed_on_a_side_stream_is_sent_whole_and_read_whole() -> None:
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    thread, tensor = CommunicationThread((0,), (device,)), torch.zeros(1000, device=device)
    one = Doubled(tensor)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        tensor.fill_(1)
        thread.issue(one)
        thread.finish()
        assert one.wait(TIMEOUT)
        one.take_up()
        found = one.doubled.clone()
    torch.cuda.synchronize()
    thread.close()
    assert set(found.tolist()) == {2.0}
