"""A connected socket that never blocks, plain or with TLS.

Why not asyncio's transports: they copy what the kernel does not take at once, and their TLS passes every byte through
two more buffers. Here the kernel, or OpenSSL, reads from and writes to the owner's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import weakref
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A record of TLS carries 16 KiB; a longer write only means that more has to be offered again when the kernel is full.
_TLS_WRITE_BYTES = 256 << 10
# Below this, head and body are better put together: each write of TLS is a record of its own.
_TLS_JOIN_BYTES = 8 << 10


class Stream(Protocol):
    """Bytes in both directions. Its methods raise OSError when the connection is broken."""

    sock: socket.socket
    short_is_all: bool
    """Whether there is nothing more now when less was received than asked for."""

    def receive(self, buffer: memoryview) -> int | None:
        """Receive into `buffer`; how many bytes, 0 at the end, None if there is nothing now."""

    def send(self, pieces: Sequence[bytes | memoryview]) -> int | None:
        """Send the beginning of `pieces`; how many bytes, None if nothing can be taken now.

        After None the same pieces have to be offered again.
        """

    def pending(self) -> bool:
        """Whether something has been received that the event loop cannot know of."""

    def expect(self, size_bytes: int) -> None:
        """Have the event loop told only when so much is there, if that can be."""


class PlainStream:
    """TCP.

    Args:
        sock: connected, non-blocking.
    """

    short_is_all = True

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._expected_bytes = 1

    def receive(self, buffer: memoryview) -> int | None:
        try:
            return self.sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    def send(self, pieces: Sequence[bytes | memoryview]) -> int | None:
        try:
            return self.sock.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return None

    def pending(self) -> bool:
        return False

    def expect(self, size_bytes: int) -> None:
        # The kernel would wake the event loop for every few packets; in the middle of a body each time only costs. It
        # does so all the same when the other side closes, when an error has come, or when its buffer is full.
        if size_bytes != self._expected_bytes:
            self._expected_bytes = size_bytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)


class TlsStream:
    """TLS over TCP.

    Args:
        sock: with its handshake done, non-blocking.
    """

    short_is_all = False  # one record at a time

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock: socket.socket = sock
        self._tls = sock
        self._offered: memoryview | None = None

    def receive(self, buffer: memoryview) -> int | None:
        try:
            return self._tls.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0

    def send(self, pieces: Sequence[bytes | memoryview]) -> int | None:
        if self._offered is None:  # else OpenSSL wants to see again what it could not finish
            self._offered = _first(pieces)
        try:
            size = self._tls.send(self._offered)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        self._offered = None
        return size

    def pending(self) -> bool:
        return self._tls.pending() > 0

    def expect(self, size_bytes: int) -> None:
        """Ignore it: how many bytes of TLS that will be is not known."""


def _first(pieces: Sequence[bytes | memoryview]) -> memoryview:
    """The part of `pieces` that is sent in one go."""
    first = pieces[0]
    if len(first) >= _TLS_JOIN_BYTES:
        return memoryview(first)[:_TLS_WRITE_BYTES]
    joined, room = [first], _TLS_JOIN_BYTES - len(first)
    for piece in pieces[1:]:
        joined.append(piece[:room])
        room -= len(joined[-1])
        if not room:
            break
    return memoryview(b"".join(joined))


def limit_unsent(sock: socket.socket, size_bytes: int) -> None:
    """Have the kernel take no more than so much that it cannot send yet."""
    with contextlib.suppress(OSError):  # it is closed, which its owner will notice
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)


_open_here = weakref.WeakSet[socket.socket]()


def keep_from_children(sock: socket.socket) -> None:
    """Have a socket closed in each child that is forked from now on.

    A child that outlives this process would hold the connection, and the kernel would not tell the other side of the
    end.
    """
    _close_in_children()
    _open_here.add(sock)


@functools.cache
def _close_in_children() -> None:
    def close_all() -> None:
        for sock in list(_open_here):
            sock.close()

    os.register_at_fork(after_in_child=close_all)


def prepare(sock: socket.socket) -> None:
    """Set a TCP socket up."""
    keep_from_children(sock)
    sock.setblocking(False)
    # No TCP_USER_TIMEOUT: it would also end the connection with a peer that does not read for a while, and silence is
    # noticed anyway.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def open_stream(
    sock: socket.socket, context: ssl.SSLContext | None, *, server: bool, host: str | None = None
) -> Stream:
    """The stream over a connected socket, after the handshake of TLS if there is a `context`.

    Args:
        sock: non-blocking; closed if this fails.
        host: that was dialled, to be found in the other side's certificate.

    Raises:
        PeerError: if the other side's certificate is not accepted, or it speaks no TLS.
        OSError: if the connection broke.
    """
    if context is None:
        return PlainStream(sock)
    tls = context.wrap_socket(sock, server_side=server, server_hostname=host, do_handshake_on_connect=False)
    keep_from_children(tls)
    try:
        while True:
            try:
                tls.do_handshake()
                return TlsStream(tls)
            except ssl.SSLWantReadError:
                await readable(tls)
            except ssl.SSLWantWriteError:
                await writable(tls)
    except ssl.SSLCertVerificationError as error:
        tls.close()
        raise PeerError(f"its certificate is not accepted: {error.verify_message.rstrip('.')}") from error
    except ssl.SSLError as error:
        tls.close()
        if server and isinstance(error, ssl.SSLEOFError):
            raise ConnectionResetError("it hung up") from error
        raise PeerError(f"its certificate is not accepted, or it speaks no TLS: {error.reason or error}") from error
    except BaseException:
        tls.close()
        raise


async def readable(sock: socket.socket) -> None:
    """Wait until something can be received."""
    loop = asyncio.get_running_loop()
    await _wait(sock, loop.add_reader, loop.remove_reader)


async def writable(sock: socket.socket) -> None:
    """Wait until something can be sent."""
    loop = asyncio.get_running_loop()
    await _wait(sock, loop.add_writer, loop.remove_writer)


async def _wait(sock: socket.socket, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    number = sock.fileno()
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(number, wake)
    try:
        await ready
    finally:
        remove(number)


def close(sock: socket.socket) -> None:
    """Close for good, also where a forked child holds a copy; again does nothing."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
