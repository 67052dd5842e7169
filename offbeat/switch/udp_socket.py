"""A UDP socket that receives and sends whole batches of datagrams, one system call each (`recvmmsg`, `sendmmsg`).

Python's own socket takes one datagram at a time, which costs more than all else that is done with it. Here the kernel
reads and writes the rows of a `PacketBatch` in place: its headers are arrays of pointers that are laid out once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

import numpy as np

from offbeat.errors import NetworkError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from offbeat.switch.packet_batch import PacketBatch

_libc = ctypes.CDLL(None, use_errno=True)
_IOVEC = np.dtype([("base", "u8"), ("size", "u8")])
_MESSAGE = np.dtype(
    [
        ("name", "u8"), ("name_size", "u4"), ("_0", "u4"), ("iovec", "u8"), ("iovecs", "u8"), ("control", "u8"),
        ("control_size", "u8"), ("flags", "i4"), ("_1", "u4"), ("received", "u4"), ("_2", "u4"),
    ]
)  # fmt: skip
_ADDRESS = np.dtype([("family", "u2"), ("port", ">u2"), ("host", ">u4"), ("_", "u8")])  # struct sockaddr_in
_AT_ONCE = 256  # datagrams of one call; the kernel takes up to 1,024
BUFFER_BYTES = 8 << 20  # that a socket asks for, in each direction; net.core.rmem_max and wmem_max may allow less
_SO_NO_CHECK = 11
# Errors of datagrams that were sent before: nobody listens there, or a network on the way takes no such long ones.
_OF_OTHERS = (errno.ECONNREFUSED, errno.EMSGSIZE, errno.EHOSTUNREACH, errno.ENETUNREACH)
# Errors of a datagram itself at a socket without a peer: there is no way to where it goes, and the next goes elsewhere.
_OF_ITSELF = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EINVAL)


class _Messages:
    """The arguments of a system call for many datagrams: where their rows lie, their sizes, and their addresses."""

    def __init__(self) -> None:
        messages, iovecs = np.zeros(_AT_ONCE, _MESSAGE), np.zeros(_AT_ONCE, _IOVEC)
        self._steps = np.arange(_AT_ONCE, dtype=np.uint64)
        self.addresses = np.zeros(_AT_ONCE, _ADDRESS)
        messages["iovec"] = iovecs.ctypes.data + self._steps * np.uint64(_IOVEC.itemsize)
        messages["iovecs"] = 1
        messages["name"] = self.addresses.ctypes.data + self._steps * np.uint64(_ADDRESS.itemsize)
        self.start = messages.ctypes.data
        self.name, self.name_size, self.received = messages["name"], messages["name_size"], messages["received"]
        self._base, self.size = iovecs["base"], iovecs["size"]
        self._rows = (0, 0)  # where those lie that `_base` points to in their order, and how far apart

    def lay_out(self, batch: PacketBatch, which: NDArray[np.int64] | None = None) -> None:
        """Point to the rows of a batch; None for all of them, in order."""
        rows = (batch.rows.ctypes.data, batch.rows.strides[0])
        if which is not None:
            self._base[: len(which)] = rows[0] + which.astype(np.uint64) * np.uint64(rows[1])
            rows = (0, 0)
        elif self._rows != rows:
            self._base[:] = rows[0] + self._steps * np.uint64(rows[1])
        self._rows = rows


class UdpSocket:
    """A UDP socket over IPv4 that never blocks.

    Args:
        host, port: to bind to; port 0 for one of the kernel's choice.

    Raises:
        NetworkError: if it cannot be bound.
    """

    def __init__(self, host: str = "0.0.0.0", port: int = 0) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # A switch in the kernel changes packets, and does not compute their checksums anew. One that was left to a
        # device to finish, as virtual ones do, would be finished wrongly by the next.
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        try:
            self._sock.bind((host, port))
        except OSError as error:
            self._sock.close()
            raise NetworkError(f"Cannot open UDP port {port} on {host}: {error.strerror}. Choose another.") from error
        self._in, self._out = _Messages(), _Messages()
        self._peer: NDArray[np.uint64] | None = None  # once it is connected: the same for each datagram
        self.dropped = 0  # datagrams that the kernel had no room for when they were sent

    def connect(self, host: str, port: int) -> int:
        """Take datagrams of this peer alone from now on: the kernel drops all others. Returns its address.

        Raises:
            NetworkError: if it has no IPv4 address, or there is no way to it.
        """
        try:
            self._sock.connect((host, port))
        except OSError as error:
            raise NetworkError(f"Cannot send datagrams to {host}:{port}: {error.strerror}.") from error
        self._in.name[:] = self._out.name[:] = 0
        peer = address_of(*self._sock.getpeername())
        self._peer = np.full(_AT_ONCE, peer, np.uint64)
        return peer

    @property
    def port(self) -> int:
        """The port that it is bound to."""
        return int(self._sock.getsockname()[1])

    def fileno(self) -> int:
        """The file descriptor, for whoever waits until something is here."""
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def recv(self, batch: PacketBatch) -> tuple[PacketBatch, NDArray[np.uint64]]:
        """Receive what is here, as far as there is room in `batch`; empty if nothing is.

        Returns:
            The first rows of `batch`, and where each came from (see `address_of`). A datagram that is longer than a
            row has a size above it.
        """
        most = min(len(batch), _AT_ONCE)
        messages = self._in
        messages.lay_out(batch)
        messages.size[:most] = batch.rows.shape[1]
        if self._peer is None:
            messages.name_size[:most] = _ADDRESS.itemsize
        flags = socket.MSG_DONTWAIT | socket.MSG_TRUNC
        count = _libc.recvmmsg(self._sock.fileno(), ctypes.c_void_p(messages.start), most, flags, None)
        if count < 0:
            # Errors of datagrams that were sent come back here: nobody listens there any more, or not yet.
            if (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, *_OF_OTHERS):
                raise NetworkError(f"Cannot receive datagrams: {os.strerror(code)}.")
            count = 0
        batch = batch.first(count)
        batch.sizes[:] = messages.received[:count]
        if self._peer is not None:
            return batch, self._peer[:count]
        found = messages.addresses[:count]
        return batch, found["host"].astype(np.uint64) << np.uint64(16) | found["port"].astype(np.uint64)

    def send(self, batch: PacketBatch, to: NDArray[np.uint64], rows: NDArray[np.int64] | None = None) -> None:
        """Send datagrams; what the kernel has no room for is dropped, as on a network.

        Args:
            to: [K] where each goes, see `address_of`; to the peer, whatever it says, if there is one.
            rows: [K] which packet of the batch goes there; None for each one once, in order.
        """
        messages = self._out
        if self._peer is not None and rows is None and len(batch) <= _AT_ONCE:
            messages.lay_out(batch)
            messages.size[: len(batch)] = batch.sizes
            self._send_some(len(batch))
            return
        rows = np.arange(len(batch)) if rows is None else rows
        for start in range(0, len(rows), _AT_ONCE):
            some, where = rows[start : start + _AT_ONCE], to[start : start + _AT_ONCE]
            count = len(some)
            messages.lay_out(batch, some)
            messages.size[:count] = batch.sizes[some]
            if self._peer is None:
                messages.addresses["family"][:count] = socket.AF_INET
                messages.addresses["port"][:count] = where & np.uint64(0xFFFF)
                messages.addresses["host"][:count] = where >> np.uint64(16)
                messages.name_size[:count] = _ADDRESS.itemsize
            self._send_some(count)

    def _send_some(self, count: int) -> None:
        sent = 0
        while sent < count:
            at = self._out.start + sent * _MESSAGE.itemsize
            done = _libc.sendmmsg(self._sock.fileno(), ctypes.c_void_p(at), count - sent, socket.MSG_DONTWAIT)
            if done > 0:
                sent += done
                continue
            code = ctypes.get_errno()
            # Without a peer, what becomes of others is not told: it is this one's own. With one, its size may be.
            if code == errno.EMSGSIZE or (self._peer is None and code in _OF_ITSELF):
                sent, self.dropped = sent + 1, self.dropped + 1
                continue
            if code == errno.ECONNREFUSED:  # of one that was sent before: it is told once
                continue
            if code not in (errno.EAGAIN, errno.EINTR, errno.ENOBUFS, *_OF_OTHERS):
                raise NetworkError(f"Cannot send datagrams: {os.strerror(code)}.")
            self.dropped += count - sent
            return


def address_of(host: str, port: int) -> int:
    """A host and a port as one number.

    >>> hex(address_of("10.0.0.1", 8000))
    '0xa0000011f40'
    """
    number: int = struct.unpack(">I", socket.inet_aton(host))[0]
    return number << 16 | port
