"""Load for a switch within this process: workers that sum, a thread each, and one that sends garbage meanwhile.

Nothing but the data plane is between them: no socket, no loss, and one interpreter for all.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from offbeat.lab.garbage import GarbageMaker, GarbageResult
from offbeat.lab.load_workers import LoadOutcome
from offbeat.lab.switch_load import SLOTS, WINDOW, KnownVectors, LoadResult, sum_all_the_time
from offbeat.protocol.switch_control import Strategy
from offbeat.switch.client_thread import ClientThread
from offbeat.switch.job_shape import JobShape
from offbeat.switch.memory_switch import MemorySwitch
from offbeat.switch.packet import MOST_VALUES
from offbeat.switch.packet_batch import PacketBatch, join_packet
from offbeat.switch.stream_client import StreamClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from offbeat.switch.memory_switch import MemoryPort

_HONEST, _OWN = 1, 2  # numbers of the jobs
_AT_ONCE = 16
_TO = np.zeros(1, np.uint64)  # a memory switch has no address


class _SeenPort:
    """A worker's port, of which somebody sees what it sends."""

    def __init__(self, port: MemoryPort, see: Callable[[bytes], None]) -> None:
        self._see, self.fileno, self.recv, self.close, self._send = see, port.fileno, port.recv, port.close, port.send

    def send(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64] | None = None) -> None:
        for data in batch.first(min(len(batch), _AT_ONCE)).datagrams():
            self._see(data)
        self._send(batch, to, rows)


def sum_beside_garbage(workers: int, values: int, *, seconds: float, per_second: float) -> LoadOutcome:
    """Have workers sum while garbage is sent, in the first one's name, too.

    Args:
        values: int32 in a packet.
        seconds: for how long to measure.
        per_second: datagrams of garbage, at most.
    """
    switch, shape = MemorySwitch(), JobShape(_HONEST, workers, values, SLOTS)
    maker, is_over = GarbageMaker((_OWN, 0, 0)), threading.Event()
    for one in (shape, GarbageMaker.own_shape(_OWN)):
        switch.plane.create_job(one, Strategy())
        for rank in range(workers if one is shape else 1):
            switch.plane.admit(one.number, rank, rank)
    ports = [switch.open_port() for _ in range(workers)]
    threads = []
    for rank, port in enumerate(ports):
        client = StreamClient(shape, rank, rank, window=WINDOW)
        threads.append((ClientThread(client, port if rank else _SeenPort(port, maker.see), 0), client))

    def work(rank: int) -> LoadResult:
        return sum_all_the_time(*threads[rank], KnownVectors(rank, workers, values), seconds)

    with ThreadPoolExecutor(workers + 1) as pool:
        garbage = pool.submit(_send, maker, switch, ports[0], is_over, per_second)
        try:
            results = list(pool.map(work, range(workers)))
        finally:
            is_over.set()
        sent = garbage.result()
    for thread, _ in threads:
        thread.close()
    refused = Counter(switch.plane.dropped)
    for number in (_HONEST, _OWN):
        stats = switch.plane.stats(number, 0.0)
        refused.update(stats.refused)
        refused["duplicates"] += sum(one.counts.get("duplicates", 0) for one in stats.members.values())
    return LoadOutcome(results, [], GarbageResult(dict(sent), {why: count for why, count in refused.items() if count}))


def _send(
    maker: GarbageMaker, switch: MemorySwitch, victim: MemoryPort, is_over: threading.Event, per_second: float
) -> Counter[str]:
    """Send until it is over, from a port of its own and from an honest worker's; how many of each kind."""
    own, sent = switch.open_port(), Counter[str]()
    own.send(join_packet(_OWN, 0, 0), _TO)
    while not is_over.wait(
        _AT_ONCE / per_second
    ):  # and no more for having been late: it would have all the switch's time
        made = [maker.next() for _ in range(_AT_ONCE)] if maker.has_seen else []
        sent.update(one.kind for one in made)
        for port, is_from_victim in ((own, False), (victim, True)):
            if some := [one.datagram for one in made if one.is_from_victim == is_from_victim]:
                port.send(PacketBatch.of(some, MOST_VALUES), _TO)
        while len(own.recv(PacketBatch(1, 0))[0]):
            pass  # what it is told is of no interest
    own.close()
    return sent
