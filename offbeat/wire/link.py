"""A session on real connections, one after the other; all of it happens on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING

from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.wire import stream as streams
from offbeat.wire.keepalive import KeepaliveProbe, acknowledged_s
from offbeat.wire.session import TICKS, Counters, Limits, Receiver, Session, SessionOver

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from offbeat.wire.messages import Role
    from offbeat.wire.stream import Stream

_log = logging.getLogger("offbeat.wire")

# In one turn of the event loop; then the others on it have theirs.
_TURN_BYTES = 2 << 20
# In the middle of a body it is not worth waking up for less. What comes slower is found at the next tick.
_WAKE_BYTES = 1 << 20
# Part of the timeout after which a silent peer's machine is asked.
_PROBE_AFTER = 0.3
# Part of it after which the process behind it is said to stand still.
_STALLED = 0.6


class PeerLink:
    """A link to one peer; made by `tcp.connect`, or by `tcp.listen` for the one that dials. Use it on its event loop
    only.

    Args:
        limits: what it may cost.
        peer: the other side's address, for logs.
        rank, role: of who dialled.
        is_trusted: who dialled has shown the credential of validators, which workers do not have.
        waits: who listens waits for who dialled to come back, and no longer than `limits.grace` if that hung up.

    Attributes:
        ended: done when there is nothing more to come, in either direction.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        peer: str,
        rank: int,
        role: Role = "worker",
        waits: bool = False,
        is_trusted: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = Session(limits)
        self.limits, self.peer, self.rank, self.role, self.is_trusted = limits, peer, rank, role, is_trusted
        self._waits = waits
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.on_break: Callable[[], None] = lambda: None  # called when a connection is lost that may be replaced
        self.trouble = ""  # what went wrong last
        self._stream: Stream | None = None
        self._pieces: list[bytes | memoryview] = []  # taken from the session, not yet by the kernel
        self._blocked = self._flush_due = self._closing = self._paused = self._connected_before = False
        self._room: list[asyncio.Future[None]] = []
        self._ticked_s = self._attached_s = 0.0
        self._unsent_bytes: int | None = None  # as much as the kernel likes
        self._probe: KeepaliveProbe | None = None
        self._tick_s = limits.timeout.total_seconds() / TICKS
        self._timer: asyncio.TimerHandle | None = None  # runs from the first connection on

    # -- what its owner calls ------------------------------------------------------------------------------------

    def send(
        self,
        metadata: bytes,
        body: Buffer = b"",
        sent: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Queue a frame; never blocks.

        Args:
            metadata: of at most `limits.max_metadata_bytes`.
            body: anything with a contiguous buffer; not copied, so it must not change until `sent` is called.
            sent: called when the other side has received the frame; never if the link is lost before.
            urgent: whether that is to be known at once, and not with what the other side says next.

        Raises:
            NetworkError: if the link has ended, or the frame is longer than the limits say.
        """
        if not self.is_open:
            raise NetworkError(f"Cannot send to {self.peer}: the link has ended.")
        self._session.send(metadata, body, sent, urgent=urgent)
        self._flush_soon()

    async def drain(self) -> None:
        """Wait until no more than the window is queued or unacknowledged, or the link has ended."""
        while not self._session.free and not self.ended.done():
            room = self._loop.create_future()
            self._room.append(room)
            await room

    async def close(self) -> None:
        """Say good-bye when the other side has received everything; gives up after `limits.timeout`.

        What the other side had queued may be lost. The receiver's `lost` is not called.
        """
        if self.is_open:
            self._closing = True
            self._session.end(self._close_now)
            self._flush_soon()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), self.limits.timeout.total_seconds())
        except TimeoutError:
            self._close_now()

    def abort(self) -> None:
        """End it at once, without a word. The receiver's `lost` is not called."""
        self._close_now()

    def limit_unsent(self, size_bytes: int) -> None:
        """Have the kernel take no more than so much that it cannot send yet: what is queued later is not far behind."""
        self._unsent_bytes = size_bytes
        if self._stream is not None:
            streams.limit_unsent(self._stream.sock, size_bytes)

    def release_body(self) -> None:
        """Write no more into the memory that `destination` has returned for the body that is being received."""
        self._session.release_body()

    def flush(self) -> None:
        """Write what is queued now, as far as the kernel takes it."""
        self._flush()

    def probe_at(self, address: str) -> None:
        """Have the other side's machine asked, while that is silent, whether its process is still there.

        As long as it is, silence does not end the link.

        Args:
            address: "host:port" at which the other side listens.
        """
        self._probe = KeepaliveProbe(address)

    def pause_reading(self) -> None:
        """Take in nothing more for now, but for what is here already; the other side waits when its window is full.

        Meanwhile silence is no sign of anything: whether the other side is there shows only when something is sent.
        """
        self._paused = True
        if self._stream is not None:
            self._loop.remove_reader(self._stream.sock)

    def resume_reading(self) -> None:
        """Go on."""
        if self._paused:
            self._paused = False
            if self._stream is not None:
                self._listen(self._stream)

    @property
    def counters(self) -> Counters:
        return self._session.counters

    @property
    def has_hung_up(self) -> bool:
        """Whether the other side closed its connection and is not back, as the kernel does for a killed process."""
        return self._session.has_hung_up

    def note_refused(self) -> None:
        """Note that nobody listens where the other side did, and it is not started again: as if it had hung up."""
        if self._stream is None and not self._session.has_hung_up:
            self._session.hung_up()

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return not self._closing and not self.ended.done()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._stream is not None

    @property
    def missing_bytes(self) -> int:
        """Bytes that are missing of the frame that is being received; less with every byte of its body."""
        return self._session.missing_bytes

    @property
    def silent_s(self) -> float:
        """Seconds since the other side was last heard."""
        return self._session.silent_s

    @property
    def is_stalled(self) -> bool:
        """Whether the other side has been silent for most of the timeout, while its machine answers for it."""
        silent_s = self._session.silent_s
        return silent_s > _STALLED * self.limits.timeout.total_seconds() and self._session.unanswered_s < silent_s / 2

    # -- what tcp calls ------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Number of the last frame that was received."""
        return self._session.received

    def begin(self, receiver: Receiver) -> None:
        """Have `receiver` take in what comes; before the first connection."""
        self._session.receiver = receiver

    def attach(self, stream: Stream, received: int, opening: bytes = b"") -> None:
        """Go on over a new connection.

        Args:
            received: number of the last frame that the other side has received.
            opening: is written first.
        """
        self.detach()
        if self.ended.done():
            streams.close(stream.sock)
            return
        if self._timer is None:
            self._ticked_s = self._loop.time()
            self._timer = self._loop.call_later(self._tick_s, self._tick)
        try:
            self._session.resumed(received)
        except PeerError as error:
            streams.close(stream.sock)
            self.fail(error)
            return
        self.counters.reconnects += self._connected_before
        self._connected_before = True
        self._stream, self._attached_s = stream, self._loop.time()
        self._pieces = [opening] if opening else []
        if self._unsent_bytes is not None:
            streams.limit_unsent(stream.sock, self._unsent_bytes)
        if not self._paused:
            self._listen(stream)
        self._flush_soon()
        self._tell_room()

    def detach(self) -> None:
        """Let go of the connection; nothing comes over it any more."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._loop.remove_reader(stream.sock)
            self._loop.remove_writer(stream.sock)
            streams.close(stream.sock)
            self._blocked, self._pieces = False, []
            self._session.broke()

    def fail(self, error: OffbeatError) -> None:
        """End it, and tell its receiver why."""
        self._end(error)

    # -- the connection ------------------------------------------------------------------------------------------

    def _listen(self, stream: Stream) -> None:
        self._loop.add_reader(stream.sock, self._readable, stream)
        if stream.pending():
            self._loop.call_soon(self._readable, stream)

    def _readable(self, stream: Stream) -> None:
        left = _TURN_BYTES
        session = self._session
        try:
            while self._stream is stream and not self._paused:
                buffer = session.get_buffer()
                size = stream.receive(buffer)
                if size is None:
                    break
                if size == 0:
                    self._break("it closed the connection", hung_up=True)
                    return
                session.buffer_updated(size)
                left -= size
                if session.ended:
                    self._flush()  # its good-bye wants an answer
                    self._end(None)
                    return
                if size < len(buffer) and stream.short_is_all:
                    break
                if left <= 0:
                    if stream.pending():
                        self._loop.call_soon(self._readable, stream)
                    break
            if self._stream is stream:
                stream.expect(min(session.missing_bytes, _WAKE_BYTES))
        except NetworkError as error:  # of who takes in the frames, not of the connection
            self._end(error)
        except OSError as error:
            self._break(str(error), hung_up=isinstance(error, ConnectionError))
        except PeerError as error:
            self._break(str(error), error)
        except SessionOver as over:
            self._end(over.reason)
        except Exception as error:
            self._end(PeerError(f"the receiver of its frames has failed: {error!r}"))
            raise
        else:
            if session.queued:
                self._flush()  # an answer goes out at once, an acknowledgement waits for what may go along with it
            elif session.ready:
                self._flush_soon()
            self._tell_room()

    def _flush_soon(self) -> None:
        """Write at the end of this turn, so that what is said in one turn goes out in one piece."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if not self._blocked:
            self._write()

    def _write(self) -> None:
        stream = self._stream
        if stream is None:
            return
        left = _TURN_BYTES
        try:
            while left > 0:
                self._pieces = self._pieces or self._session.take()
                if not self._pieces:
                    break
                size = stream.send(self._pieces)
                if size is None:
                    break
                self.counters.bytes_out += size
                left -= size
                _drop(self._pieces, size)
        except OSError as error:
            self._break(str(error), hung_up=isinstance(error, ConnectionError))
            return
        if bool(self._pieces) != self._blocked:
            self._blocked = bool(self._pieces)
            if self._blocked:
                self._loop.add_writer(stream.sock, self._write)
            else:
                self._loop.remove_writer(stream.sock)
        if left <= 0 and not self._blocked:
            self._flush_soon()

    def _break(self, why: str, error: PeerError | None = None, *, hung_up: bool = False) -> None:
        """The connection is of no use any more; the session may be.

        Args:
            hung_up: the other side ended it, or its kernel did because its process is gone.
        """
        self.trouble = why
        self.detach()
        if hung_up and self._waits:
            self._session.hung_up()
        try:
            if error is not None:
                _log.warning("Closed a connection with %s: %s", self.peer, error)
                self._session.strike(error)
        except SessionOver as over:
            self._end(over.reason)
        else:
            self.on_break()

    def _tick(self) -> None:
        now_s = self._loop.time()
        # If this process itself was stopped, the other side was not silent.
        elapsed_s, self._ticked_s = min(now_s - self._ticked_s, 2 * self._tick_s), now_s
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        connection_s = math.inf if self._stream is None else acknowledged_s(self._stream.sock)
        try:
            answered_s = self._answered_s(connection_s)
            self._session.passed(elapsed_s, listening=not self._paused or self._stream is None, answered_s=answered_s)
        except SessionOver as over:
            trouble = f"; the connection was lost: {self.trouble}" if self.trouble else ""
            self._end(NetworkError(f"{over.reason}{trouble}"))
            return
        except PeerError as error:
            self._break(str(error), error)
            return
        silent_s = min(self._session.silent_s, now_s - self._attached_s)
        if self._probe is not None:
            silent_s = min(silent_s, connection_s)
        if silent_s > self.limits.timeout.total_seconds() / 2 and self._stream is not None:
            # Perhaps only this one connection is dead, as after a router forgot it. Who dialled dials again.
            self._break("nothing came over it")
        elif self._stream is not None and not self._paused:
            self._readable(self._stream)
        self._flush_soon()

    def _answered_s(self, connection_s: float) -> float:
        """Seconds since the other side's machine answered for it, infinite if nobody is to ask.

        Args:
            connection_s: since it answered on the connection.
        """
        probe = self._probe
        if probe is None:
            return math.inf
        if self._session.silent_s < _PROBE_AFTER * self.limits.timeout.total_seconds():
            probe.close()
            return math.inf
        answered_s = min(connection_s, probe.look())
        if probe.has_ended:
            self.note_refused()
        return answered_s

    # -- the end -------------------------------------------------------------------------------------------------

    def _close_now(self) -> None:
        self._closing = True
        self._end(None)

    def _end(self, error: OffbeatError | None) -> None:
        if self.ended.done():
            return
        if error is not None and self._stream is not None:
            with contextlib.suppress(OSError):  # it will find out by itself
                self._say_last(self._stream, str(error))
        self.detach()
        self.trouble = self.trouble if error is None else str(error)
        if self._timer is not None:
            self._timer.cancel()
        if self._probe is not None:
            self._probe.close()
        self.ended.set_result(None)
        self._session.forget()
        self._tell_room()
        if not self._closing:
            told = None
            if error is not None:
                reason = str(error).removesuffix(".")
                whose = f"rank {self.rank}" if self.role == "worker" else f"the {self.role}"
                told = type(error)(f"Lost the link of {whose} with {self.peer}: {reason}.")
            self._session.receiver.lost(told)

    def _say_last(self, stream: Stream, reason: str) -> None:
        """Write what is queued, as far as the kernel takes it now, and then why this is the end."""
        while pieces := self._pieces or self._session.take():
            size = stream.send(pieces)
            if size is None:
                return
            _drop(pieces, size)
            self._pieces = pieces
        stream.send([self._session.fail(reason)])

    def _tell_room(self) -> None:
        if self._room and (self._session.free or self.ended.done()):
            waiting, self._room = self._room, []
            for room in waiting:
                if not room.done():
                    room.set_result(None)


def _drop(pieces: list[bytes | memoryview], size: int) -> None:
    """Remove the first `size` bytes."""
    done = 0
    while done < len(pieces) and size >= len(pieces[done]):
        size -= len(pieces[done])
        done += 1
    del pieces[:done]
    if size:
        pieces[0] = memoryview(pieces[0])[size:]
