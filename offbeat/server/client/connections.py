"""A worker's way to the shards, and back to them after they were lost; lives on the event loop.

When one link is lost, all are let go, and all shards dialled again: which of them still knows this worker, and in which
life, is asked anew. Each time counts as another entry to the job; what comes over a link of an earlier one is void.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from offbeat.backoff import Backoff
from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.protocol.messages import pack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from offbeat.protocol.messages import FromWorker
    from offbeat.wire.link import PeerLink
    from offbeat.wire.session import Receiver

    Dial = Callable[[Callable[[PeerLink], Receiver], timedelta], Awaitable[PeerLink]]

_log = logging.getLogger("offbeat")
_RETURNS = 3  # in a row, without a single exchange in between; then there is something else that is wrong
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5  # between two ways back
_ALIVE_S = 1.0  # how long to dial at a time while it is not known whether anybody is there
_QUIET = 0.4  # part of the timeout; a shard that is well says something twice as often


class ConnectionOwner(Protocol):
    """The owner of connections to shards.

    1) `accept` for each link, in order of shards; 2) `arrived` when all are there again; `stranded` when they are
    lost; 3) `fail` when they will never be.
    """

    def accept(self, link: PeerLink) -> Receiver:
        """Take a link into use; returns what it hands frames to."""

    def arrived(self) -> None:
        """Handle that there are links to all shards again."""

    def stranded(self, error: OffbeatError) -> None:
        """Handle that there is no link any more."""

    def fail(self, error: OffbeatError) -> None:
        """Handle that there will be no link again."""


class ShardConnections:
    """The connections to all shards of a job.

    Args:
        owner: who uses it.
        rank: for logs.
        dials: how to reach each shard; if empty, a shard that is lost is lost for good.
        patience: for how long to dial a server that is gone; 0 gives up at once.

    Attributes:
        links: to the shards, in order; empty while they are lost.
        entry: how often the worker has come to the job.
        is_up: whether there are links to all shards.
        survives: whether the server will be started again if it is killed.
    """

    def __init__(self, owner: ConnectionOwner, *, rank: int, dials: Sequence[Dial], patience: timedelta) -> None:
        self._owner, self._rank = owner, rank
        self._dials, self._patience = dials, patience
        self.links: list[PeerLink] = []
        self.entry = 0
        self.is_up = not dials
        self.survives = False
        self._returns = 0
        self._loss = ""
        self._lost_s = 0.0
        self._now_s: Callable[[], float] = lambda: 0.0  # the event loop's
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, seed=str(rank))
        self._coming: asyncio.Task[None] | None = None
        self._is_closed = False

    async def connect(self, patience: timedelta) -> None:
        """Dial all shards for the first time.

        Raises:
            NetworkError: if one cannot be reached in time.
            PeerError: if one refused.
        """
        for dial in self._dials:
            await dial(self._owner.accept, patience)
        self.is_up = True

    def say(self, message: FromWorker) -> None:
        """Send a message to the coordinator; if its link is just being lost, it is said again when it is back."""
        if self.links[0].is_open:
            self.links[0].send(pack(message))

    def trouble(self) -> str:
        """Say what is wrong with the server, in sentences; "" if nothing is known to be. It may be called on any
        thread.
        """
        if self.is_up:
            return " ".join(filter(None, map(_trouble_with, tuple(self.links))))
        if not self._loss:
            return ""
        again = "it does not return" if self._is_closed else "it is being dialled again"
        return f"The parameter server was lost {self._now_s() - self._lost_s:.1f} s ago, and {again}. {self._loss}"

    def progressed(self) -> None:
        """Note that something was exchanged, so it is worth while to come back once more."""
        self._returns = 0
        self._backoff.reset()

    def close(self) -> None:
        """Do not come back any more."""
        self._is_closed = True
        if self._coming is not None:
            self._coming.cancel()

    def abort(self) -> None:
        """Let go of all links."""
        self.close()
        self._drop_links()

    def lose(self, error: OffbeatError, entry: int) -> None:
        """A link of that entry is lost, or its shard has gone on without this worker: come back."""
        if entry != self.entry or self._is_closed:
            return
        self._drop_links()
        self._returns += 1
        if self.is_up:
            self._now_s = asyncio.get_running_loop().time
            self._loss, self._lost_s = str(error), self._now_s()
        self.is_up = False
        self._owner.stranded(error)
        if not self._dials or self._patience <= timedelta(0) or self._returns > _RETURNS:
            self._is_closed = True
            self._owner.fail(error)
            return
        _log.warning("Rank %d has lost the parameter server (%s) It tries to reconnect.", self._rank, error)
        if self._coming is None or self._coming.done():
            self._coming = asyncio.get_running_loop().create_task(self._come_back(error))

    async def _come_back(self, error: OffbeatError) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._patience.total_seconds()
        refusals = 0
        while not self._is_closed:
            await asyncio.sleep(self._backoff.next_s())
            left_s = deadline_s - loop.time()
            try:
                if await self._dial_all(timedelta(seconds=max(0.01, min(left_s, _ALIVE_S)))):
                    break
            except OffbeatError as reason:
                self._drop_links()
                refusals += isinstance(reason, PeerError)
                if not self._is_worth_while(reason) or left_s <= 0 or refusals == _RETURNS:
                    self._is_closed = True
                    self._owner.fail(
                        NetworkError(
                            f"Cannot reconnect to the job ({error}): {_sentence(reason)} Either it has "
                            "ended, or its parameter server was killed and nobody has started it again."
                        )
                    )
                    return
        if not self._is_closed:
            self.is_up = True
            self._owner.arrived()

    async def _dial_all(self, patience: timedelta) -> bool:
        """Whether all shards were reached, and none was lost meanwhile."""
        entry = self.entry
        for dial in self._dials:
            await dial(self._owner.accept, patience)
            if entry != self.entry:
                return False
        return True

    def _is_worth_while(self, reason: OffbeatError) -> bool:
        """Whether to dial again: not if nobody listens any more, and nobody will."""
        return self.survives or not isinstance(reason.__cause__, ConnectionRefusedError)

    def _drop_links(self) -> None:
        self.entry += 1
        for link in self.links:
            link.abort()
        self.links.clear()


def _trouble_with(link: PeerLink) -> str:
    """Say what is wrong with a shard, as a sentence; "" if it has been heard lately."""
    silent = f"The parameter server at {link.peer} has been silent for {link.silent_s:.1f} s"
    if not link.connected:
        return f"{silent}: the connection was lost ({link.trouble}), and is being dialled again."
    if link.silent_s > _QUIET * link.limits.timeout.total_seconds():
        return f"{silent} (stopped, or machine or link down?)."
    return ""


def _sentence(error: Exception) -> str:
    text = str(error)
    return text if text.endswith((".", "?", "!")) else f"{text}."
