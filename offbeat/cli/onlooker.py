"""A link to a job that only looks.

An onlooker never gets in the way: it takes part in nothing, so the server ends with the last worker and not with it;
and it asks for one look at a time, so that however slow it is, or however long it was stopped, no answers pile up at
the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from offbeat.cli.target import dial
from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.report.sight import look, sight_of
from offbeat.wire.loop import Loop

if TYPE_CHECKING:
    from datetime import timedelta

    from offbeat.cli.target import Target
    from offbeat.report.sight import Scene
    from offbeat.wire.link import Link

_GOOD_BYE_S = 0.5


class JobEnded(Exception):
    """The server has said good-bye."""


class Onlooker:
    """Looks at a job; use it from one thread.

    Args:
        target: where the job is.
        patience: for how long to dial it; None for 3 s.

    Raises:
        NetworkError: if nobody can be reached there.
        PeerError: if it is another job, or there are other credentials.
    """

    def __init__(self, target: Target, patience: timedelta | None = None) -> None:
        self._target, self._patience = target, patience
        self._loop = Loop("offbeat-top")
        try:
            self._line = self._loop.run(self._dial())
        except BaseException:
            self._loop.close()
            raise

    def look(self, patience_s: float) -> tuple[Scene, ...] | None:
        """How it goes; None if there was no answer in time, which the next call then waits for.

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

    def __enter__(self) -> Onlooker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the event loop ---------------------------------------------------------------------------------------

    async def _look(self, patience_s: float) -> tuple[Scene, ...] | None:
        try:
            return await self._line.look(patience_s)
        except OffbeatError as error:
            if not self._line.answers:
                hint = " Give the address of the job's first shard." if isinstance(error, PeerError) else ""
                raise type(error)(f"{error}{hint}") from error
        # A process that was stopped for a while, as by Ctrl-Z, has been given up by the server: come again.
        try:
            self._line = await self._dial()
        except NetworkError as error:
            raise NetworkError(
                f"Lost the server at {self._target.address}, and nobody answers there any more: it was killed, or "
                "cannot be reached from here."
            ) from error
        return await self._line.look(patience_s)

    async def _dial(self) -> _Line:
        line = _Line()
        try:
            line.link = await dial(self._target, lambda link: line, "onlooker", patience=self._patience)
        except PeerError as error:
            raise PeerError(f"{error} {self._way_in()}") from error
        return line

    def _way_in(self) -> str:
        folder, job = self._target.folder, self._target.job
        if folder:
            return f"It is not the one that {folder}/server.json tells of, which has probably ended."
        return (
            "Give the token that its workers have (--token-file or OFFBEAT_TOKEN), and its name (--job-name or "
            f"OFFBEAT_JOB; now it is {job!r})."
        )

    async def _leave(self) -> None:
        # Without a good-bye the server would keep the link until it times out, and a job that ends wait for it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._line.link.close(), _GOOD_BYE_S)
        self._line.link.abort()


class _Line:
    """One link, and what it hands frames to."""

    def __init__(self) -> None:
        self.link: Link
        self.answers = 0
        self._number = 0
        self._asked = False
        self._scenes: tuple[Scene, ...] | None = None
        self._end: Exception | None = None
        self._told = asyncio.Event()  # something has come, or nothing will
        self._over = asyncio.Event()
        self._body = bytearray()

    async def look(self, patience_s: float) -> tuple[Scene, ...] | None:
        """The scenes; None if they did not come in time."""
        if not self._asked and self._end is None:
            self._asked, self._number, self._scenes = True, self._number + 1, None
            self._told.clear()
            self.link.send(look(self._number))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), patience_s)
        if self._end is not None:
            raise self._end
        if self._scenes is not None:
            self._asked = False
        return self._scenes

    async def rest(self, seconds: float) -> None:
        """Wait for so long, or until the link has ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    # -- called by the link --------------------------------------------------------------------------------------

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Where many scenes go."""
        self._body = bytearray(size_bytes)  # at most what `Limits` allow
        return memoryview(self._body)

    def received(self, metadata: bytes, body: memoryview) -> None:
        """An answer is here."""
        sight = sight_of(metadata, body)
        if sight.number == self._number:
            self.answers += 1
            self._scenes = sight.scenes
            self._told.set()

    def lost(self, error: OffbeatError | None) -> None:
        """The link is gone for good."""
        self._end = JobEnded() if error is None else error
        self._told.set()
        self._over.set()
