"""Sums of which a part goes through the switch, and a part beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.diagnosis.wait import TellsTrouble
from offbeat.fabric import BoundSwitch, Switch
from offbeat.fabric.in_memory import BoundInMemory, InMemoryGroup, InMemoryPending
from offbeat.fabric.switch import SwitchStream
from offbeat.payload import Sum, Total
from offbeat.switch.memory_switch import MemorySwitch

if TYPE_CHECKING:
    from offbeat.payload import Payload, Reply


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
