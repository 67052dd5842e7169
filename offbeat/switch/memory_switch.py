"""A switch within one process, for tests, docs and threads that stand for workers: no socket, no loss."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.software_plane import SoftwarePlane

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat.switch.packet_batch import PacketBatch


class MemorySwitch:
    """The data plane, and the ports of its workers."""

    def __init__(self) -> None:
        self.plane = SoftwarePlane(self._deliver)
        self.lock = threading.Lock()  # held by whoever uses the plane
        self._ports: dict[int, MemoryPort] = {}
        self._numbers = itertools.count(1)

    def open_port(self) -> MemoryPort:
        """A port for one more worker."""
        port = MemoryPort(self, next(self._numbers))
        self._ports[port.address] = port
        return port

    def close_port(self, address: int) -> None:
        """Drop what is sent to a port from now on."""
        self._ports.pop(address, None)

    def _deliver(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64]) -> None:
        for address in np.unique(to).tolist():
            if (port := self._ports.get(address)) is not None:
                port.put(batch.among(rows[to == address]))


class MemoryPort:
    """One worker's port; has the methods of a `UdpSocket` that a worker uses."""

    def __init__(self, switch: MemorySwitch, address: int) -> None:
        self._switch, self.address = switch, address
        self._inbox: deque[PacketBatch] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """The file descriptor, for whoever waits until something is here."""
        return self._ready

    def put(self, batch: PacketBatch) -> None:
        """Take what the switch has sent."""
        self._inbox.append(batch)
        os.eventfd_write(self._ready, 1)

    def send(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64] | None = None) -> None:
        """Hand packets to the switch, which answers at once."""
        with self._switch.lock:
            self._switch.plane.handle(batch, np.full(len(batch), self.address, np.uint64), 0.0)

    def recv(self, batch: PacketBatch) -> tuple[PacketBatch, NDArray[np.uint64]]:
        """Take one delivery; an empty batch if there is none."""
        if not self._inbox:
            return batch.first(0), np.zeros(0, np.uint64)
        taken = self._inbox.popleft()
        if not self._inbox:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ready)
            if self._inbox:  # it came in between
                os.eventfd_write(self._ready, 1)
        return taken, np.zeros(len(taken), np.uint64)

    def close(self) -> None:
        self._switch.close_port(self.address)
        os.close(self._ready)
