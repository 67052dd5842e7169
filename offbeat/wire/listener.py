"""The listening side: admits those who dial, and sees to it that strangers cost little.

Until it has proved who it is, who dials is a stranger. It gets `STRANGER_BYTES` for a message, `STRANGER_S`, and one of
`STRANGERS` places, the oldest of which is freed when another needs one. It is not told why it is refused; the log is.
Who has proved it and is refused all the same is told, with a proof.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Any

from offbeat.errors import PeerError
from offbeat.wire import handshake
from offbeat.wire.credentials import Certificates, CertifiedRole, Credentials, token_of, validator_token_of
from offbeat.wire.handshake_io import STRANGER_BYTES, hear, say
from offbeat.wire.interfaces import shown_address
from offbeat.wire.link import PeerLink
from offbeat.wire.messages import HandshakeClaim, Join, Message, pack
from offbeat.wire.rate_limited_log import RateLimitedLog
from offbeat.wire.stream import close, open_stream, prepare

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from offbeat.wire.session import Limits, Receiver

_log = logging.getLogger("offbeat.wire")

STRANGER_S = 5.0
STRANGERS = 64
_REMEMBERED = 64
_OUT_OF_FILES_S = 0.2


class Listener:
    """A listening socket; made by `listen`. Closing it leaves the links that it accepted alone."""

    def __init__(self, sock: socket.socket, acceptor: Acceptor) -> None:
        self._sock, self._acceptor = sock, acceptor
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self.address = shown_address(sock.getsockname())
        self._open()

    @property
    def links(self) -> list[PeerLink]:
        """The links that have not ended."""
        return list(self._acceptor.links.values())

    def close(self) -> None:
        """Take in nobody any more, nor a link whose connection was lost; again does nothing."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for stranger in list(self._strangers):
            stranger.cancel()

    def _open(self) -> None:
        self._loop.add_reader(self._sock, self._take_in)

    def _take_in(self) -> None:
        """Take in one; the others have their turn, however many dial."""
        try:
            sock, peer = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # it has hung up in the meantime
            return
        except OSError as error:  # no more file descriptors
            _log.warning("Cannot accept a connection on %s: %s", self.address, error)
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(_OUT_OF_FILES_S, self._open)
            return
        if len(self._strangers) >= STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        stranger = self._loop.create_task(self._acceptor.welcome(sock, shown_address(peer)))
        self._strangers[stranger] = None
        stranger.add_done_callback(lambda task: self._strangers.pop(task, None))


class Acceptor:
    """The decision on who is admitted.

    Args:
        accept, job, credentials, limits: as of `tcp.listen`.

    Raises:
        NetworkError: if a certificate cannot be used.
    """

    def __init__(
        self, accept: Callable[[PeerLink], Receiver], job: str, credentials: Credentials | None, limits: Limits
    ) -> None:
        self._accept, self._job, self._limits = accept, job, limits
        self._token, self._validator_token = token_of(credentials), validator_token_of(credentials)
        self._context = credentials.server_context() if isinstance(credentials, Certificates) else None
        self._refusals = RateLimitedLog()
        self.links: dict[bytes, PeerLink] = {}
        self._over: dict[bytes, str] = {}  # why sessions ended, of the latest few

    async def welcome(self, sock: socket.socket, peer: str) -> None:
        """See whom `peer` claims to be, and attach its connection to its link."""
        join: Message | None = None
        try:
            prepare(sock)
            async with asyncio.timeout(STRANGER_S):
                stream = await open_stream(sock, self._context, server=True)
                sock = stream.sock
                said = handshake.hello()
                await say(stream, said)
                join = await hear(stream, STRANGER_BYTES)
                if not isinstance(join, Join):
                    raise PeerError("it did not prove who it is")
                handshake.check(self._token, said, join)
                if join.claim.job != self._job:
                    raise PeerError(f"it belongs to job {join.claim.job!r}, this is {self._job!r}")
                certified = _certified(stream.sock)
                is_trusted = certified.role == "validator" or handshake.knows_validator_token(
                    self._validator_token, said, join
                )
                try:
                    if why := certified.refusal(join.claim) or self._refusal(join.claim, is_trusted=is_trusted):
                        raise PeerError(why)
                    link = self._link(join.claim, peer, is_trusted=is_trusted)
                except PeerError as error:
                    await say(stream, handshake.refuse(self._token, said, join, str(error)))
                    raise
        except (OSError, PeerError) as error:  # a TimeoutError is an OSError
            # Who hangs up without a word only looked whether this process is there (`keepalive`).
            if join is not None or not isinstance(error, ConnectionError):
                self._refusals.log(f"{peer}: {str(error) or 'it took too long'}")
            close(sock)
        except BaseException:
            close(sock)
            raise
        else:
            opening = pack(handshake.welcome(self._token, said, join, link.received))
            link.attach(stream, join.claim.received, opening)

    def _refusal(self, claim: HandshakeClaim, *, is_trusted: bool) -> str:
        """The reason why who dials may not come in its role without the validators' credential; "" if it may."""
        if is_trusted or not (claim.role == "validator" or (claim.role == "shard" and self._validator_token)):
            return ""
        what = "the token of validators" if self._context is None else "a certificate of `offbeat certs --validator`"
        whose = "it is no validator" if claim.role == "validator" else "it is no shard of this server"
        lacks = "" if self._validator_token or self._context is not None else ", and this server was started without"
        return f"{whose}: it does not show {what}{lacks}"

    def _link(self, claim: HandshakeClaim, peer: str, *, is_trusted: bool) -> PeerLink:
        link = self.links.get(claim.session)
        if link is not None and link.is_trusted and not is_trusted:
            raise PeerError(f"it comes back as {claim.role} {claim.rank} without the credential that it showed before")
        if link is not None and (link.role, link.rank) != (claim.role, claim.rank):
            raise PeerError(f"it says it is {claim.role} {claim.rank}, and was {link.role} {link.rank}")
        if link is not None:
            link.detach()  # from here on nothing changes what has been received
            link.peer = peer
            return link
        if claim.resumes:
            why = self._over.get(claim.session, "")
            raise PeerError(f"its session is over: {why}" if why else "its session is over")
        link = PeerLink(self._limits, peer=peer, rank=claim.rank, role=claim.role, waits=True, is_trusted=is_trusted)
        try:
            link.begin(self._accept(link))
        except BaseException:
            link.abort()
            raise
        self.links[claim.session] = link
        link.ended.add_done_callback(lambda _: self._forget(claim.session))
        return link

    def _forget(self, session: bytes) -> None:
        self._over[session] = self.links.pop(session).trouble
        if len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]


def _certified(sock: socket.socket) -> CertifiedRole:
    """The role that the certificate of the other side is for."""
    shown = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
    names: Any = (shown or {}).get("subjectAltName", ())
    return CertifiedRole.named_in(names)
