"""A directory over authenticated links: stores dial it, and say by which address others reach them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from offbeat.errors import OffbeatError, PeerError
from offbeat.objects.directory import Directory
from offbeat.protocol.objects import ReduceObjects, StoreHello, from_store_of, pack
from offbeat.wire import tcp

if TYPE_CHECKING:
    from offbeat.objects.reduce_plan import LinkEstimate
    from offbeat.objects.stripe_sum import Instructions
    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink
    from offbeat.wire.listener import Listener
    from offbeat.wire.session import Limits

_log = logging.getLogger("offbeat.objects")


class DirectoryServer:
    """A directory and the links of its stores; on one event loop.

    Args:
        link: what is known of the links between stores.
    """

    def __init__(self, link: LinkEstimate) -> None:
        self.directory = Directory(link)
        self._stores: dict[str, StoreLink] = {}
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

    async def close(self) -> None:
        """Say good-bye to all stores."""
        if self._listener is not None:
            links = self._listener.links
            self._listener.close()
            await asyncio.gather(*(link.close() for link in links))

    def _accept(self, link: PeerLink) -> StoreLink:
        if link.role != "peer":
            raise PeerError(f"a {link.role} has nothing to say to a directory of objects: connect to a store")
        return StoreLink(self, link)

    def take(self, address: str, link: StoreLink) -> None:
        """A store says who it is.

        Raises:
            PeerError: if another link of that address is open.
        """
        if address in self._stores:
            raise PeerError(f"a store with the address {address} is here already")
        self._stores[address] = link

    def handle(self, address: str, message: object) -> None:
        """A store has said something."""
        self._tell(self.directory.handle(address, message))  # type: ignore[arg-type]
        if isinstance(message, ReduceObjects) and message.patience_s is not None:
            asyncio.get_running_loop().call_later(
                message.patience_s, lambda: self._tell(self.directory.expire(message.name))
            )

    def lost(self, address: str, error: OffbeatError | None) -> None:
        """A store is gone."""
        if self._stores.pop(address, None) is not None:
            if error is not None:
                _log.warning("The store at %s is lost: %s", address, error)
            self._tell(self.directory.lost(address))

    def _tell(self, told: Instructions) -> None:
        for address, message in told:
            if (store := self._stores.get(address)) is not None:
                store.link.send(pack(message))


class StoreLink:
    """The link with one store; a `Receiver`."""

    def __init__(self, server: DirectoryServer, link: PeerLink) -> None:
        self._server, self.link = server, link
        self._address = ""

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Refuse bodies: objects travel between stores."""
        raise PeerError("Cannot take in a body from a store: objects travel between stores.")

    def received(self, metadata: bytes, body: memoryview) -> None:
        """Take in a message."""
        message = from_store_of(metadata)
        if isinstance(message, StoreHello):
            if self._address:
                raise PeerError(f"Cannot be known as {message.address}: this store is {self._address} already.")
            self._server.take(message.address, self)
            self._address = message.address
        elif not self._address:
            raise PeerError("Cannot listen to a store before it has said its address.")
        else:
            self._server.handle(self._address, message)

    def lost(self, error: OffbeatError | None) -> None:
        """The link has ended."""
        if self._address:
            self._server.lost(self._address, error)
