"""Batches of datagrams over real sockets."""

from __future__ import annotations

import select

import numpy as np

from offbeat.switch.packet import Packet, PacketKind
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.udp_socket import UdpSocket, address_of


def test_one_receiver_that_cannot_be_reached_costs_no_other_a_datagram() -> None:
    sender, receiver = UdpSocket(), UdpSocket("127.0.0.1")
    batch = PacketBatch.of([Packet(PacketKind.GRANT, 1, worker) for worker in range(4)], 0)
    here = address_of("127.0.0.1", receiver.port)
    nowhere = [address_of("255.255.255.255", 9), address_of("127.0.0.1", 0)]  # no right to it; no such port
    try:
        sender.send(batch, np.array([*nowhere, here, here], np.uint64))
        assert select.select([receiver], [], [], 5)[0], "nothing has come"
        received, _ = receiver.recv(PacketBatch(4, 0))
        assert received.header["worker"].tolist() == [2, 3]
        assert sender.dropped == 2
    finally:
        sender.close()
        receiver.close()
