"""Questions and their answers over a link, metadata only.

    answering side    listen(..., accept=lambda link: Answerer(link, answer))
    asking side       asker = Asker()
                      await connect(..., accept=asker.begin)
                      reply = await asker.ask(question)

The link delivers each question and each answer exactly once while its session lives, so a question is answered once
although a connection broke under it, or under its answer. Questions carry a number, so one that is no longer waited for
does no harm.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, OffbeatError, PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.wire.link import PeerLink

_NUMBER = struct.Struct("!Q")


class RpcClient:
    """The asking side of one link; a `Receiver`."""

    def __init__(self) -> None:
        self._link: PeerLink | None = None
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._error: OffbeatError | None = None

    def begin(self, link: PeerLink) -> RpcClient:
        """Ask over `link`."""
        self._link = link
        link.ended.add_done_callback(lambda _: self.lost(self._error))
        return self

    async def ask(self, question: bytes) -> bytes:
        """The answer.

        Raises:
            OffbeatError: if the link is lost, or one side closes it, before it is there.
        """
        if self._link is None:
            raise NetworkError("Cannot ask before there is a link: connect first.")
        if self._error is not None:
            raise self._error
        self._number += 1
        number = self._number
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._link.send(_NUMBER.pack(number) + question)
            return await answer
        finally:
            del self._waiting[number]

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        raise PeerError("an answer has no body")

    def received(self, metadata: bytes, body: memoryview) -> None:
        number, answer = _split(metadata)
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def lost(self, error: OffbeatError | None) -> None:
        self._error = error or NetworkError("Cannot ask: the link has ended.")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._error)


class RpcServer:
    """Answers over one link; a `Receiver`.

    Args:
        answer: from question to answer, at once; a `PeerError` ends the session.
    """

    def __init__(self, link: PeerLink, answer: Callable[[bytes], bytes]) -> None:
        self._link, self._answer = link, answer

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        raise PeerError("a question has no body")

    def received(self, metadata: bytes, body: memoryview) -> None:
        number, question = _split(metadata)
        self._link.send(_NUMBER.pack(number) + self._answer(question))

    def lost(self, error: OffbeatError | None) -> None:
        """Ignore it: nothing waits here."""


def _split(metadata: bytes) -> tuple[int, bytes]:
    if len(metadata) < _NUMBER.size:
        raise PeerError("a question or an answer has a number")
    (number,) = _NUMBER.unpack_from(metadata)
    return number, metadata[_NUMBER.size :]
