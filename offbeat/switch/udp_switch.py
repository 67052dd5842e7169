"""A switch in software behind a UDP socket; runs anywhere, without any right."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from offbeat.switch.data_plane import TABLE_MIB
from offbeat.switch.packet import MOST_VALUES
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.software_plane import SoftwarePlane
from offbeat.switch.udp_socket import UdpSocket

if TYPE_CHECKING:
    import asyncio

_AT_ONCE = 128
# In one turn of the event loop; then control has its turn. To send is most of it: on virtual links the kernel carries
# each packet to its receiver meanwhile.
_TURN_S = 0.01


class UdpSwitch:
    """The data plane and its socket.

    Args:
        host: to listen on, on a port of the kernel's choice.
        table_mib: of all jobs' tables.

    Raises:
        NetworkError: if it cannot be listened on.
    """

    target = "udp"

    def __init__(self, host: str, *, table_mib: int = TABLE_MIB) -> None:
        self._socket = UdpSocket(host)
        self.plane = SoftwarePlane(self._socket.send, table_mib)
        self._batch = PacketBatch(_AT_ONCE, MOST_VALUES)
        self.port = self._socket.port

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take in packets on an event loop, until `close`."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self.receive)

    def receive(self) -> None:
        """Take in what is here; what is left when its time is over comes in the next turn."""
        began_s = now_s = time.monotonic()
        while now_s - began_s < _TURN_S:
            batch, ports = self._socket.recv(self._batch)
            if not len(batch):
                return
            self.plane.handle(batch, ports, now_s)
            now_s = time.monotonic()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
