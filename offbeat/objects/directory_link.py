"""A store's link with the directory of some names, and its way back after one of the two was away.

A directory that is lost is dialled until it is there again, at the same address. Meanwhile what passes between stores
continues. Then the store reports what it has, does and waits for, so nothing else has to be kept until then but the
objects to be deleted.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import NetworkError, ObjectError, OffbeatError, PeerError
from offbeat.objects.deletions import Deletions
from offbeat.protocol import objects as say
from offbeat.wire import tcp
from offbeat.wire.session import Limits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.protocol.objects import FromDirectory, FromStore
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink

DIRECTORY_LIMITS = Limits(timeout=timedelta(seconds=5))
"""The limits of links with directories: a store without a processor for some seconds still has its objects."""
_TRY = timedelta(seconds=1)
_PAUSE_S = 0.1


class DirectoryUser(Protocol):
    """The Protocol of the store that has a `DirectoryLink`."""

    address: str

    def hear(self, message: FromDirectory) -> None:
        """Do what the directory says."""

    async def prepare_reports(self, link: DirectoryLink) -> None:
        """Do what takes long before the next `reports`."""

    def reports(self, link: DirectoryLink) -> Iterable[FromStore]:
        """Describe everything here to a directory that knows nothing."""

    def directory_lost(self, link: DirectoryLink, error: OffbeatError | None) -> None:
        """The link has ended, and is dialled again."""

    def directory_away(self, link: DirectoryLink, error: ObjectError) -> None:
        """The directory has been lost for too long for those who wait."""


class DirectoryLink:
    """The link with one directory; a `Receiver`.

    Args:
        store: whose it is.
        directories, number: the addresses of all, and which of them this one is.
        job, credentials: what both prove.
        patience: for how long those who wait do without it.
        waits_for_stopped: whether its silence is no end of the link while its machine says that its process is there.

    Attributes:
        deletions: that it has not answered.
    """

    def __init__(
        self,
        store: DirectoryUser,
        directories: tuple[str, ...],
        number: int,
        *,
        job: str,
        credentials: Credentials | None,
        patience: timedelta,
        waits_for_stopped: bool = False,
    ) -> None:
        self._waits_for_stopped = waits_for_stopped
        self._store, self._patience = store, patience
        self._directories, self._number, self.address = directories, number, directories[number]
        self._welcome: asyncio.Future[None] | None = None
        self._job, self._credentials = job, credentials
        self._link: PeerLink | None = None
        self._returning: asyncio.Task[None] | None = None
        self.deletions = Deletions()
        self._lost_s = 0.0
        self._is_over = False

    @property
    def away_s(self) -> float:
        """Return for how many seconds it has been lost; 0 if it is there."""
        return asyncio.get_running_loop().time() - self._lost_s if self._link is None else 0.0

    async def open(self, patience: timedelta) -> None:
        """Reach it for the first time, and say by which address this store is known.

        Raises:
            NetworkError: if it cannot be reached.
            PeerError: if it refuses.
        """
        self._link = await self._join(patience, again=False)

    def send(self, message: FromStore) -> None:
        """Say something. The next reports repeat messages that are lost on the way."""
        if self._link is not None:
            self._link.send(say.pack(message))

    def delete(self, message: say.DeleteObject, generations: tuple[int, ...]) -> None:
        """Have an object deleted, of which the store has these generations, or nothing."""
        sent = self.deletions.add(message, generations)
        if self._link is not None:
            self._link.send(say.pack(message), sent=sent)

    async def close(self) -> None:
        """Say good-bye."""
        link = self._end()
        if link is not None:
            await link.close()

    def abort(self) -> None:
        """End it at once, as when the process is killed."""
        link = self._end()
        if link is not None:
            link.abort()

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse bodies: a directory sends none."""
        raise PeerError("Cannot take in a body from a directory.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Do what the directory says."""
        message = say.from_directory_of(metadata)
        if not isinstance(message, say.StoreWelcome):
            self._store.hear(message)
        elif self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)

    def lost(self, error: OffbeatError | None) -> None:
        """The link has ended."""
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error or NetworkError(f"The directory at {self.address} has hung up."))
        elif self._link is not None:
            self._link, self._lost_s = None, asyncio.get_running_loop().time()
            self._store.directory_lost(self, error)
            self._returning = asyncio.create_task(self._return())

    def _end(self) -> PeerLink | None:
        self._is_over = True
        if self._returning is not None:
            self._returning.cancel()
        link, self._link = self._link, None
        return link

    async def _return(self) -> None:
        """Dial until it is there again, and report."""
        while not self._is_over:
            await self._store.prepare_reports(self)
            try:
                link = await self._join(_TRY, again=True)
                if not link.is_open:
                    raise NetworkError(f"The directory at {self.address} has hung up.")
            except OffbeatError as error:
                if self.away_s > self._patience.total_seconds():
                    why = f"the directory at {self.address} has been lost for {self.away_s:.0f} s. {error}"
                    self._store.directory_away(self, ObjectError(why))
                    self.deletions.directory_away(ObjectError(why))
                await asyncio.sleep(_PAUSE_S)
                continue
            self._link = link
            for message in self._store.reports(self):
                self.send(message)
            for deletion in self.deletions.again():
                self.delete(deletion, deletion.generations)
            return

    async def _join(self, patience: timedelta, *, again: bool) -> PeerLink:
        """Dial, and wait until the directory knows this store."""
        link = await self._dial(patience)
        self._welcome = asyncio.get_running_loop().create_future()
        hello = say.StoreHello(self._store.address, self._directories, self._number, again)
        link.send(say.pack(hello))
        try:
            await asyncio.wait_for(self._welcome, DIRECTORY_LIMITS.timeout.total_seconds())
        except TimeoutError:
            link.abort()
            raise NetworkError(f"The directory at {self.address} does not answer.") from None
        except BaseException:
            link.abort()
            raise
        return link

    async def _dial(self, patience: timedelta) -> PeerLink:
        link = await tcp.connect(
            self.address,
            accept=lambda _: self,
            job=self._job,
            rank=0,
            credentials=self._credentials,
            limits=DIRECTORY_LIMITS,
            patience=patience,
            role="peer",
        )
        if self._waits_for_stopped:
            link.probe_at(self.address)
        return link
