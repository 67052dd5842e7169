"""Who takes in frames in the tests, and remembers them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from offbeat.wire import handshake
from offbeat.wire.frame import Reader
from offbeat.wire.messages import HandshakeClaim, HandshakeRefused, Hello, Welcome, unpack
from offbeat.wire.messages import pack as packed
from offbeat.wire.session import Limits
from offbeat.wire.tcp import connect, listen

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    from offbeat.errors import OffbeatError
    from offbeat.wire.link import PeerLink
    from offbeat.wire.listener import Listener

JOB = "test"
SOON = Limits(timeout=timedelta(seconds=2))


class Taker:
    """A `Receiver` that copies what it gets, and sees to it that its callbacks come in the promised order."""

    def __init__(self, link: PeerLink | None = None) -> None:
        self.link = link
        self.frames: list[tuple[bytes, bytes]] = []
        self.asked: list[bytes] = []
        self.losses: list[OffbeatError | None] = []
        self.refuses: OffbeatError | None = None
        self._place: tuple[bytes, memoryview] | None = None

    def begin(self, link: PeerLink) -> Taker:
        self.link = link
        return self

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        assert self._place is None, "the frame before has to be received first"
        assert not self.losses
        if self.refuses is not None:
            raise self.refuses
        self.asked.append(metadata)
        self._place = metadata, memoryview(bytearray(size_bytes))
        return self._place[1]

    def received(self, metadata: bytes, body: memoryview) -> None:
        assert not self.losses
        if len(body):
            assert self._place is not None
            assert self._place[0] == metadata
            assert body.obj is self._place[1].obj, "it lies where it was to lie"
            self._place = None
        self.frames.append((metadata, bytes(body)))

    def lost(self, error: OffbeatError | None) -> None:
        assert not self.losses, "it is told once"
        self.losses.append(error)


class Server:
    """A listener whose links are taken in by `Taker`s."""

    def __init__(self) -> None:
        self.takers: list[Taker] = []
        self.listener: Listener

    def accept(self, link: PeerLink) -> Taker:
        self.takers.append(Taker(link))
        return self.takers[-1]

    @property
    def address(self) -> str:
        return self.listener.address

    @property
    def one(self) -> Taker:
        (taker,) = self.takers
        return taker


@contextlib.asynccontextmanager
async def serving(bind: str = "127.0.0.1", **options: Any) -> AsyncIterator[Server]:
    server = Server()
    server.listener = await listen(bind, 0, accept=server.accept, **{"job": JOB, "limits": SOON, **options})
    try:
        yield server
    finally:
        for link in server.listener.links:
            link.abort()
        server.listener.close()


async def dial(address: str, taker: Taker | None = None, **options: Any) -> PeerLink:
    taker = taker or Taker()
    return await connect(address, accept=taker.begin, **{"job": JOB, "rank": 1, "limits": SOON, **options})


class ByHand:
    """Who knows how to come in, and then says what no link would.

    Args:
        claim: who it says it is.
        token: that it says it knows.
    """

    def __init__(self, claim: HandshakeClaim, token: bytes = b"") -> None:
        self.claim, self._token = claim, token
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def enter(self, address: str, context: ssl.SSLContext | None = None) -> Welcome | HandshakeRefused | None:
        """Come in, or come back; what the last word of the handshake was, None if there was none."""
        host, _, port = address.rpartition(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port), ssl=context)
        hello = await self._hear()
        assert isinstance(hello, Hello)
        self.writer.write(packed(handshake.join(self._token, hello, self.claim)))
        answer = await self._hear()
        assert answer is None or isinstance(answer, (Welcome, HandshakeRefused))
        return answer

    async def _hear(self) -> Any:
        frames = Reader(max_metadata_bytes=10_000)
        while True:
            with contextlib.suppress(ConnectionError):
                if data := await asyncio.wait_for(self.reader.read(1000), 5):
                    if heard := frames.feed(data):
                        return unpack(heard[0])
                    continue
            return None

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def hang_up(self, *, reset: bool = False) -> None:
        """End the connection, as the kernel does for a process that is killed."""
        if reset:  # it had not read all
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def until(condition: Callable[[], object], otherwise: str, within_s: float = 10.0) -> float:
    """Wait; returns for how long."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not condition():
        assert loop.time() - began_s < within_s, otherwise
        await asyncio.sleep(0.002)
    return loop.time() - began_s


def play(story: Callable[[], Awaitable[None]]) -> None:
    """Run a test's story; what a callback raised is raised here."""
    raised: list[BaseException] = []

    async def told() -> None:
        def remember(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            raised.append(context.get("exception") or AssertionError(context["message"]))

        asyncio.get_running_loop().set_exception_handler(remember)
        await story()
        for _ in range(3):  # what was closed last is gone when the loop is
            await asyncio.sleep(0)

    asyncio.run(told())
    if raised:
        raise raised[0]
