"""Many packets at once, as arrays: a row each, so that whole windows are made and read without a loop over packets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from offbeat.switch.checksum import checksums
from offbeat.switch.packet import (
    FROM_WORKERS,
    HEADER_BYTES,
    MAGIC,
    MOST_VALUES,
    VALUES_STEP,
    VERSION,
    Packet,
    PacketKind,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HEADER = np.dtype(
    [
        ("magic", "<u2"), ("flags", "u1"), ("kind", "u1"), ("job", "<u2"), ("worker", "u1"), ("count", "u1"),
        ("cookie", "<u4"), ("clock", "<u4"), ("chunk", "<u4"), ("slot", "<u2"), ("epoch", "<u2"), ("bitmap", "<u4"),
        ("exponent", "i1"), ("_", "u1"), ("window_old", "u1"), ("window_new", "u1"),
        ("checksum", "<u4"),
    ]
)  # fmt: skip
assert HEADER.itemsize == HEADER_BYTES
# The beginning of a header, up to `count`, and what of it says which job's and what kind of packet it is.
_BEGINNING = np.dtype("<u8")
_WHAT = np.uint64(0x0000_FFFF_FFF0_FFFF)


class PacketBatch:
    """Packets, row by row: those of one job, or those that have come together, whosever they are.

    Args:
        packets: how many there is room for.
        values: int32 in a packet's payload.

    Attributes:
        rows: [B, 36 + 4 V] bytes as they are sent and received.
        header: [B] of `HEADER`, a view of `rows`.
        values: [B, V] int32, a view of `rows`.
        sizes: [B] bytes of each packet.
    """

    def __init__(self, packets: int, values: int) -> None:
        self._hold(np.zeros((packets, HEADER_BYTES + 4 * values), np.uint8), np.zeros(packets, np.int64))

    def _hold(self, rows: NDArray[np.uint8], sizes: NDArray[np.int64]) -> None:
        self.rows, self.sizes = rows, sizes
        self.header = rows[:, :HEADER_BYTES].view(HEADER)[:, 0]
        self.values = rows[:, HEADER_BYTES:].view("<i4")

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, packets: int) -> PacketBatch:
        """The first so many, in the same memory."""
        return self._part(slice(packets))

    def behind(self, packets: int) -> PacketBatch:
        """Leave out the first so many, in the same memory."""
        return self._part(slice(packets, None))

    def _part(self, which: slice) -> PacketBatch:
        batch = object.__new__(PacketBatch)
        batch.rows, batch.sizes = self.rows[which], self.sizes[which]
        batch.header, batch.values = self.header[which], self.values[which]
        return batch

    def among(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> PacketBatch:
        """Copy a part of them."""
        batch = object.__new__(PacketBatch)
        batch._hold(self.rows[which], self.sizes[which])
        return batch

    def narrowed(self, values: int) -> PacketBatch:
        """The same packets, in rows that have room for no more than `values` int32, in the same memory."""
        batch = object.__new__(PacketBatch)
        batch._hold(self.rows[:, : HEADER_BYTES + 4 * values], self.sizes)
        return batch

    def seal(self) -> None:
        """Write the checksums: of packets that are otherwise as they are to be sent."""
        if len(self):
            self.header["checksum"] = self._checksums(None)

    def are_damaged(self) -> NDArray[np.bool_]:
        """[B] which packets are whole, of this protocol, and have other checksums than they say."""
        whole = self._are_whole()
        found = self._checksums(None if whole.all() else whole)
        damaged: NDArray[np.bool_] = whole & (found != self.header["checksum"])
        return damaged

    def intact(self) -> PacketBatch:
        """Copy the packets that are not damaged; the same batch if none is."""
        damaged = self.are_damaged()
        return self.among(~damaged) if damaged.any() else self

    def _checksums(self, which: NDArray[np.bool_] | None) -> NDArray[np.uint32]:
        """[B] the checksums of those which are whole, of all for None; 0 for others."""
        sizes = self.sizes if which is None else self.sizes[which]
        found = np.zeros(len(self), np.uint32)
        if not len(sizes):
            return found
        words = self.rows.view("<u4")
        if which is None and (sizes == sizes[0]).all():  # as it is for most batches: nothing is copied
            return checksums(words[:, : int(sizes[0]) // 4])
        for size in np.unique(sizes).tolist():
            some = self.sizes == size if which is None else which & (self.sizes == size)
            found[some] = checksums(words[some, : size // 4])
        return found

    def _are_whole(self) -> NDArray[np.bool_]:
        header, sizes = self.header, self.sizes
        whole: NDArray[np.bool_] = (
            (sizes >= HEADER_BYTES) & (header["magic"] == MAGIC) & (header["flags"] >> 4 == VERSION)
        )
        whole &= header["count"] <= MOST_VALUES // VALUES_STEP
        whole &= sizes == HEADER_BYTES + 4 * VALUES_STEP * header["count"].astype(np.int64)
        whole &= sizes <= self.rows.shape[1]  # not cut short by the row
        return whole

    def are_ours(self, job: int, *, from_workers: bool) -> NDArray[np.bool_]:
        """[B] which are whole packets of this protocol, of this job, and in this direction."""
        header = self.header
        if from_workers:
            known = np.isin(header["kind"], [int(kind) for kind in FROM_WORKERS])
        else:
            known = (header["kind"] >= 1) & (header["kind"] <= 15)
        ours: NDArray[np.bool_] = self._are_whole() & known & (header["job"] == job)
        return ours

    def are_all(self, kind: PacketKind, job: int) -> bool:
        """Whether all are whole packets of one kind, of this job, without looking at each by itself."""
        wanted = MAGIC | VERSION << 20 | kind << 24 | job << 32
        beginning = self.rows[:, : _BEGINNING.itemsize].view(_BEGINNING)[:, 0]
        if ((beginning & _WHAT) != wanted).any():
            return False
        sizes = self.sizes
        is_whole = sizes == HEADER_BYTES + 4 * VALUES_STEP * self.header["count"].astype(np.int64)
        return bool(is_whole.all()) and int(sizes.max(initial=0)) <= self.rows.shape[1]

    def datagrams(self) -> list[bytes]:
        """Each packet by itself."""
        return [row[:size].tobytes() for row, size in zip(self.rows, self.sizes, strict=True)]

    def packet(self, row: int) -> Packet:
        """Read one packet, which is whole and not damaged; raises `PeerError` if it is no packet."""
        return unpacked(self.rows[row, : self.sizes[row]].tobytes())

    @classmethod
    def of(cls, packets: Sequence[Packet | bytes], values: int) -> PacketBatch:
        """Put packets, or datagrams as they came, into rows; what is too long for one keeps its size and is cut."""
        batch = cls(len(packets), values)
        is_made = np.zeros(len(packets), np.bool_)
        for row, packet in enumerate(packets):
            is_made[row] = isinstance(packet, Packet)
            data = packet if isinstance(packet, bytes) else packed(packet)
            batch.sizes[row] = len(data)
            room = min(len(data), batch.rows.shape[1])
            batch.rows[row, :room] = np.frombuffer(data, np.uint8, room)
        batch.header["checksum"][is_made] = batch._checksums(is_made)[is_made]
        return batch


def join_packet(job: int, worker: int, cookie: int) -> PacketBatch:
    """The packet, as a batch, by which a switch learns where a worker's packets come from."""
    return PacketBatch.of([Packet(PacketKind.JOIN, job, worker, cookie=cookie)], 0)
