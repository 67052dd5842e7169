"""The dialling side of one link: the first time, and whenever its connection is lost."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING

import msgspec

from offbeat.backoff import Backoff
from offbeat.errors import NetworkError, PeerError
from offbeat.wire import handshake
from offbeat.wire.credentials import Certificates, Credentials, token_of, validator_token_of
from offbeat.wire.handshake_io import STRANGER_BYTES, hear, say
from offbeat.wire.messages import HandshakeClaim, HandshakeRefused, Hello, Welcome
from offbeat.wire.stream import Stream, close, open_stream, prepare

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from offbeat.wire.link import PeerLink
    from offbeat.wire.session import Limits

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# Once connected: several attempts fall into the grace after which who listens gives a link up.
_ATTEMPTS_PER_GRACE = 5
# The kernel would ask for a second time after this, and then ever more rarely; a new attempt asks at once.
_CONNECT_S = 1.0
_REFUSALS = 3
# Who listens may tell at length why.
_MAX_ANSWER_BYTES = 4 * STRANGER_BYTES


class Connector:
    """The dialling side of one link.

    Args:
        address: "host:port", of IPv6 "[host]:port".
        claim: who it is for.
        is_restarted: whether who listened may do so again at the same address, as a server that is started anew.

    Raises:
        NetworkError: if it is no address, or a certificate cannot be used.
    """

    def __init__(
        self,
        address: str,
        claim: HandshakeClaim,
        credentials: Credentials | None,
        limits: Limits,
        *,
        is_restarted: bool = True,
    ) -> None:
        self._address, self._host, self._port = address, *_parse(address)
        self._claim, self._limits = claim, limits
        self._token, self._validator_token = token_of(credentials), validator_token_of(credentials)
        self._context = credentials.client_context() if isinstance(credentials, Certificates) else None
        self._task: asyncio.Task[None] | None = None
        self._is_restarted = is_restarted
        longest_s = min(_LONGEST_PAUSE_S, limits.grace.total_seconds() / _ATTEMPTS_PER_GRACE)
        self._backoff = Backoff(_FIRST_PAUSE_S, longest_s, seed=claim.session.hex())
        self._heard_bytes = 0

    async def first(
        self,
        link: PeerLink,
        patience: timedelta,
        hopeless: Callable[[], str] = lambda: "",
        *,
        may_start: bool = True,
    ) -> None:
        """Connect `link` for the first time, and have it connected again from then on.

        Args:
            may_start: whether who listens there may still be starting; if not, a refused connection is the end.
            hopeless: asked whenever nobody could be reached: why nobody ever will, as a sentence, or "".

        Raises:
            NetworkError: if nobody could be reached in time, or nobody ever will; says what was tried.
            PeerError: if the other side refused, or could not prove who it is.
        """
        tries = refusals = 0
        began_s = asyncio.get_running_loop().time()
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, seed=self._claim.session.hex())
        backoff.next_s()  # before the first attempt
        patience_s = patience.total_seconds()
        while True:
            tries += 1
            left_s = began_s + patience_s - asyncio.get_running_loop().time()
            try:
                await self._enter(link, max(0.01, left_s), resumes=False)
            except PeerError as error:
                refusals += 1
                if refusals == _REFUSALS or isinstance(error, _FinalError):
                    raise PeerError(f"Cannot join {self._address}: {str(error).removesuffix('.')}.") from error
                reason: Exception = error
            except OSError as error:
                reason, refusals = error, 0
            else:
                break
            if isinstance(reason, OSError) and (why := hopeless()):
                raise NetworkError(why) from reason
            is_over = isinstance(reason, ConnectionRefusedError) and not may_start
            if left_s <= (pause_s := backoff.next_s()) or is_over:
                how_often = f"in {tries} attempts within {patience_s:g} s" if tries > 1 else "at the first attempt"
                raise NetworkError(
                    f"Cannot reach {self._address} {how_often}: {_why(reason)}. Is the server running, and is this its "
                    "address?"
                ) from reason
            await asyncio.sleep(pause_s)
        link.on_break = lambda: self._again(link)
        link.ended.add_done_callback(lambda _: self._task and self._task.cancel())
        if not link.connected:
            self._again(link)

    def _again(self, link: PeerLink) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._redial(link))

    async def _redial(self, link: PeerLink) -> None:
        """Dial until there is a connection again; the link itself gives up when it hears nothing for too long."""
        if link.counters.bytes_in > self._heard_bytes:
            # The last connection was good for something, so at first the next one is not waited for.
            self._backoff.reset()
            self._heard_bytes = link.counters.bytes_in
        while not link.ended.done():
            await asyncio.sleep(self._backoff.next_s())
            try:
                await self._enter(link, self._limits.timeout.total_seconds(), resumes=True)
            except _FinalError as error:
                link.fail(PeerError(str(error)))
            except (OSError, PeerError) as error:
                link.trouble = _why(error)
                if isinstance(error, ConnectionRefusedError) and not self._is_restarted:
                    link.note_refused()
            if link.connected:
                return

    async def _enter(self, link: PeerLink, timeout_s: float, *, resumes: bool) -> None:
        """One attempt.

        Raises:
            _FinalError: if it is of no use to try again.
            PeerError: if the other side refused, or broke the protocol.
            OSError: if there was no connection, or it broke.
        """
        async with asyncio.timeout(min(timeout_s, self._limits.timeout.total_seconds())):
            stream = await self._open()
            try:
                said = await hear(stream, STRANGER_BYTES)
                if not isinstance(said, Hello):
                    raise PeerError("it is no server of offbeat's")
                claim = msgspec.structs.replace(self._claim, received=link.received, resumes=resumes)
                join = handshake.join(self._token, said, claim, self._validator_token)
                await say(stream, join)
                try:
                    answer = await hear(stream, _MAX_ANSWER_BYTES)
                except OSError as error:
                    raise PeerError("it hung up when it saw who we are (another token, certificate or job?)") from error
                if isinstance(answer, HandshakeRefused):
                    handshake.check_refused(self._token, said, join, answer)
                    raise _FinalError(f"it refused: {answer.reason}")
                if not isinstance(answer, Welcome):
                    raise PeerError("it did not prove that it knows the token")
                handshake.check_welcome(self._token, said, join, answer)
            except ssl.SSLError as error:
                close(stream.sock)
                raise PeerError(f"it does not accept our certificate: {error.reason or error}") from error
            except BaseException:
                close(stream.sock)
                raise
        link.attach(stream, answer.received)

    async def _open(self) -> Stream:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        for last, (family, kind, protocol, _, address) in enumerate(found, 1 - len(found)):
            sock = socket.socket(family, kind, protocol)
            try:
                prepare(sock)
                async with asyncio.timeout(_CONNECT_S):
                    await loop.sock_connect(sock, address)
                return await open_stream(sock, self._context, server=False, host=self._host)
            except OSError:
                sock.close()
                if last == 0:
                    raise
            except BaseException:
                sock.close()
                raise
        raise OSError(f"the name {self._host} has no address")


class _FinalError(PeerError):
    """The refusal is final, and another attempt is of no use."""


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it accepted the connection and then said nothing (does it expect TLS?), or nothing came back at all"
    return str(error)


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise NetworkError(f"Cannot dial {address!r}: an address is host:port, such as 10.0.0.5:7000 or [::1]:7000.")
    return host, int(port)
