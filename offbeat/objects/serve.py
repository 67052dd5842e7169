"""A store as a process, with or without a directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from typing import TYPE_CHECKING

import torch

from offbeat.errors import PeerError
from offbeat.objects.adding import TorchArithmetic
from offbeat.objects.client_link import ClientLink
from offbeat.objects.directory_link import DIRECTORY_LIMITS
from offbeat.objects.directory_server import DirectoryServer
from offbeat.objects.node_store import NodeStore
from offbeat.objects.reduce_plan import LinkEstimate
from offbeat.objects.remote_store import CLIENT_LIMITS
from offbeat.wire import tcp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import timedelta

    from offbeat.wire.credentials import Credentials
    from offbeat.wire.link import PeerLink
    from offbeat.wire.listener import Listener

LINK = LinkEstimate(latency_s=0.0005, bytes_per_s=118e6, block_bytes=512 << 10)
"""The links that a directory assumes: hosts at 1 Gbit/s."""


class ObjectServer:
    """A store, and perhaps a directory, on this event loop; made by `open_store`.

    Args:
        store: the store, which other stores find at its address.
        clients: listens for clients on this machine.
        directory: that is kept here; None for none.
        directories: the addresses of all.
    """

    def __init__(
        self, store: NodeStore, clients: Listener, directory: DirectoryServer | None, directories: list[str]
    ) -> None:
        self.store, self._clients, self._directory, self.directories = store, clients, directory, directories

    @property
    def client_address(self) -> str:
        """Return the address at which clients on this machine find the store."""
        return self._clients.address

    @property
    def has_users(self) -> bool:
        """Whether a client is connected, or another machine's store uses the directory."""
        return bool(self._clients.links) or (self._directory is not None and self._directory.stores > 1)

    async def close(self) -> None:
        """Say good-bye to all."""
        links = self._clients.links
        self._clients.close()
        await asyncio.gather(*(link.close() for link in links))
        await self.store.close()
        if self._directory is not None:
            await self._directory.close()


async def open_store(
    bind: str,
    port: int,
    client_port: int,
    *,
    job: str,
    credentials: Credentials | None,
    memory_bytes: int,
    directories: Sequence[str],
    directory_port: int | None,
    patience: timedelta,
) -> ObjectServer:
    """Open a store on this event loop, in a process of its own, whose limits and threads of torch are set.

    Args:
        bind, port: where it listens for other stores; an address that they can reach.
        client_port: where it listens for clients, on this machine's loopback.
        job: by which links know each other.
        credentials: what all prove.
        memory_bytes: for objects.
        directories: "host:port" of each; none if this is the only one.
        directory_port: where a directory of its own listens; None for none.
        patience: for how long a directory is dialled.

    Raises:
        NetworkError: if an address cannot be used, or a directory cannot be reached.
        PeerError: if a directory refuses.
    """
    # One thread adds a block in some 50 us. On a busy machine it would wait up to 0.4 s for torch's other threads.
    torch.set_num_threads(1)
    # An object takes two descriptors, and the usual limit of 1,024 is for programs that call select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    directory, known = None, list(directories)
    if directory_port is not None:
        directory = DirectoryServer(LINK)
        own = await directory.open(bind, directory_port, job=job, credentials=credentials, limits=DIRECTORY_LIMITS)
        if own not in known:
            known.append(own)
    store = NodeStore(job=job, credentials=credentials, most_bytes=memory_bytes, arithmetic=TorchArithmetic)

    def accept(link: PeerLink) -> ClientLink:
        if link.role not in ("worker", "onlooker"):
            raise PeerError(f"a {link.role} is no client of a store of objects")
        return ClientLink(store, link)

    store.accept_onlooker = accept
    try:
        await store.open(bind, port, known, patience)
        clients = await tcp.listen(
            "127.0.0.1", client_port, accept=accept, job=job, credentials=credentials, limits=CLIENT_LIMITS
        )
    except BaseException:
        await store.close()
        if directory is not None:
            await directory.close()
        raise
    return ObjectServer(store, clients, directory, known)


async def serve(
    open_it: Callable[[], Awaitable[ObjectServer]],
    say: Callable[[ObjectServer], None],
    unused_s: float | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT comes.

    Args:
        open_it: opens it, as `open_store`.
        say: called when clients may come.
        unused_s: it ends when nobody has used it for so many seconds; None to stay.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await open_it()
    say(server)
    used_s, sent_bytes = loop.time(), 0
    while not stop.is_set() and (unused_s is None or loop.time() - used_s < unused_s):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), None if unused_s is None else min(1.0, unused_s / 4))
        if server.has_users or server.store.sent_bytes > sent_bytes:
            used_s, sent_bytes = loop.time(), server.store.sent_bytes
    await server.close()
