"""A switch in the kernel of the machine that the workers' links meet at: a bridge, a router, or a worker's own."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import PeerError
from offbeat.switch.data_plane import MIB, TABLE_MIB
from offbeat.switch.kernel.compiler import compile_program
from offbeat.switch.kernel.kernel_plane import KernelPlane
from offbeat.switch.kernel.layout import SETTINGS
from offbeat.switch.kernel.libbpf import KernelObject
from offbeat.switch.packet import HEADER_BYTES, HEADERS_BYTES, MOST_VALUES, VALUES_STEP, PacketKind, decode
from offbeat.switch.packet_batch import PacketBatch
from offbeat.switch.udp_socket import UdpSocket, address_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

_log = logging.getLogger("offbeat")
_AT_ONCE = 64
_SLOT_BYTES = 32 << 20  # of all jobs' slots
_JOBS = 16


class KernelSwitch:
    """The program, attached to ports, and the socket from which control sends.

    Args:
        host: IPv4 address that packets are for, on a port of the kernel's choice.
        interfaces: at which they come in: where the workers' links end, such as the ports of a bridge.
        table_mib: of all jobs' tables, which the kernel sets aside at once.
        at_xdp: whether gradients are summed at the interfaces' XDP hooks already.

    Raises:
        NetworkError: if an interface, a package, a right or a part of the kernel is missing; says which.
    """

    def __init__(
        self,
        host: str,
        interfaces: Sequence[str],
        *,
        table_mib: int = TABLE_MIB,
        at_xdp: bool = False,
    ) -> None:
        self.target = "xdp" if at_xdp else "ebpf"
        room = (KernelObject.frame_bytes(interfaces) - HEADERS_BYTES) // (4 * VALUES_STEP) * VALUES_STEP
        values = max(VALUES_STEP, min(MOST_VALUES, room))
        sizes = {
            "MOST_VALUES": values,
            "MOST_SLOTS": 1 << (_SLOT_BYTES // (4 * values)).bit_length() - 1,
            "MOST_ROWS": max(1, (table_mib << MIB) // (4 * values)),
            "MOST_JOBS": _JOBS,
            "HAS_XDP": int(at_xdp),
        }
        self._program = KernelObject(compile_program(sizes))
        try:
            self._socket = UdpSocket(host)
        except BaseException:
            self._program.close()
            raise
        try:
            self.port = self._socket.port
            setting = np.zeros((), SETTINGS)
            setting["ip"], setting["port"] = address_of(host, 0) >> 16, self.port
            self._program.map("settings", SETTINGS)[0] = setting
            self.plane = KernelPlane(self._program, self._socket.send, sizes)
            if at_xdp:
                self._program.attach_at_xdp("take_frame", interfaces)
            self._program.attach("take_packet", interfaces)
        except BaseException:
            self._socket.close()
            self._program.close()
            raise
        self._batch = PacketBatch(_AT_ONCE, 0)
        self._has_said = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look on an event loop at what the program leaves to control, until `close`."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self.receive)

    def receive(self) -> None:
        """Take good-byes, and say once if other packets come in: the program has not seen them at its interfaces."""
        batch, ports = self._socket.recv(self._batch)
        whole = batch.sizes >= HEADER_BYTES
        for at in np.flatnonzero(whole & (batch.header["kind"] == PacketKind.LEAVE)):
            with contextlib.suppress(PeerError):
                self.plane.leave(decode(batch.rows[at, : batch.sizes[at]].tobytes()), int(ports[at]))
        others = np.flatnonzero(whole & (batch.header["kind"] != PacketKind.LEAVE))
        if not self._has_said and len(others):
            self._has_said = True
            host = ".".join(str(int(ports[others[0]]) >> 16 + shift & 255) for shift in (24, 16, 8, 0))
            _log.warning("Packets from %s come in at an interface that is not named by --interfaces.", host)

    def close(self) -> None:
        """Detach the program; jobs are gone with it."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._program.close()
