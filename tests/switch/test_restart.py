"""Streams and tables at a switch that forgets everything: random schedules, and what becomes of each change."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.errors import NetworkError, NumericsError
from offbeat.protocol.group_progress import GroupProgress
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.client_thread import ClientThread
from offbeat.switch.clocks import Windows
from offbeat.switch.job_shape import JobShape
from offbeat.switch.job_state import JobState
from offbeat.switch.memory_switch import MemorySwitch
from offbeat.switch.packet import Packet, PacketKind, decode
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.table_client import TableClient
from offbeat.switch.vector_stream import VectorStream
from tests.switch.network import VALUES, StreamPlay

if TYPE_CHECKING:
    from collections.abc import Sequence


class RestartPlay(StreamPlay):
    """A stream whose switch forgets everything a few times, once with a worker that is lost at the same moment.

    Attributes:
        supplied: results that one worker had to give to others.
    """

    caps = (np.inf,)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.quorum, self._waits, self.supplied = None, False, 0
        self._restarts = {self._chance.randint(3, 250) for _ in range(self._chance.randint(1, 3))}
        self._forget()
        shape = self.state.shape
        self.clients = [
            StreamClient(shape, worker, self._cookie(worker), window=4, keeps=True) for worker in range(self.workers)
        ]

    def _cookie(self, worker: int) -> int:
        return 100 * self.state.shape.number + worker

    def _forget(self) -> None:
        shape = JobShape(self.state.shape.number + 1, self.workers, values=VALUES, slots=self.state.shape.slots)
        self.state, self._vector = JobState(shape, Strategy()), JobState(shape, Strategy(), stream=VectorStream)
        for worker in sorted(self.alive):
            for state in (self.state, self._vector):
                state.admit(worker, self._cookie(worker))
                state.members[worker].port = worker

    def _strike(self, turn: int) -> None:
        for worker in self.alive:
            for one in self.exchanges[worker]:
                if not one.is_done:
                    break
                one.is_taken = True
        if turn not in self._restarts:
            return
        self._compare_planes()
        self._network.under_way.clear()
        if self._crash is not None and self._crash > turn:  # both at once
            self._crash = None
            self.alive.discard(self.workers - 1)
        self._forget()
        progress = {worker: self.clients[worker].progress for worker in self.alive}
        for worker in self.alive:
            self.clients[worker].begin_again(self.state.shape, self._cookie(worker), progress)
            self.supplied += sum(one.supplier is not None for one in self.exchanges[worker])


@pytest.mark.slow
def test_all_have_the_same_sums_whenever_the_switch_forgets_them() -> None:
    assert supplied(range(120)) > 10, "hardly ever did one have what another lacked"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_the_same_in_many_more_schedules(block: int) -> None:
    assert supplied(range(1000 + 100 * block, 1100 + 100 * block)) > 0


def supplied(seeds: range) -> int:
    """Play them; how many results one worker had to give to others."""
    found = 0
    for seed in seeds:
        one = RestartPlay(seed)
        one.run()
        found += one.supplied
    return found


def test_who_is_lost_while_it_supplies_a_sum_is_named() -> None:
    shape = JobShape(1, 2, values=VALUES, slots=8)
    client = StreamClient(shape, 0, 5, window=4, keeps=True)
    client.begin(np.ones(VALUES, np.float32))
    client.begin_again(shape, 6, {0: GroupProgress(0), 1: GroupProgress(1)})
    state = JobState(shape, Strategy())
    state.admit(0, 6)  # rank 1 has been evicted meanwhile
    state.members[0].port = 0
    with pytest.raises(NetworkError, match="rank 1 was lost"):
        play([client], state)


def test_who_waits_for_a_sum_whose_supplier_is_lost_is_told() -> None:
    shape, switch = JobShape(1, 2, values=VALUES, slots=8), MemorySwitch()
    switch.plane.create_job(shape, Strategy())
    switch.plane.admit(1, 0, 6)  # rank 1 has been evicted meanwhile
    client = StreamClient(shape, 0, 5, window=4, keeps=True)
    client.begin(np.ones(VALUES, np.float32))
    client.begin_again(shape, 6, {0: GroupProgress(0), 1: GroupProgress(1)})
    (exchange,) = client._exchanges
    thread = ClientThread(client, switch.open_port(), 0)
    try:
        with pytest.raises(NetworkError, match="rank 1 was lost"):
            thread.wait(lambda: exchange.is_done, timedelta(seconds=5))
    finally:
        thread.close()


def test_a_sum_that_was_made_for_the_job_before_goes_to_the_one_that_is() -> None:
    client = StreamClient(JobShape(1, 2, values=VALUES, slots=8), 0, 5, window=4, keeps=True)
    exchange = client.next_exchange(np.ones(VALUES, np.float32))
    client.begin_again(JobShape(2, 2, values=VALUES, slots=8), 5, {0: GroupProgress(0), 1: GroupProgress(0)})
    client.enqueue(exchange)
    assert set(client.packets(0.0).header["job"].tolist()) == {2}


def test_whatever_has_changed_meanwhile_a_worker_believes_the_switch_that_comes_back() -> None:
    client = TableClient(SHAPE, 0, 9, exponent=3, window=4)
    client.begin_again(SHAPE, 9, 0, 0)
    windows = Windows(2, 3, 7, 40_000)
    state = JobState(SHAPE, Strategy("table", window=3), exponent=3, windows=windows)
    state.admit(0, 9)
    for _, answer in state.handle(Packet(PacketKind.JOIN, SHAPE.number, 0, cookie=9), 0):
        client.receive(PacketBatch.of([answer], VALUES), 0.0)
    assert client.windows == windows


def test_what_another_lacks_and_nobody_keeps_is_told() -> None:
    shape = JobShape(1, 2, values=VALUES, slots=8)
    client = StreamClient(shape, 0, 5, window=4, clock=3, keeps=True)
    with pytest.raises(NetworkError, match="lacks the result of exchange 2"):
        client.begin_again(shape, 6, {0: GroupProgress(3), 1: GroupProgress(2)})


def play(clients: Sequence[StreamClient | TableClient], state: JobState) -> None:
    """Let packets go to and fro until nobody has any."""
    for _ in range(200):
        sent = 0
        for client in clients:
            for data in client.packets(0.0).datagrams():
                sent += 1
                for port, answer in state.handle(decode(data), client.worker):
                    assert isinstance(port, int)
                    clients[port].receive(PacketBatch.of([answer], VALUES), 0.0)
        if not sent:
            return


SHAPE = JobShape(1, 2, values=VALUES, slots=4, ring=8, rows=2)


def table_state(clients: Sequence[TableClient], low: int, window: int) -> JobState:
    """A switch's new state, which the clients bring back what they have added to."""
    state = JobState(SHAPE, Strategy("table", window=window), clock=low, exponent=3)
    for client in clients:
        state.admit(client.worker, 9)
        state.members[client.worker].port = client.worker
        client.begin_again(SHAPE, 9, low, max(one.settled for one in clients))
    play(clients, state)
    for client in clients:
        client.go_on()
    play(clients, state)
    return state


def test_a_table_is_the_same_at_the_next_switch_wherever_its_workers_are() -> None:
    clients = [TableClient(SHAPE, worker, 9, exponent=3, window=4) for worker in range(2)]
    ones = np.ones(2 * VALUES, np.float32)
    state = table_state(clients, (1 << 32) - 1, 2)
    for client in clients:
        client.push(ones * np.float32(1 / 4))
        play(clients, state)
    clients[0].push(ones * np.float32(1 / 8))  # and is ahead by one
    play(clients, state)
    clients[1].push(ones * np.float32(1 / 2))  # none of which has reached the switch
    state = table_state(clients, 1, 2)
    assert [client.phase for client in clients] == ["computing"] * 2
    assert clients[1].values(1).tolist() == [1 / 4 + 1 / 4 + 1 / 8 + 1 / 2]
    clients[0].push(ones * np.float32(1 / 16))
    play(clients, state)
    assert clients[0].values(1).tolist() == [1 / 4 + 1 / 4 + 1 / 8 + 1 / 2 + 1 / 16]
    for client in clients:
        client.rest()
    play(clients, state)
    clock = max(client.halt() for client in clients)
    for client in clients:
        client.resume(clock)
    play(clients, state)
    before = clients[0].values(2 * VALUES)
    clients[0].settle()  # the other has not come to it yet
    state = table_state(clients, clock - 1, 0)
    assert [client.settled for client in clients] == [1, 1]
    assert not state.table.values.any(), "what all have was brought back"
    for client in clients:
        client.push(ones * np.float32(1 / 4))
    play(clients, state)
    assert [np.array_equal(client.values(2 * VALUES), before + 1 / 2) for client in clients] == [True, True]


def test_more_than_integers_can_say_is_not_brought_back() -> None:
    client = TableClient(SHAPE, 0, 9, exponent=3, window=4)
    for _ in range(3):  # another worker's changes go the other way
        client.push(np.full(2 * VALUES, 3.0, np.float32))
        client.phase = "computing"
    with pytest.raises(NumericsError, match="moved further"):
        client.begin_again(SHAPE, 9, 0, 0)
