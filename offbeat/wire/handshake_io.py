"""Single messages over a stream, before it is a link's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.wire.frame import Reader
from offbeat.wire.messages import Message, pack, unpack
from offbeat.wire.stream import readable, writable

if TYPE_CHECKING:
    from offbeat.wire.stream import Stream

# The longest message of a handshake that is taken: a claim, with nonce and proof, has about 200 bytes, a reason more.
STRANGER_BYTES = 1024


async def say(stream: Stream, message: Message) -> None:
    """Send `message`.

    Raises:
        OSError: if the connection broke.
    """
    rest = memoryview(pack(message))
    while rest:
        size = stream.send([rest])
        if size is None:
            await writable(stream.sock)
        else:
            rest = rest[size:]


async def hear(stream: Stream, max_bytes: int) -> Message:
    """The next message, and not one byte of what follows: that is the link's.

    Raises:
        OSError: if the connection broke.
        PeerError: if it is none, or longer than `max_bytes`.
    """
    reader = Reader(max_metadata_bytes=max_bytes, scratch_bytes=0)
    while (frame := reader.next_frame()) is None:
        size = stream.receive(reader.get_buffer())
        if size is None:
            await readable(stream.sock)
        elif size == 0:
            raise ConnectionResetError("it hung up")
        else:
            reader.buffer_updated(size)
    return unpack(frame)
