"""Workers, a thread each, that sum vectors over a switch."""

from __future__ import annotations

import functools
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.client_thread import ClientThread
from offbeat.switch.control_client import ControlClient
from offbeat.switch.job_shape import JobShape
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.udp_socket import UdpSocket

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_TIMEOUT = timedelta(seconds=30)
_SLOTS = 256


def integers(workers: int, vectors: int, size: int, seed: int = 0) -> list[list[NDArray[np.float32]]]:
    """Vectors of 20-bit integers, which are exact as fixed point: their sums are known."""
    numbers = np.random.default_rng(seed)
    return [
        [numbers.integers(-(1 << 20), 1 << 20, size).astype(np.float32) for _ in range(vectors)] for _ in range(workers)
    ]


def right_sums(vectors: list[list[NDArray[np.float32]]]) -> list[list[bytes]]:
    """What each worker has to get."""
    sums = [np.sum(each, axis=0, dtype=np.float32).tobytes() for each in zip(*vectors, strict=True)]
    return [sums] * len(vectors)


def sums_of(
    address: str,
    vectors: list[list[NDArray[np.float32]]],
    values: int = 256,
    open_socket: Callable[[], UdpSocket] = UdpSocket,
) -> list[list[bytes]]:
    """Sum vectors of some workers at a switch, all under way at once; the totals that each has.

    Args:
        values: int32 in a packet.
    """
    world = len(vectors)
    all_are_in = threading.Barrier(len(vectors))
    totals: list[list[bytes]] = [[] for _ in vectors]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        control = ControlClient(address, rank=rank)
        shape, joined = control.join("sums", JobShape(0, world, values, _SLOTS))
        sock = open_socket()
        client = StreamClient(shape, rank, joined.cookie)
        thread = ClientThread(client, sock, sock.connect(control.host, joined.port))
        try:
            all_are_in.wait(10)
            under_way = [thread.do(functools.partial(client.begin, vector)) for vector in vectors[rank]]
            for exchange in under_way:
                assert thread.wait(functools.partial(getattr, exchange, "is_done"), _TIMEOUT), thread.trouble
                totals[rank].append(exchange.total.tobytes())
            all_are_in.wait(30)
        finally:
            thread.close()
            control.close()

    def noted(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            all_are_in.abort()

    threads = [threading.Thread(target=noted, args=(rank,)) for rank in range(len(vectors))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]
    return totals
