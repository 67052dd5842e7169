"""When control closes the sums that wait for late workers."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.protocol.switch_control import Strategy
from offbeat.switch.client_thread import ClientThread, socket_to
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.sum_watch import SumWatch
from tests.switch.kernel_replay import in_a_network_of_its_own, why_not
from tests.switch.local_switch import served_switch

if TYPE_CHECKING:
    from offbeat.switch.stream_exchange import StreamExchange

WAIT_S = 0.8
TIMEOUT = timedelta(seconds=20)
KERNEL = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def looked(watch: SumWatch, unsettled: list[int], *, from_s: float, to_s: float) -> list[tuple[float, list[int]]]:
    """Find the exchanges that the watch closes, and when, with a look every 5 ms."""
    found = []
    for tick in range(round(from_s * 200), round(to_s * 200)):
        now_s = tick / 200
        if watch.is_due(WAIT_S, now_s) and (over := watch.look(unsettled, WAIT_S, now_s)):
            found.append((now_s, over))
    return found


def test_an_exchange_is_closed_once_it_has_waited_for_long_enough() -> None:
    watch = SumWatch()
    assert looked(watch, [4], from_s=10.0, to_s=10.4) == []
    found = looked(watch, [4, 7], from_s=10.4, to_s=11.4)
    assert found[0][1] == [4]
    assert 10.8 <= found[0][0] <= 10.8 + WAIT_S / 4
    assert next(at_s for at_s, over in found if 7 in over) >= 11.2
    assert all(over[0] == 4 for _, over in found), "the oldest first"


def test_one_that_is_settled_meanwhile_begins_anew() -> None:
    watch = SumWatch()
    looked(watch, [4], from_s=10.0, to_s=10.7)
    looked(watch, [], from_s=10.7, to_s=11.0)
    assert looked(watch, [4], from_s=11.0, to_s=11.7) == []


def test_nobody_is_left_out_since_the_switch_itself_stood_still() -> None:
    watch = SumWatch()
    looked(watch, [4], from_s=10.0, to_s=10.3)
    assert looked(watch, [4], from_s=20.0, to_s=20.2) == []
    assert looked(watch, [4], from_s=20.2, to_s=21.0) != []


def test_a_job_that_waits_for_nobody_is_not_looked_at() -> None:
    assert not SumWatch().is_due(0.0, 10.0)


def sums_without_the_second(interfaces: list[str]) -> tuple[list[float], list[int], list[float], list[int]]:
    """Three workers, of which the second is late for two sums of several packets with exponents each.

    Returns:
        Of the two sums: the seconds that each took, and who is in it; what the late one finds; and by rank in how many
        sums each was left out.
    """
    with ExitStack() as resources:
        address = resources.enter_context(served_switch(interfaces=interfaces))
        shape, strategy = JobShape(0, 3, values=16), Strategy(quorum=2, wait_s=WAIT_S / 2)
        clients, threads, controls = [], [], []
        for rank in range(3):
            control = resources.enter_context(closing(ControlClient(address, rank=rank)))
            here, joined = control.join("late", shape, strategy)
            clients.append(StreamClient(here, rank, joined.cookie))
            threads.append(resources.enter_context(closing(ClientThread(clients[rank], *socket_to(control, joined)))))
            controls.append(control)

        def begin(rank: int) -> StreamExchange:
            return threads[rank].do(lambda: clients[rank].begin(np.full(40 * 16, rank + 1, np.float32)))

        def wait(rank: int, exchange: StreamExchange) -> StreamExchange:
            assert threads[rank].wait(lambda: exchange.is_done, TIMEOUT), threads[rank].trouble
            return exchange

        took_s, included = [], []
        for _ in range(2):
            began_s = time.monotonic()
            done = [wait(rank, one) for rank, one in [(rank, begin(rank)) for rank in (0, 2)]]
            took_s.append(time.monotonic() - began_s)
            assert done[0].total.tobytes() == done[1].total.tobytes()
            included.append(done[0].contributors)
        late = [wait(1, one) for one in [begin(1), begin(1)]]
        found = [float(one.total.mean()) for one in late]
        (job,) = controls[0].status().jobs
        return took_s, included, found, [one.left_out for one in job.members]


@pytest.mark.parametrize("interfaces", [pytest.param([], id="udp"), pytest.param(["lo"], id="ebpf", marks=KERNEL)])
def test_a_switch_closes_sums_that_wait_for_a_worker(interfaces: list[str]) -> None:
    def play() -> tuple[list[float], list[int], list[float], list[int]]:
        return sums_without_the_second(interfaces)

    took_s, included, found, left_out = in_a_network_of_its_own(play) if interfaces else play()
    assert min(took_s) >= WAIT_S / 2
    assert max(took_s) < 4 * WAIT_S
    assert included == [0b101, 0b101]
    assert found == [4.0, 4.0], "the late worker has the sums of the others"
    assert left_out == [0, 2, 0]
