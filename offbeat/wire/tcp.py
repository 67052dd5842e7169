"""Links over TCP: frames from memory to memory, exactly once and in order, while connections break and come back.

A server that answers each frame, and a worker that sends one:

    class Echo:
        def __init__(self, link):
            self.link = link

        def destination(self, metadata, size_bytes):     # where the body is to be received
            return memoryview(bytearray(size_bytes))     # e.g. a view of a tensor: memoryview(tensor.numpy()).cast("B")

        def received(self, metadata, body):              # whole, checked, in order, exactly once
            self.link.send(b"got it", body)

        def lost(self, error):                           # for good; None: the other side said good-bye
            ...

    listener = await listen("127.0.0.1", 0, accept=Echo, job="mnist", credentials=Token(secret))
    link = await connect(listener.address, accept=Worker, job="mnist", rank=3, credentials=Token(secret))
    link.send(metadata, body, sent=lambda: ...)          # queues; body must not change before `sent` is called
    await link.drain()                                   # until the queue fits the window again
    await link.close()
    listener.close()

Everything happens on one event loop. A training process has one in a thread:

    loop = Loop()
    link = loop.run(connect(...))                        # a coroutine, from any other thread
    loop.call(link.send, metadata, body)                 # a function; calls of one thread stay in order

Who dials (`connector`) draws the session's name, and dials again whenever the connection is lost, for as long as the
other side is not given up (`Limits.timeout`); who listens (`listener`) keeps the session for as long, or, if who
dialled hung up, for `Limits.grace`. How they prove who they are stands in `handshake`, what may break and what not in
`session`.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError
from offbeat.wire.connector import Connector
from offbeat.wire.credentials import Credentials, require_credentials
from offbeat.wire.link import PeerLink
from offbeat.wire.listener import Acceptor, Listener
from offbeat.wire.messages import HandshakeClaim
from offbeat.wire.session import Limits
from offbeat.wire.stream import prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.wire.messages import Role
    from offbeat.wire.session import Receiver

_BACKLOG = 256
_LIMITS = Limits()


async def listen(
    bind: str,
    port: int,
    *,
    accept: Callable[[PeerLink], Receiver],
    job: str,
    credentials: Credentials | None = None,
    limits: Limits = _LIMITS,
) -> Listener:
    """Take in who dials.

    Args:
        bind: IPv4 or IPv6 address.
        port: 0 for one of the kernel's choice.
        accept: called with each new link; returns who takes in what comes over it, or refuses by a `PeerError`.
        job: who belongs to another is refused.
        credentials: what both sides have to prove; may be left out on a loopback address.
        limits: what a link may cost.

    Raises:
        NetworkError: if there have to be credentials, a certificate cannot be used, or the address cannot be bound.
    """
    require_credentials("a server", bind, credentials)
    acceptor = Acceptor(accept, job, credentials, limits)
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        sock = socket.create_server((bind, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise NetworkError(f"Cannot open a server on {bind}, port {port}: {error}. Choose another.") from error
    prepare(sock)
    return Listener(sock, acceptor)


async def connect(
    address: str,
    *,
    accept: Callable[[PeerLink], Receiver],
    job: str,
    rank: int,
    credentials: Credentials | None = None,
    limits: Limits = _LIMITS,
    patience: timedelta = timedelta(seconds=20),
    role: Role = "worker",
    hopeless: Callable[[], str] = lambda: "",
    may_start: bool = True,
) -> PeerLink:
    """Dial; tries again while nobody listens there yet.

    Args:
        address: "host:port", of IPv6 "[host]:port".
        accept: called with the link before anything comes over it; returns who takes that in.
        job, rank: what this worker belongs to, and who it is.
        credentials, limits: as the other side's.
        patience: for how long to try.
        role: what it comes for; a shard and an onlooker have no rank.
        hopeless: asked whenever nobody could be reached: why nobody ever will, as a sentence, or "".
        may_start: whether who listens there may still be starting; if not, a refused connection is the end.

    Raises:
        NetworkError: if nobody could be reached in time, or nobody ever will; says what was tried.
        PeerError: if the other side refused, or could not prove who it is.
    """
    claim = HandshakeClaim(rank=rank, role=role, job=job, session=secrets.token_bytes(16))
    dialler = Connector(address, claim, credentials, limits, is_restarted=role != "peer")
    link = PeerLink(limits, peer=address, rank=rank, role=role)
    try:
        link.begin(accept(link))
        await dialler.first(link, patience, hopeless, may_start=may_start)
    except BaseException:
        link.abort()
        raise
    return link
