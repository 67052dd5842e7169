"""Packets that no honest worker sends: every data plane makes the same of them, and they change nobody else's sums."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from offbeat.errors import PeerError
from offbeat.lab.garbage import KINDS, GarbageMaker
from offbeat.lab.memory_load import sum_beside_garbage
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.control_client import ControlClient
from offbeat.switch.packet import FROM_WORKERS, MOST_VALUES, Packet, PacketKind, decode, encode
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.software_plane import SoftwarePlane
from offbeat.switch.udp_socket import UdpSocket
from tests.switch.kernel_replay import KernelReplay, NotedState, in_a_network_of_its_own, why_not
from tests.switch.local_switch import served_switch
from tests.switch.sums import integers, right_sums, sums_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

NUMBER, WORKERS = 7, 2
needs_the_kernel = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
_AT_ONCE = 16  # of a batch so many are told why they are refused
_ENOUGH = 500
_PAUSE_S = 0.0002  # between two, as switch, workers and all share one interpreter here


def garbage(seed: int, packets: int) -> list[tuple[int, bytes]]:
    """Packets of a job's two members, in which anything is wrong, each from its own port."""
    makers = [GarbageMaker((NUMBER, worker, 100 + worker), seed=2 * seed + worker) for worker in range(WORKERS)]
    chance = random.Random(seed)
    made = [(worker := chance.randrange(WORKERS), makers[worker].of_own_job()) for _ in range(packets)]
    return [(worker, data) for worker, data in made if is_packet(data)]


def is_packet(data: bytes) -> bool:
    """Whether any plane looks at it; the others are `foreign`, which is tested with the sums below."""
    try:
        return decode(data).kind in FROM_WORKERS - {PacketKind.LEAVE}
    except PeerError:
        return False


def strategy(seed: int) -> Strategy:
    return Strategy("table", window=(0, 1, 4, None)[seed % 4])


def given(seed: int, packets: int = 400) -> tuple[NotedState, list[tuple[int, bytes]]]:
    """The reference model, given garbage; all that it was given."""
    state = NotedState(GarbageMaker.own_shape(NUMBER), strategy(seed))
    for worker in range(WORKERS):
        state.admit(worker, 100 + worker)
        state.members[worker].port = worker
    made = garbage(seed, packets)
    for worker, data in made:
        state.handle(decode(data), worker)
    return state, made


@pytest.mark.parametrize("seed", range(20))
def test_software_makes_the_same_of_garbage_as_the_model(seed: int) -> None:
    state, made = given(seed)
    answers: list[tuple[int, bytes]] = []

    def send(batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64]) -> None:
        datagrams = batch.datagrams()
        answers.extend((port - 1, datagrams[row]) for port, row in zip(to.tolist(), rows.tolist(), strict=True))

    plane = SoftwarePlane(send)
    plane.create_job(state.shape, strategy(seed))
    for worker in range(WORKERS):
        plane.admit(NUMBER, worker, 100 + worker)
        join = PacketBatch.of([Packet(PacketKind.JOIN, NUMBER, worker, cookie=100 + worker)], 0)
        plane.handle(join, np.full(1, worker + 1, np.uint64), 0.0)
    answers.clear()
    chance, at = random.Random(seed), 0
    while at < len(made):
        some = made[at : at + chance.randint(1, _AT_ONCE)]
        at += len(some)
        batch = PacketBatch.of([data for _, data in some], MOST_VALUES)
        plane.handle(batch, np.array([worker + 1 for worker, _ in some], np.uint64), 0.0)
    expected = [(send.port, encode(send.packet)) for _, _, sends in state.events for send in sends]
    assert answers == expected
    told = plane.stats(NUMBER, 0.0)
    assert told.refused == dict(state.members.refused)
    assert len(told.refused) >= 3, told.refused
    assert {kind for _, data in made for kind in [decode(data).kind]} == FROM_WORKERS - {PacketKind.LEAVE}


@needs_the_kernel
def test_the_kernel_makes_the_same_of_garbage_as_the_model() -> None:
    def all_of_them() -> int:
        kernel = KernelReplay(WORKERS)
        try:
            return sum(kernel.replay(given(seed)[0], f"seed {seed}") for seed in range(20))
        finally:
            kernel.close()

    assert in_a_network_of_its_own(all_of_them) > 4000


class SeenSocket(UdpSocket):
    """A worker's socket; `see` sees what it sends, and can send from it."""

    see: Callable[[bytes], None] | None = None

    def send(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64] | None = None) -> None:
        if self.see is not None:
            for data in batch.datagrams():
                self.see(data)
        super().send(batch, to, rows)

    def spoof(self, data: bytes) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as sock:  # it may be closed
            sock.send(data)


def summed_beside_garbage(interfaces: tuple[str, ...] = ()) -> tuple[Counter[str], dict[str, int]]:
    """Sum while somebody sends garbage; what was sent, and what the switch has dropped."""
    vectors, sockets, sent, is_over = integers(2, 24, 20_000), list[SeenSocket](), Counter[str](), threading.Event()

    def shout(control: ControlClient) -> None:
        shape, joined = control.join("own", GarbageMaker.own_shape())
        maker.append(GarbageMaker((shape.number, 0, joined.cookie)))
        own = UdpSocket()
        switch = np.full(1, own.connect(control.host, joined.port), np.uint64)
        own.send(PacketBatch.of([Packet(PacketKind.JOIN, shape.number, 0, cookie=joined.cookie)], 0), switch)
        has_begun.set()
        while not is_over.is_set():
            if not maker[0].has_seen:
                time.sleep(0.001)
                continue
            one = maker[0].next()
            sent[one.kind] += 1
            time.sleep(_PAUSE_S)
            if one.is_from_victim:
                sockets[(len(sockets) - 1) // 2 * 2].spoof(one.datagram)
            else:
                own.send(PacketBatch.of([one.datagram], MOST_VALUES), switch)
        own.close()

    def open_socket() -> SeenSocket:
        sockets.append(one := SeenSocket())
        if len(sockets) % 2:  # the first of two workers
            one.see = maker[0].see
        return one

    maker, has_begun = list[GarbageMaker](), threading.Event()
    with served_switch(interfaces=interfaces) as address:
        control = ControlClient(address, rank=0)
        stranger = threading.Thread(target=shout, args=(control,))
        stranger.start()
        try:
            assert has_begun.wait(10)
            while sent.total() < _ENOUGH:
                assert sums_of(address, vectors, open_socket=open_socket) == right_sums(vectors)
        finally:
            is_over.set()
            stranger.join()
        status = control.status()
        control.close()
    refused = Counter(status.dropped)
    for job in status.jobs:
        refused.update(job.refused)
    return sent, refused


def check(sent: Counter[str], refused: dict[str, int]) -> None:
    assert set(sent) == set(KINDS), sent
    assert refused["foreign"] > 20, refused
    assert refused["unknown job"] > 5, refused
    assert refused["refused"] > 10, refused
    assert refused["MALFORMED"] > 0, refused


def test_garbage_changes_no_sum_at_a_udp_switch() -> None:
    check(*summed_beside_garbage())


@needs_the_kernel
def test_garbage_changes_no_sum_in_the_kernel() -> None:
    check(*in_a_network_of_its_own(lambda: summed_beside_garbage(("lo",))))


def test_garbage_changes_no_sum_in_memory() -> None:
    outcome = sum_beside_garbage(2, 64, seconds=2.0, per_second=1000)
    assert outcome.garbage is not None
    assert [(one.error, one.wrong) for one in outcome.results] == [("", 0)] * 2
    assert min(one.checked for one in outcome.results) > 0
    check(Counter(outcome.garbage.sent), outcome.garbage.refused)
