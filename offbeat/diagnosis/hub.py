"""The hub collects the last words of all workers; it lives in rank 0's sentinel, so it outlives rank 0's death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import NetworkError, PeerError
from offbeat.wire import handshake
from offbeat.wire.credentials import Token, require_credentials
from offbeat.wire.message_stream import MessageStream
from offbeat.wire.messages import (
    AskAll,
    AskRoster,
    Bye,
    ClusterReport,
    HandshakeClaim,
    Join,
    Overview,
    ReportWords,
    Show,
    WorkerReport,
)
from offbeat.wire.rate_limited_log import RateLimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.protocol.worker_status import TrainingStatus

_log = logging.getLogger("offbeat.diagnosis")

# A peer reports every second; after this long without a word it is unreachable.
SILENCE_S = 3.0
_MAX_PEER_BYTES = 64 << 10
_MAX_STRANGER_BYTES = 512
_STRANGER_S = 5.0
_MAX_STRANGERS = 64
_MAX_ONLOOKERS = 16
_STACK_S = 0.6
_LINGER_S = 3.0
_FINAL = frozenset({"raised", "lost", "finished"})


class Hub:
    """The latest words of each rank.

    Args:
        token: shared secret of the run.
        world: number of workers that the run begins with.
        grows: more may come, of higher ranks.
    """

    def __init__(self, *, token: bytes, world: int, grows: bool = False) -> None:
        self._token, self._world, self._grows = token, world, grows
        self.on_show: Callable[[], None] | None = None  # called when the stack of its own worker, rank 0, is wanted
        self._words: dict[int, tuple[WorkerReport, float]] = {}
        self._stacks: dict[int, tuple[str, float]] = {}
        self._statuses: dict[int, TrainingStatus] = {}
        self._began_s = time.monotonic()
        self._shown_s: dict[int, float] = {}
        self._links: dict[int, MessageStream] = {}
        self._onlookers: set[MessageStream] = set()
        self._strangers = 0
        self._refusals = RateLimitedLog()
        self._server: asyncio.Server | None = None
        self._news = asyncio.Event()

    async def serve(self, bind: str) -> str:
        """Listen on `bind`, at a port of the kernel's choice; returns "address:port".

        Raises:
            NetworkError: if the address is not loopback and there is no token, or it cannot be bound.
        """
        require_credentials("the control connection", bind, Token(self._token) if self._token else None)
        try:
            self._server = await asyncio.start_server(self._welcome, bind, 0, family=socket.AF_INET)
        except OSError as error:
            raise NetworkError(f"Cannot open the control connection on {bind}: {error}.") from error
        address, port = self._server.sockets[0].getsockname()[:2]
        return f"{address}:{port}"

    def report(self, words: WorkerReport, status: TrainingStatus | None = None) -> None:
        """Take in what a sentinel says about its worker."""
        now_s = time.monotonic()
        if status is not None:
            self._statuses[words.rank] = status
        if words.stack:
            self._stacks[words.rank] = (words.stack, now_s)
            words = msgspec.structs.replace(words, stack="")
        self._words[words.rank] = (words, now_s)
        self._news.set()

    async def ask_all(self, stacks: tuple[int, ...] = ()) -> tuple[WorkerReport, ...]:
        """The latest words of all ranks, in order of rank.

        Args:
            stacks: ranks that are asked first where their threads are.
        """
        wanted = [rank for rank in stacks if self._ask_for_stack(rank)]
        await self._wait_for_stacks(wanted)
        words = self._latest_of_all()
        for rank in wanted:
            words[rank] = msgspec.structs.replace(words[rank], stack=self._stack(rank) or "")
        return tuple(words.values())

    def overview(self, number: int) -> Overview:
        """Summarize all workers, as the answer to a question of that number."""
        words = tuple(self._latest_of_all().values())
        return Overview(number, words, self._statuses, self._world, time.monotonic() - self._began_s)

    def leave(self, rank: int) -> None:
        """The worker is done, and all is well."""
        words = self._words.get(rank)
        if words is not None:
            self._words[rank] = (msgspec.structs.replace(words[0], phase="finished"), words[1])

    def farewell(self, rank: int) -> None:
        """Tell everyone how the hub's own worker `rank` ended: soon there will be nobody left to ask."""
        words = self._latest(rank, time.monotonic())
        for link in self._links.values():
            link.send(ClusterReport(0, (words,)))

    @property
    def peers(self) -> int:
        """Sentinels connected now."""
        return len(self._links)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.close()
        for onlooker in list(self._onlookers):
            onlooker.send(Bye())
            onlooker.close()

    def _latest_of_all(self) -> dict[int, WorkerReport]:
        now_s = time.monotonic()
        return {rank: self._latest(rank, now_s) for rank in sorted({*range(self._world), *self._words})}

    def _latest(self, rank: int, now_s: float) -> WorkerReport:
        if rank not in self._words:
            return WorkerReport(rank=rank, process="unreachable", phase="starting")
        words, heard_s = self._words[rank]
        age_s = now_s - heard_s
        silent = age_s > SILENCE_S and words.process != "dead" and words.phase not in _FINAL
        if silent:
            words = msgspec.structs.replace(words, process="unreachable", state_since_s=age_s)
        status = self._statuses.get(rank)
        return msgspec.structs.replace(words, age_s=age_s, residual=0.0 if status is None else status.residual)

    def _ask_for_stack(self, rank: int) -> bool:
        """Have the stack of `rank` shown; once for all who ask at the same time, as all who wait for it do."""
        if rank not in self._links and (rank != 0 or self.on_show is None):
            return False
        now_s = time.monotonic()
        if now_s - self._shown_s.get(rank, -_STACK_S) >= _STACK_S:
            self._shown_s[rank] = now_s
            if rank in self._links:
                self._links[rank].send(Show())
            elif self.on_show is not None:
                self.on_show()
        return True

    def _stack(self, rank: int) -> str | None:
        """The stack that `rank` sent when it was last asked; None if it has not yet."""
        stack, heard_s = self._stacks.get(rank, ("", 0.0))
        return stack if heard_s >= self._shown_s[rank] else None

    async def _wait_for_stacks(self, ranks: list[int]) -> None:
        # A paused machine does not answer; what is known is good enough then.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACK_S):
                while any(self._stack(rank) is None for rank in ranks):
                    self._news.clear()
                    await self._news.wait()

    # -- connections ---------------------------------------------------------------------------------------------

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = MessageStream(reader, writer, max_bytes=_MAX_STRANGER_BYTES)
        if self._strangers >= _MAX_STRANGERS:
            writer.transport.abort()
            return
        self._strangers += 1
        try:
            async with asyncio.timeout(_STRANGER_S):
                claim = await self._authenticate(stream)
        except (PeerError, TimeoutError) as error:
            self._refusals.log(f"{stream.peer} on the control connection: {str(error) or 'it took too long'}")
            stream.close()
            return
        except asyncio.CancelledError:  # the hub closes
            writer.transport.abort()
            return
        finally:
            self._strangers -= 1
        stream.trust(_MAX_PEER_BYTES)
        if claim.role == "onlooker":
            await self._be_looked_at(stream)
            return
        rank = claim.rank
        if rank in self._links:  # it came back before we noticed that it had been away
            self._links[rank].close()
        self._links[rank] = stream
        try:
            await self._converse(stream, rank)
        except PeerError as error:
            _log.warning("Closed the control connection of rank %d (%s): %s", rank, stream.peer, error)
        finally:
            if self._links.get(rank) is stream:
                del self._links[rank]
            stream.close()

    async def _be_looked_at(self, stream: MessageStream) -> None:
        """Answer somebody who only looks: the workers' sentinels do not notice."""
        if len(self._onlookers) >= _MAX_ONLOOKERS:
            self._refusals.log(
                f"{stream.peer} on the control connection: {_MAX_ONLOOKERS} onlookers are connected already"
            )
            stream.close()
            return
        self._onlookers.add(stream)
        try:
            while (message := await stream.recv()) is not None:
                if not isinstance(message, AskAll):
                    raise PeerError(f"it sent {type(message).__name__}, which is not for an onlooker to send")
                stream.send(self.overview(message.number))
        except PeerError as error:
            _log.warning("Closed the control connection of an onlooker (%s): %s", stream.peer, error)
        finally:
            self._onlookers.discard(stream)
            stream.close()

    async def _authenticate(self, stream: MessageStream) -> HandshakeClaim:
        hello = handshake.hello()
        stream.send(hello)
        join = await stream.recv()
        if not isinstance(join, Join):
            raise PeerError("it did not prove that it knows the token")
        handshake.check(self._token, hello, join)
        if join.claim.role not in ("worker", "onlooker"):
            raise PeerError(f"it says it is a {join.claim.role}, which is not served here")
        if join.claim.role == "worker" and join.claim.rank >= self._world and not self._grows:
            raise PeerError(f"it says it is rank {join.claim.rank} of {self._world}")
        stream.send(handshake.welcome(self._token, hello, join))
        return join.claim

    async def _converse(self, stream: MessageStream, rank: int) -> None:
        answers: set[asyncio.Task[None]] = set()
        while (message := await stream.recv()) is not None:
            if isinstance(message, ReportWords):
                if message.words.rank != rank:
                    raise PeerError(f"it speaks for rank {message.words.rank}")
                self.report(message.words, message.status)
            elif isinstance(message, AskRoster):
                if len(answers) > 8:
                    raise PeerError("it asks faster than it can be answered")
                answer = asyncio.create_task(self._answer(stream, message))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
            elif isinstance(message, Bye):
                self.leave(rank)
                return
            else:
                raise PeerError(f"it sent {type(message).__name__}, which is not for a peer to send")

    async def _answer(self, stream: MessageStream, ask: AskRoster) -> None:
        stream.send(ClusterReport(ask.number, await self.ask_all(ask.stacks)))


class LocalHubClient:
    """The hub client of the sentinel that the hub lives in.

    Args:
        rank: of its worker.
        stays_without_worker: the hub stays when that is lost, since the others may go on.
    """

    def __init__(self, hub: Hub, rank: int, *, stays_without_worker: bool = False) -> None:
        self._hub, self._rank, self._stays_without_worker = hub, rank, stays_without_worker
        self.report = hub.report
        self.ask = hub.ask_all

    def last_heard(self) -> tuple[tuple[WorkerReport, ...], float]:
        """No last words: the hub is here, and cannot be lost."""
        return (), 0.0

    async def leave(self, *, well: bool) -> None:
        """Stay until the others have gone as well, or have had time to ask what happened."""
        if well:
            self._hub.leave(self._rank)
        if not self._stays_without_worker:
            self._hub.farewell(self._rank)
        deadline_s = time.monotonic() + _LINGER_S
        while self._hub.peers and (self._stays_without_worker or time.monotonic() < deadline_s):
            await asyncio.sleep(0.05)
        self._hub.close()
