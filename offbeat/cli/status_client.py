"""Links to a job that only look: to its server, or where it has none to the hub in rank 0's sentinel.

An onlooker never gets in the way: it takes part in nothing, so the server ends with the last worker and not with it;
and it asks for one look at a time, so that however slow it is, or however long it was stopped, no answers pile up at
the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.job_address import dial, find, find_hub, has_server
from offbeat.diagnosis.hub_client import enter
from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.protocol.messages import pack, status_reply_of
from offbeat.protocol.status import GetStatus
from offbeat.report.hub_status import model_status_of
from offbeat.report.records import has_ended
from offbeat.wire.loop_thread import LoopThread
from offbeat.wire.message_stream import MessageStream
from offbeat.wire.messages import AskAll, Bye, HandshakeClaim, Overview

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from offbeat.cli.job_address import JobAddress
    from offbeat.protocol.status import ModelStatus
    from offbeat.wire.link import PeerLink

_GOOD_BYE_S = 0.5
_DIAL = timedelta(seconds=3)
_SHORT = timedelta(seconds=0.3)  # for a server that may be none of this job
_LEAST_DIAL_S = 0.1
_TRY_S = 2.0  # whether there is a server again
_MAX_OVERVIEW_BYTES = 64 << 20


class JobEnded(Exception):
    """The server, or the hub, has said good-bye."""


class StatusClient:
    """A client that asks a job's server for its status; use it from one thread.

    Args:
        target: where the job is.
        patience: for how long to dial it; None for 3 s.
        has_options: whether the command has options for credentials, so that an error names them.

    Raises:
        NetworkError: if nobody can be reached there.
        PeerError: if it is another job, or there are other credentials.
    """

    _what = "server"  # that is looked at

    def __init__(self, target: JobAddress, patience: timedelta | None = None, *, has_options: bool = True) -> None:
        self._target, self._patience, self._has_options = target, patience, has_options
        self._loop = LoopThread("offbeat-top")
        try:
            self._line = self._loop.run(self._dial())
        except BaseException:
            self._loop.close()
            raise

    def look(self, patience_s: float) -> tuple[ModelStatus, ...] | None:
        """Ask for the status; None if there was no answer in time, which the next call then waits for.

        Raises:
            JobEnded: if it has.
            OffbeatError: if the server is lost, or understands no looks.
        """
        return self._loop.run(self._look(patience_s))

    def rest(self, seconds: float) -> None:
        """Let time pass, but no more if there is nothing to be seen any more."""
        if seconds > 0:
            self._loop.run(self._line.rest(seconds))

    def close(self) -> None:
        """Leave."""
        with contextlib.suppress(NetworkError):  # closed before
            self._loop.run(self._leave())
        self._loop.close()

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the event loop ---------------------------------------------------------------------------------------

    async def _look(self, patience_s: float) -> tuple[ModelStatus, ...] | None:
        try:
            return await self._line.look(patience_s)
        except OffbeatError as error:
            if not self._line.answers:
                raise type(error)(f"{error}{self._hint(error)}") from error
        # A process that was stopped for a while, as by Ctrl-Z, has been given up by the server: come again.
        try:
            self._line = await self._dial()
        except NetworkError as error:
            raise NetworkError(
                f"Lost the {self._what} at {self._target.address}, and nobody answers there any more: it was killed, "
                "or cannot be reached from here."
            ) from error
        return await self._line.look(patience_s)

    def _hint(self, error: OffbeatError) -> str:
        return " Give the address of the job's first shard." if isinstance(error, PeerError) else ""

    async def _dial(self) -> _StatusReceiver:
        line = _ServerLine()
        try:
            line.link = await dial(self._target, lambda link: line, "onlooker", patience=self._patience)
        except PeerError as error:
            raise PeerError(f"{error} {self._way_in()}") from error
        return line

    def _way_in(self) -> str:
        folder, job = self._target.folder, self._target.job
        if folder:
            return f"It is not the one that {folder}/server.json tells of, which has probably ended."
        token, name = ("--token-file or ", "--job-name or ") if self._has_options else ("", "")
        return (
            f"Give the token that its workers have ({token}OFFBEAT_TOKEN), and its name ({name}OFFBEAT_JOB; now it is "
            f"{job!r})."
        )

    async def _leave(self) -> None:
        await self._line.close()


class HubOnlooker(StatusClient):
    """A client that asks the hub in rank 0's sentinel for the status of a job without a server; use it from one thread.

    Args:
        target: where the hub is; only its address and its token are used.
        patience: for how long to dial it; None for 3 s.

    Raises:
        NetworkError: if nobody can be reached there.
        PeerError: if it is another job's.
    """

    _what = "hub of the workers"

    def _hint(self, error: OffbeatError) -> str:
        return ""

    async def _dial(self) -> _StatusReceiver:
        address, target = self._target.address, self._target
        host, _, port = address.rpartition(":")
        patience_s = (_DIAL if self._patience is None else self._patience).total_seconds()
        try:
            async with asyncio.timeout(max(_LEAST_DIAL_S, patience_s)):
                stream = MessageStream(*await asyncio.open_connection(host, int(port)), max_bytes=_MAX_OVERVIEW_BYTES)
                try:
                    await enter(stream, bytes.fromhex(target.token), HandshakeClaim(rank=0, role="onlooker"))
                except BaseException:
                    await stream.end(_GOOD_BYE_S)
                    raise
        except PeerError as error:
            raise PeerError(f"Cannot look at the job at {address}: {error}. {target.way_out}".rstrip()) from error
        except (OSError, ValueError, OverflowError) as error:  # the last two: it is no address, or no token
            raise NetworkError(
                f"Cannot reach the {self._what} at {address}: {str(error) or 'no answer'}. {target.way_out}".rstrip()
            ) from error
        return _HubLine(stream)


class _StatusReceiver(ABC):
    """One connection, and what was seen over it."""

    def __init__(self) -> None:
        self.answers = 0
        self._number = 0
        self._asked = False
        self._model_statuses: tuple[ModelStatus, ...] | None = None
        self._end: Exception | None = None
        self._told = asyncio.Event()  # something has come, or nothing will
        self._over = asyncio.Event()

    @abstractmethod
    def ask(self, number: int) -> None:
        """Ask for a look."""

    @abstractmethod
    async def close(self) -> None:
        """Leave."""

    async def look(self, patience_s: float) -> tuple[ModelStatus, ...] | None:
        """The status of all models; None if they did not come in time."""
        if not self._asked and self._end is None:
            self._asked, self._number, self._model_statuses = True, self._number + 1, None
            self._told.clear()
            self.ask(self._number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), patience_s)
        if self._end is not None:
            raise self._end
        if self._model_statuses is not None:
            self._asked = False
        return self._model_statuses

    async def rest(self, seconds: float) -> None:
        """Wait for so long, or until the link has ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def seen(self, number: int, model_statuses: tuple[ModelStatus, ...]) -> None:
        """The answer to the question of that number."""
        if number == self._number:
            self.answers += 1
            self._model_statuses = model_statuses
            self._told.set()

    def ended(self, error: OffbeatError | None) -> None:
        """The connection is gone for good; `error` is None after a good-bye."""
        self._end = self._end or (JobEnded() if error is None else error)
        self._told.set()
        self._over.set()


class _ServerLine(_StatusReceiver):
    """A link to a server."""

    def __init__(self) -> None:
        super().__init__()
        self.link: PeerLink
        self._body = bytearray()

    def ask(self, number: int) -> None:
        self.link.send(pack(GetStatus(number)))

    async def close(self) -> None:
        # Without a good-bye the server would keep the link until it times out, and a job that ends wait for it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.link.close(), _GOOD_BYE_S)
        self.link.abort()

    # -- called by the link --------------------------------------------------------------------------------------

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """The buffer for the status of all models."""
        self._body = bytearray(size_bytes)  # at most what `Limits` allow
        return memoryview(self._body)

    def received(self, metadata: bytes, body: memoryview) -> None:
        """An answer is here."""
        self.seen(*status_reply_of(metadata, body))

    def lost(self, error: OffbeatError | None) -> None:
        """The link is gone for good."""
        self.ended(error)


class _HubLine(_StatusReceiver):
    """A connection to a hub."""

    def __init__(self, stream: MessageStream) -> None:
        super().__init__()
        self._stream = stream
        self._hearing = asyncio.create_task(self._hear())

    def ask(self, number: int) -> None:
        self._stream.send(AskAll(number))

    async def close(self) -> None:
        self._hearing.cancel()
        await self._stream.end(_GOOD_BYE_S)

    async def _hear(self) -> None:
        try:
            while (message := await self._stream.recv()) is not None:
                if isinstance(message, Bye):
                    self.ended(None)
                    return
                if not isinstance(message, Overview):
                    raise PeerError(f"The hub sent {type(message).__name__}, which is not for an onlooker.")
                self.seen(message.number, (model_status_of(message),))
            self.ended(NetworkError("The connection to the hub of the workers broke."))
        except PeerError as error:
            self.ended(error)
        finally:
            self._stream.close()


class JobOnlooker:
    """A client that asks a job wherever it is: at its server, or where it has none at its hub; use it from one thread.

    A job may go over from one to the other while it is looked at. At an address there is a server.

    Args:
        where: its run folder, or host:port of the first shard of its server.
        given: what the command line says of it; outranks what its folder says.

    Raises:
        NetworkError: if nobody can be reached there.
        PeerError: if it is another job, or there are other credentials.
    """

    def __init__(self, where: str, given: Mapping[str, str]) -> None:
        self._where, self._given = where, given
        self._hub = find_hub(where)
        self._tried_s = time.monotonic()
        try:
            self._now = self._at_hub() if self._hub is not None and not has_server(where) else self._at_server()
        except NetworkError:
            if self._hub is None or not has_server(where):
                raise
            self._now = self._at_hub()  # the server is another run's, or it was killed

    def look(self, patience_s: float) -> tuple[ModelStatus, ...] | None:
        """Ask as `StatusClient.look` does."""
        self._go_to_server()
        try:
            return self._now.look(patience_s)
        except (JobEnded, NetworkError) as end:
            if self._hub is None or isinstance(self._now, HubOnlooker):
                raise JobEnded if self._has_ended else end from end
            self._go_to(self._at_hub, end)
        return self._now.look(patience_s)

    def rest(self, seconds: float) -> None:
        """Wait as `StatusClient.rest` does."""
        self._now.rest(seconds)

    def close(self) -> None:
        """Leave."""
        self._now.close()

    def __enter__(self) -> JobOnlooker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _has_ended(self) -> bool:
        return self._hub is not None and has_ended(Path(self._hub.folder) / "metrics.jsonl")

    def _go_to_server(self) -> None:
        """Go over to a server if there is one again."""
        if not isinstance(self._now, HubOnlooker) or time.monotonic() - self._tried_s < _TRY_S:
            return
        self._tried_s = time.monotonic()
        if has_server(self._where):
            with contextlib.suppress(OffbeatError):
                self._go_to(lambda: self._at_server(_SHORT))

    def _go_to(self, where: Callable[[], StatusClient], end: Exception | None = None) -> None:
        """Look at it there from now on; `end` is why it cannot be looked at where it was."""
        try:
            there = where()
        except OffbeatError:
            if end is not None:
                raise end from end.__cause__
            raise
        self._now.close()
        self._now = there

    def _at_server(self, patience: timedelta | None = None) -> StatusClient:
        return StatusClient(find(self._where, self._given), patience)

    def _at_hub(self) -> StatusClient:
        assert self._hub is not None
        return HubOnlooker(self._hub)
