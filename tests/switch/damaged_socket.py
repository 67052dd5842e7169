"""A worker's socket at which some datagrams are damaged, both ways: one bit of each, anywhere in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.packet import HEADER_BYTES
from offbeat.switch.udp_socket import UdpSocket

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat.switch.packet_batch import PacketBatch

_HEADER_BITS = 8 * HEADER_BYTES


class DamagedSocket(UdpSocket):
    """It flips a bit in one of `EVERY` datagrams; in every second of these in the header.

    Attributes:
        damaged: how many it has damaged.
    """

    EVERY = 50

    def __init__(self) -> None:
        super().__init__()
        self._chance = np.random.default_rng(0)
        self.damaged = 0

    def send(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64] | None = None) -> None:
        copy = batch.among(np.arange(len(batch)))
        self._damage(copy)
        super().send(copy, to, rows)

    def recv(self, batch: PacketBatch) -> tuple[PacketBatch, NDArray[np.uint64]]:
        received, where = super().recv(batch)
        self._damage(received)
        return received, where

    def _damage(self, batch: PacketBatch) -> None:
        for row in np.flatnonzero(self._chance.integers(0, self.EVERY, len(batch)) == 0):
            self.damaged += 1
            bits = _HEADER_BITS if self.damaged % 2 else 8 * int(batch.sizes[row])
            bit = int(self._chance.integers(0, bits))
            batch.rows[row, bit // 8] ^= 1 << bit % 8
