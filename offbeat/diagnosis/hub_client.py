"""A sentinel's connection to the hub; kept up as long as the sentinel lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import NetworkError, PeerError
from offbeat.wire import handshake
from offbeat.wire.message_stream import MessageStream
from offbeat.wire.messages import (
    AskRoster,
    Bye,
    ClusterReport,
    HandshakeClaim,
    Hello,
    ReportWords,
    Show,
    Welcome,
    WorkerReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.worker_status import TrainingStatus

_log = logging.getLogger("offbeat.diagnosis")
# A report on the largest world.
_MAX_HUB_BYTES = 64 << 20
_CONNECT_S = 3.0
_RETRY_S = 1.0
_LEAVE_S = 1.0


class HubClient:
    """The client of a hub in another process.

    Args:
        hub: "address:port".
        token: shared secret of the run.
        rank: the worker's.
    """

    def __init__(self, hub: str, *, token: bytes, rank: int) -> None:
        self._hub, self._token, self._rank = hub, token, rank
        self.on_show: Callable[[], None] = lambda: None  # called when the hub wants this worker's stack
        self._stream: MessageStream | None = None
        self._tried = asyncio.Event()  # the first attempt to connect has ended, one way or the other
        self._answers: dict[int, asyncio.Future[ClusterReport]] = {}
        self._number = 0
        self._latest: WorkerReport | None = None
        self._status: TrainingStatus | None = None
        self._farewell: tuple[WorkerReport, float] | None = None
        self.lost_since_s: float | None = time.monotonic()
        self._unanswered_since_s: float | None = None

    async def run(self) -> None:
        """Connect, and again whenever the connection is lost."""
        while True:
            try:
                await self._converse()
            except PeerError as error:
                _log.warning("The control connection to %s failed: %s", self._hub, error)
            except (OSError, TimeoutError):
                pass  # the hub's machine is not there, or not yet
            self._lose()
            self._tried.set()
            await asyncio.sleep(_RETRY_S)

    def report(self, words: WorkerReport, status: TrainingStatus | None = None) -> None:
        """Say something about the worker; forgotten if the hub is out of reach, but for the latest."""
        self._latest = words
        self._status = status or self._status
        if self._stream is not None:
            self._stream.send(ReportWords(words, status))

    async def ask(self, stacks: tuple[int, ...]) -> tuple[WorkerReport, ...]:
        """The latest words of all ranks.

        Raises:
            NetworkError: if the hub is out of reach.
        """
        if self._stream is None:
            raise NetworkError("the hub is out of reach")
        if self._unanswered_since_s is None:
            self._unanswered_since_s = time.monotonic()
        self._number += 1
        number = self._number
        answer: asyncio.Future[ClusterReport] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._stream.send(AskRoster(number, stacks))
        try:
            return (await answer).words
        finally:
            self._answers.pop(number, None)

    def last_heard(self) -> tuple[tuple[WorkerReport, ...], float]:
        """The end of the hub's own worker, if it was heard, and for how many seconds the hub has been lost."""
        now_s = time.monotonic()
        since_s = self._unanswered_since_s if self.lost_since_s is None else self.lost_since_s
        words: tuple[WorkerReport, ...] = ()
        if self._farewell is not None:
            words = (msgspec.structs.replace(self._farewell[0], age_s=now_s - self._farewell[1]),)
        return words, 0.0 if since_s is None else now_s - since_s

    async def leave(self, *, well: bool) -> None:
        """Send what is left, and say good-bye if the worker is done."""
        # A worker may be done before its sentinel has reached the hub; nobody would know how it ended.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), _LEAVE_S)
        stream = self._stream  # may be lost while it is flushed
        if stream is not None:
            if well:
                stream.send(Bye())
            await stream.flush(_LEAVE_S)
            stream.close()

    async def _converse(self) -> None:
        address, _, port = self._hub.rpartition(":")
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(address, int(port))
            stream = MessageStream(reader, writer, max_bytes=_MAX_HUB_BYTES)
            try:
                await enter(stream, self._token, HandshakeClaim(rank=self._rank))
            except BaseException:
                stream.close()
                raise
        self._stream, self.lost_since_s = stream, None
        if self._latest is not None:
            stream.send(ReportWords(self._latest, self._status))
        self._tried.set()
        try:
            while (message := await stream.recv()) is not None:
                if isinstance(message, ClusterReport) and message.number == 0:
                    self._farewell = next(((w, time.monotonic()) for w in message.words), None)
                elif isinstance(message, ClusterReport):
                    self._unanswered_since_s = None
                    answer = self._answers.get(message.number)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                elif isinstance(message, Show):
                    self.on_show()
                else:
                    raise PeerError(f"the hub sent {type(message).__name__}")
        finally:
            stream.close()

    def _lose(self) -> None:
        self._stream = None
        if self.lost_since_s is None:
            self.lost_since_s = time.monotonic()
        for answer in self._answers.values():
            with contextlib.suppress(asyncio.InvalidStateError):
                answer.set_exception(NetworkError("the hub is out of reach"))


async def enter(stream: MessageStream, token: bytes, claim: HandshakeClaim) -> None:
    """Come in at a hub.

    Raises:
        PeerError: if it is none, or it or this one does not know the token.
    """
    hello = await stream.recv()
    if not isinstance(hello, Hello):
        raise PeerError("it is no hub")
    join = handshake.join(token, hello, claim)
    stream.send(join)
    welcome = await stream.recv()
    if not isinstance(welcome, Welcome):
        raise PeerError("it did not prove that it knows the token")
    handshake.check_welcome(token, hello, join, welcome)
