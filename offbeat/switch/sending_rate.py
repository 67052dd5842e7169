"""The rate of a worker's own side, without a network or a switch: packets are made and sent, and nobody reads them.

The answers, without which a stream does not go on, are made of the packets themselves, outside of the time that counts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from offbeat.switch.job_shape import JobShape
from offbeat.switch.packet import PacketKind
from offbeat.switch.stream_client import StreamClient
from offbeat.switch.udp_socket import UdpSocket, address_of

if TYPE_CHECKING:
    from offbeat.switch.packet_batch import PacketBatch

_SLOTS = 512
_CHUNKS = 2048  # of an exchange
_NEVER_S = 1e6


class SendingRate(NamedTuple):
    """The rate of one worker's packets with values, as fast as it makes and sends them.

    Args:
        packets: how many were sent.
        seconds: that it took to make and send them.
        answer_seconds: that it took to take in their answers.
    """

    packets: int
    seconds: float
    answer_seconds: float

    @property
    def per_second(self) -> float:
        """Packets per second."""
        return self.packets / self.seconds


def sending_rate(values: int, *, window: int = 64, seconds: float = 0.3) -> SendingRate:
    """Measure `StreamClient.packets` and `UdpSocket.send`, and beside them `StreamClient.receive`.

    Args:
        values: int32 in a packet.
        window: packets that are made and sent at a time.
        seconds: how long to measure.
    """
    client = StreamClient(JobShape(0, 1, values, _SLOTS), 0, 0, window=window, rto_s=_NEVER_S)
    numbers = np.random.default_rng(0).integers(-(1 << 20), 1 << 20, _CHUNKS * values).astype(np.float32)
    sink, source = UdpSocket("127.0.0.1"), UdpSocket("127.0.0.1")
    to = np.full(2 * client.window, address_of("127.0.0.1", sink.port), np.uint64)
    packets, spent_s, answers_s = 0, 0.0, 0.0
    end_s = time.perf_counter() + seconds
    while packets == 0 or time.perf_counter() < end_s:
        if client.is_idle:
            client.begin(numbers)
        began_s = time.perf_counter()
        batch = client.packets(0.0)
        source.send(batch, to[: len(batch)])
        sent_s = time.perf_counter()
        has_values = bool(batch.header["count"].any())
        _answer(batch)
        answered_s = time.perf_counter()
        client.receive(batch, 0.0)
        if has_values:  # those that only prime are smaller
            packets += len(batch)
            spent_s += sent_s - began_s
            answers_s += time.perf_counter() - answered_s
    source.close()
    sink.close()
    return SendingRate(packets, spent_s, answers_s)


def _answer(batch: PacketBatch) -> None:
    """Make of each packet the answer that a switch would give its only worker."""
    header = batch.header
    header["kind"], header["bitmap"], header["cookie"] = PacketKind.RESULT, 1, 0
    batch.seal()
