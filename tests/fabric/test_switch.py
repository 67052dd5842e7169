"""Sums of which a part goes through the switch, and a part beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import pytest
import torch

from offbeat.diagnosis.wait import TellsTrouble
from offbeat.fabric import BoundSwitch, Switch
from offbeat.fabric.in_memory import BoundInMemory, InMemoryGroup, InMemoryPending
from offbeat.fabric.switch import SwitchStream
from offbeat.fabric.switch_session import OtherWorkers, SwitchSession
from offbeat.payload import Sum, Total
from offbeat.switch.client_thread import client_thread_of
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.memory_switch import MemorySwitch
from offbeat.switch.stream_client import StreamClient
from tests.switch.local_switch import served_switch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat.fabric import ElasticGroup
    from offbeat.payload import Payload, Reply

SOON = timedelta(seconds=5)


@pytest.fixture
def switch_address() -> Iterator[str]:
    with served_switch() as address:
        yield address


class WithoutOne(InMemoryPending):
    """A sum of trailers that the last rank did not live to bring its own to."""

    def result(self) -> Reply:
        reply = super().result()
        assert isinstance(reply, Total)
        reply.tensor.sub_(1.0)
        return replace(reply, weight=(self._group.world - 1) / self._group.world)


class Companion(BoundInMemory):
    def start(self, payload: Payload) -> InMemoryPending:
        pending = super().start(payload)
        return WithoutOne(self._group, self._issued - 1, self.rank, payload) if isinstance(payload, Sum) else pending


def test_values_count_for_as_many_as_the_trailer_is_of() -> None:
    """Rank 2 is lost when the switch has its values, and nobody has its trailer."""
    group, switch, spec = InMemoryGroup(3), MemorySwitch(), Switch("memory://", values=16)
    ends = [
        BoundSwitch(Companion(group, rank), SwitchStream.in_memory(switch, spec, rank, 3)) for rank in range(3)
    ]  # fmt: skip
    with ThreadPoolExecutor(3) as pool:
        totals = list(pool.map(lambda end: sum_of(end, float(end.rank)), ends))
    for total in totals:
        assert total.tail is not None
        assert total.tail.item() == 2.0
        assert total.weight == 2 / 3
        assert torch.allclose(total.tensor / 2, torch.full((100,), 1.0)), "the mean is that of all whose values it has"
    assert len({total.tensor.numpy().tobytes() for total in totals}) == 1


def sum_of(end: BoundSwitch, value: float) -> Total:
    pending = end.start(Sum(torch.full((100,), value), torch.ones(1)))
    while not pending.wait(timedelta(seconds=10)):
        pass
    total = pending.result()
    assert isinstance(total, Total)
    return total


def test_a_sum_says_what_its_switch_waits_for() -> None:
    switch, spec = MemorySwitch(), Switch("memory://", values=16)
    stream = SwitchStream.in_memory(switch, spec, 0, 2)
    end = BoundSwitch(BoundInMemory(InMemoryGroup(2), 0), stream)
    pending = end.start(Sum(torch.ones(100), torch.ones(1)))
    assert isinstance(pending, TellsTrouble)
    stream._client.held_up_by = 1
    stream._client.has_joined = True
    assert "The switch waits for rank 1" in pending.trouble
    end.close()


class Group:
    """An elastic group of two, of whom the second is known to be gone from a moment on."""

    members = (0, 1)

    def __init__(self) -> None:
        self.lost: dict[int, str] = {}

    def lost_members(self, ranks: Sequence[int]) -> dict[int, str]:
        """The ranks that are gone, and why."""
        return {rank: self.lost[rank] for rank in ranks if rank in self.lost}


def session_over(control: ControlClient, rank: int) -> SwitchSession:
    return SwitchSession(lambda on_lost: control, OtherWorkers(rank, None), SOON)


def test_nobody_waits_for_a_worker_that_is_lost_in_the_middle_of_a_bucket(switch_address: str) -> None:
    """Its machine is cut off when all have its trailer, so nothing meets any more, and no link hangs up."""
    controls = [ControlClient(switch_address, rank=rank) for rank in range(2)]
    joined = [control.join("a", JobShape(0, 2, 16, 64, 8)) for control in controls]
    ends, group, companions = [], Group(), InMemoryGroup(2)
    for rank, (shape, told) in enumerate(joined):
        client = StreamClient(shape, rank, told.cookie, window=8, rto_s=0.01, keeps=True)
        session = session_over(controls[rank], rank)
        stream = SwitchStream(client, client_thread_of(client, controls[rank], told, SOON), session, "a")
        ends.append(BoundSwitch(BoundInMemory(companions, rank), stream, cast("ElasticGroup", group)))
    trailer = ends[1].start(Sum(torch.ones(1)))  # and never a chunk of its values
    pending = ends[0].start(Sum(torch.ones(100), torch.ones(1)))
    assert trailer.wait(SOON)
    assert not pending.wait(timedelta(seconds=0.3)), "the other may still come"
    group.lost = {1: "its machine is unreachable"}
    try:
        assert any(pending.wait(timedelta(seconds=0.1)) for _ in range(50)), "it is waited for, though it is lost"
        total = pending.result()
        assert isinstance(total, Total)
        assert total.tensor.unique().tolist() == [2.0], "a sum of one, which counts for the two of the trailer"
    finally:
        for end in ends:
            end.close()
