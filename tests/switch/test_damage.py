"""Datagrams that were damaged on their way count as lost, and are counted: no sum and no table changes by them."""

from __future__ import annotations

import functools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.protocol.switch_control import Strategy
from offbeat.switch.client_thread import ClientThread
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.table_client import TableClient
from tests.switch.damaged_socket import DamagedSocket
from tests.switch.kernel_replay import in_a_network_of_its_own, why_not
from tests.switch.local_switch import served_switch
from tests.switch.sums import integers, right_sums, sums_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

needs_kernel = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
TARGETS = [
    pytest.param((), False, id="udp"),
    pytest.param(("lo",), False, id="ebpf", marks=needs_kernel),
    pytest.param(("lo",), True, id="xdp", marks=needs_kernel),
]
_WORKERS, _ROWS, _VALUES, _STEPS = 3, 40, 64, 6
_TIMEOUT = timedelta(seconds=60)


def dropped_at(address: str) -> dict[str, int]:
    control = ControlClient(address, role="operator")
    try:
        return dict(control.status().dropped)
    finally:
        control.close()


@pytest.mark.parametrize(("interfaces", "at_xdp"), TARGETS)
def test_sums_are_right_though_datagrams_are_damaged(
    interfaces: tuple[str, ...], at_xdp: bool, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = integers(3, 4, 20_000)

    def summed() -> tuple[list[list[bytes]], dict[str, int]]:
        with served_switch(interfaces=interfaces, at_xdp=at_xdp, timeout=_TIMEOUT) as address:
            return sums_of(address, vectors, values=64, open_socket=DamagedSocket), dropped_at(address)

    with caplog.at_level(logging.WARNING, "offbeat"):
        totals, dropped = in_a_network_of_its_own(summed) if interfaces else summed()
    assert totals == right_sums(vectors)
    assert dropped["damaged"] > 5
    assert "packets from the switch arrived damaged" in caplog.text


@pytest.mark.parametrize(("interfaces", "at_xdp"), TARGETS[:2])
def test_tables_are_right_though_datagrams_are_damaged(interfaces: tuple[str, ...], at_xdp: bool) -> None:
    """Every worker adds integers that are exact, and reads the same sums at the end."""
    updates = np.random.default_rng(1).integers(-1000, 1000, (_WORKERS, _STEPS, _ROWS * _VALUES)).astype(np.float32)

    def tables() -> tuple[list[NDArray[np.float32]], dict[str, int]]:
        with served_switch(interfaces=interfaces, at_xdp=at_xdp, timeout=_TIMEOUT) as address:
            return _tables_of(address, updates), dropped_at(address)

    found, dropped = in_a_network_of_its_own(tables) if interfaces else tables()
    for table in found:
        np.testing.assert_array_equal(table, updates.sum(axis=(0, 1)))
    assert dropped["damaged"] > 5


def _tables_of(address: str, updates: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    found: dict[int, NDArray[np.float32]] = {}
    all_are_in = threading.Barrier(_WORKERS)

    def work(rank: int) -> None:
        control = ControlClient(address, rank=rank)
        shape, joined = control.join(
            "table", JobShape(0, _WORKERS, _VALUES, 64, 16, _ROWS), Strategy("table", window=0), exponent=30
        )
        sock = DamagedSocket()
        client = TableClient(shape, rank, joined.cookie, exponent=30, clock=joined.clock)
        thread = ClientThread(client, sock, sock.connect(control.host, joined.port))
        try:
            all_are_in.wait(30)
            for update in updates[rank]:
                thread.do(functools.partial(client.push, update))
                assert thread.wait(lambda: client.phase == "computing", _TIMEOUT), thread.trouble
            found[rank] = client.values(updates.shape[-1])
            all_are_in.wait(60)
        finally:
            thread.close()
            control.close()

    with ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(work, range(_WORKERS)))
    return [found[rank] for rank in range(_WORKERS)]
