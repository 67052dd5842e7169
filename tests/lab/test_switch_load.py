"""The load of a switch's benchmark: what it counts, and what it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.history import HistoryEnded, HistoryLog
from offbeat.lab.garbage import Garbage, parted
from offbeat.lab.switch_load import LoadTask, count_clocks
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.job_shape import JobShape
from offbeat.switch.memory_switch import MemoryPort, MemorySwitch
from offbeat.switch.packet import Packet, PacketKind, Reason
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.table_client import TableClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SHAPE = JobShape(1, 1, values=16, slots=4, ring=8)
CLOCKS = 60


@pytest.fixture
def port() -> Iterator[MemoryPort]:
    switch = MemorySwitch()
    switch.plane.create_job(SHAPE, Strategy("table"))
    switch.plane.admit(1, 0, 9)
    port = switch.open_port()
    port.send(PacketBatch.of([Packet(PacketKind.JOIN, 1, 0, cookie=9)], 16), np.zeros(1, np.uint64))
    yield port
    port.close()


def task(history: Path) -> LoadTask:
    return LoadTask("", "", "job", 0, 1, 0, clocks=CLOCKS, history=str(history))


def test_all_clocks_are_counted_from_the_first_one_on(port: MemoryPort, tmp_path: Path) -> None:
    result = count_clocks(TableClient(SHAPE, 0, 9), port, 0, task(tmp_path))
    assert (result.error, result.done) == ("", CLOCKS)
    assert result.seconds > 0


def test_what_ends_early_leaves_a_history_that_is_closed(port: MemoryPort, tmp_path: Path) -> None:
    client = TableClient(SHAPE, 0, 9)
    client.refusal = Reason.NOT_A_MEMBER
    assert "no member" in count_clocks(client, port, 0, task(tmp_path)).error
    assert any(isinstance(one, HistoryEnded) for path in tmp_path.iterdir() for one in HistoryLog(path))


def test_every_datagram_is_sent_once_though_two_are_the_same() -> None:
    made = [Garbage("replayed", True, b"same"), Garbage("other port", False, b"same"), Garbage("foreign", True, b"a")]
    assert parted(made) == ([b"same", b"a"], [b"same"])
