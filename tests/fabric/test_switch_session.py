"""A worker's session at a switch: tables that one worker has closed already when the switch is lost, and its end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from offbeat.errors import NetworkError
from offbeat.fabric.switch_session import OtherWorkers, SwitchSession
from offbeat.fabric.switch_table import SwitchTable
from offbeat.protocol.switch_control import MeetAtSwitch, Strategy
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.table_client import TableClient
from tests.switch.killed_switch import KilledSwitch
from tests.switch.local_switch import served_switch

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = timedelta(seconds=5)


class BothWorkers(OtherWorkers):
    """Two workers, none of whom is ever lost."""

    @property
    def members(self) -> tuple[int, ...]:
        return (0, 1)


def open_session(address: str, rank: int) -> SwitchSession:
    def dial(on_lost: Callable[[], None]) -> ControlClient:
        return ControlClient(address, rank=rank, timeout=PATIENCE, patience=PATIENCE, on_lost=on_lost)

    return SwitchSession(dial, BothWorkers(rank, None), PATIENCE)


def open_table(session: SwitchSession, rank: int, name: str) -> SwitchTable:
    client = TableClient(JobShape(0, 2, 16, 4, 8, 1), rank, 0, exponent=3)
    return SwitchTable(client, Strategy("table"), session, name)


@pytest.mark.slow
def test_a_table_that_one_has_closed_keeps_nobody_from_the_next_one() -> None:
    with KilledSwitch() as switch, ThreadPoolExecutor(2) as pool:
        sessions = [open_session(switch.address, rank) for rank in range(2)]
        both = [pool.submit(open_table, sessions[rank], rank, "old") for rank in range(2)]
        tables = [one.result(20) for one in both]
        tables[1].close()  # the other has not come to it yet
        switch.restart()
        both = [pool.submit(open_table, sessions[rank], rank, "new") for rank in range(2)]
        try:
            tables += [one.result(20) for one in both]
        finally:
            for session in sessions:
                session.close()
    for table in tables:
        table.leave()


def test_nobody_waits_at_a_session_that_is_closed() -> None:
    with served_switch() as address, ThreadPoolExecutor(1) as pool:
        session = open_session(address, 0)
        session.close()
        waiting = pool.submit(session.ask, lambda number: MeetAtSwitch(number, "a"))
        with pytest.raises(NetworkError, match="has left the switch"):
            waiting.result(5)


def test_who_waits_for_others_learns_that_the_link_is_closed() -> None:
    with served_switch() as address, ThreadPoolExecutor(1) as pool:
        control = ControlClient(address, timeout=PATIENCE, patience=PATIENCE)
        control.join("a", JobShape(0, 2, 16, 4, 8))
        other = ControlClient(address, rank=1, timeout=PATIENCE, patience=PATIENCE)
        other.join("a", JobShape(0, 2, 16, 4, 8))
        begun = threading.Event()
        waiting = pool.submit(control.ask, lambda number: MeetAtSwitch(number, "a"), begun.set)
        assert begun.wait(5)
        control.close()
        try:
            with pytest.raises(NetworkError, match="is lost: it was closed"):
                waiting.result(5)
        finally:
            other.close()
