"""Messages over an asyncio stream."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket

from offbeat.wire.frame import Reader
from offbeat.wire.interfaces import shown_address
from offbeat.wire.messages import Message, pack, unpack

_READ_BYTES = 1 << 16
# A peer that does not read may not make us keep more than this for it.
_MAX_UNSENT_BYTES = 1 << 20
# Without this the kernel tries for a quarter of an hour to reach a machine that has gone, and after a partition waits
# the longer the longer that took.
_UNHEARD_MS = 4000


class MessageStream:
    """One connection.

    Args:
        max_bytes: the longest message that is taken from the peer.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, max_bytes: int) -> None:
        self._reader, self._writer = reader, writer
        sock = writer.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
        self._frames = Reader(max_metadata_bytes=max_bytes)
        self._heard: collections.deque[Message] = collections.deque()

    def trust(self, max_bytes: int) -> None:
        """Accept messages of up to `max_bytes` from now on; between two messages only."""
        self._frames = Reader(max_metadata_bytes=max_bytes)

    def send(self, message: Message) -> None:
        """Send; never blocks. A peer that does not read is cut off."""
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._writer.transport.abort()
        elif not self._writer.is_closing():
            self._writer.write(pack(message))

    async def recv(self) -> Message | None:
        """The next message; None when the peer has gone.

        Raises:
            PeerError: if the peer broke the protocol.
        """
        while not self._heard:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._heard.extend(unpack(frame) for frame in self._frames.feed(data))
        return self._heard.popleft()

    @property
    def peer(self) -> str:
        """The other end's address, for logs."""
        name = self._writer.get_extra_info("peername")
        return shown_address(name) if isinstance(name, tuple) else str(name)  # a Unix socket's end has no port

    async def flush(self, timeout_s: float) -> None:
        """Wait until what was said is on its way, or give up."""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), timeout_s)

    def close(self) -> None:
        self._writer.close()

    async def end(self, timeout_s: float) -> None:
        """Close, and wait until that is done, or give up."""
        self.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)
