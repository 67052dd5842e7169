"""A directory over authenticated links: stores dial it, and say by which address others reach them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from offbeat.errors import OffbeatError, PeerError
from offbeat.objects.directory import Directory
from offbeat.objects.directory_list import why_no_member
from offbeat.protocol.objects import ReduceObjects, StoreHello, StoreWelcome, from_store_of, pack
from offbeat.wire import tcp

if TYPE_CHECKING:
    from offbeat.objects.reduce_plan import LinkEstimate
    from offbeat.objects.stripe_sum import Instructions
    from offbeat.protocol.objects import FromStore
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink
    from offbeat.wire.listener import Listener
    from offbeat.wire.session import Limits

_log = logging.getLogger("offbeat.objects")
_REPORTS_S = 1.0
"""For so long a directory that takes the place of a lost one collects what stores have; they dial every 0.1 s."""


class DirectoryServer:
    """A directory and the links of its stores; on one event loop.

    Args:
        link: what is known of the links between stores.
        waits_for_stopped: whether a silent store is waited for as long as its machine says that its process is there.
    """

    def __init__(self, link: LinkEstimate, *, waits_for_stopped: bool = False) -> None:
        self._waits_for_stopped = waits_for_stopped
        self.directory = Directory(link, first_attempt=time.time_ns())
        self._stores: dict[str, StoreLink] = {}
        self._seen: set[str] = set()  # the addresses of all stores that were ever here
        self._reports: list[tuple[str, FromStore]] | None = None  # as long as they are collected
        self._is_rebuilt = False
        self._listener: Listener | None = None

    async def open(self, bind: str, port: int, *, job: str, credentials: Credentials | None, limits: Limits) -> str:
        """Listen for stores; returns the address that they are to be told.

        Raises:
            NetworkError: as `tcp.listen`.
        """
        self._listener = await tcp.listen(
            bind, port, accept=self._accept, job=job, credentials=credentials, limits=limits
        )
        return self._listener.address

    @property
    def stores(self) -> int:
        """Return the number of stores that are connected."""
        return 0 if self._listener is None else len(self._listener.links)

    async def close(self) -> None:
        """Say good-bye to all stores."""
        if self._listener is not None:
            links = self._listener.links
            self._listener.close()
            await asyncio.gather(*(link.close() for link in links))

    def abort(self) -> None:
        """End all links at once, as when the process is killed."""
        if self._listener is not None:
            links = self._listener.links
            self._listener.close()
            for link in links:
                link.abort()

    def _accept(self, link: PeerLink) -> StoreLink:
        if link.role != "peer":
            raise PeerError(f"this is the directory of objects, and takes no {link.role}: connect to a store")
        return StoreLink(self, link)

    def take(self, hello: StoreHello, link: StoreLink) -> None:
        """A store says who it is, and whether it has known a directory here before.

        The first one that has, and that this directory does not know, shows that it takes the place of a lost one: it
        waits for the others, too, for `_REPORTS_S`. A store that returns later, or was cut off from this directory,
        puts again what it has, which is compared with what is known then.

        Raises:
            PeerError: if it has other directories than those that are here.
        """
        address, again = hello.address, hello.again
        other = next((one.hello for store, one in self._stores.items() if store != address), None)
        if other is not None and (why := why_no_member(hello, other)):
            raise PeerError(why)
        if (known := self._stores.get(address)) is not None:  # it has lost that link, and this end has not noticed yet
            self.lost(address, known, None)
            known.link.abort()
        self._stores[address], link.hello = link, hello
        link.link.send(pack(StoreWelcome()))
        if self._waits_for_stopped:
            link.link.probe_at(address)
        if again and address not in self._seen and not self._is_rebuilt:
            _log.info("Collecting what stores have: the directory before this one is lost.")
            self._is_rebuilt, self._reports = True, []
            asyncio.get_running_loop().call_later(_REPORTS_S, self._rebuild)
        self._seen.add(address)

    def handle(self, address: str, message: FromStore) -> None:
        """A store has said something."""
        if self._reports is not None:
            self._reports.append((address, message))
        else:
            self._tell(self.directory.handle(address, message))
            self._mind_patience(message)

    def lost(self, address: str, link: StoreLink, error: OffbeatError | None) -> None:
        """The link with a store has ended."""
        if self._stores.get(address) is not link:  # it has another one already
            return
        del self._stores[address]
        if error is not None:
            _log.warning("The store at %s is lost: %s", address, error)
        if self._reports is not None:
            self._reports = [report for report in self._reports if report[0] != address]
        self._tell(self.directory.lost(address))

    def _rebuild(self) -> None:
        reports, self._reports = self._reports or [], None
        self._tell(self.directory.rebuild(reports))
        for _, message in reports:
            self._mind_patience(message)

    def _mind_patience(self, message: FromStore) -> None:
        if isinstance(message, ReduceObjects) and message.patience_s is not None:
            asyncio.get_running_loop().call_later(
                message.patience_s, lambda: self._tell(self.directory.expire(message.name))
            )

    def _tell(self, told: Instructions) -> None:
        for address, message in told:
            store = self._stores.get(address)
            if store is not None and store.link.is_open:  # else it is about to be lost, and reports when it returns
                store.link.send(pack(message))


class StoreLink:
    """The link with one store; a `Receiver`."""

    def __init__(self, server: DirectoryServer, link: PeerLink) -> None:
        self._server, self.link = server, link
        self.hello: StoreHello | None = None

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse bodies: objects travel between stores."""
        raise PeerError("Cannot take in a body from a store: objects travel between stores.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Take in a message."""
        message = from_store_of(metadata)
        if isinstance(message, StoreHello):
            if self.hello is not None:
                raise PeerError(f"Cannot be known as {message.address}: this store is {self.hello.address} already.")
            self._server.take(message, self)
        elif self.hello is None:
            raise PeerError("Cannot listen to a store before it has said its address.")
        else:
            self._server.handle(self.hello.address, message)

    def lost(self, error: OffbeatError | None) -> None:
        """The link has ended."""
        if self.hello is not None:
            self._server.lost(self.hello.address, self, error)
