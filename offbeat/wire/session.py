"""Frames that arrive exactly once and in order, however often the connection under them breaks. No I/O.

    the owner                         the session                                     the connection
      | -- send(metadata, body) -------> |  DATA, numbered 1, 2, 3 ...                    |
      |                                  | -- take() --> header, metadata, body --------> |
      |                                  | <- get_buffer(), buffer_updated(n) ----------- |
      | <- destination(metadata, size) - |                                                |
      | <- received(metadata, body) ---- |  DATA n: n is the next, else see below         |
      | <- sent() ---------------------- |  every frame says how far the other side has   |
      |                                  |  received; an ACK says nothing else            |
      |                                  | <- broke() ----------------------------------- |
      |                                  | <- resumed(n): the other side has all up to n; |
      |                                  |    what follows n is taken again               |

*Sending.* Bodies are referenced, not copied, until they are acknowledged. Frames are in flight from `take` until then;
at most `Limits.window_bytes` of them, each counted as its bytes plus `FRAME_COST_BYTES` of bookkeeping. One frame is
always let through, however large. A frame says whether it wants to be acknowledged at once: the last one of what is
queued does, and one every quarter of the window.

*Receiving.* A frame that came before is thrown away. One that comes too early breaks the connection, and so does any
damage: the other side sends again what was not acknowledged. A body that was half received when the connection broke is
received again into the same memory; `destination` is asked once per frame. A connection that breaks because of what was
said on it three times in a row, with no new frame in between, is beyond repair: the session ends.

*Memory of a session*: the reader's scratch (`frame.SCRATCH_BYTES`, or one longest head), the window's bookkeeping and
metadata, and the same for what the owner queued beyond the window, which waiting for `free` avoids. Bodies are the
owner's, on both sides.

*Silence.* With nothing else to say, a session says how far it has received, `_BEATS` times per `Limits.timeout`; a peer
that says nothing for the whole of it is lost, unless its machine is known to answer for it (`keepalive`). A frame that
was begun, and of which less than `_TRICKLE_BYTES` come in half of it, breaks the connection: bytes are missing, and
such words fill their place. A peer that hung up, as the kernel does for a process that was killed, is lost after
`Limits.grace`: it would have dialled again at once. Time in which this process itself did not run does not count.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import NetworkError, OffbeatError, PeerError
from offbeat.wire.frame import HEADER_BYTES, SCRATCH_BYTES, Frame, Kind, Reader, head

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

FRAME_COST_BYTES = 512
_BEATS = 5
# How often per timeout `passed` is to be called. Silence is noticed one such interval early, to be in time.
TICKS = 20
_STRIKES = 3
_TRICKLE_BYTES = 1024
# One call to the kernel takes about this much; more would keep the event loop from everything else.
_TAKE_BYTES = 1 << 20
_TAKE_FRAMES = 64
_MAX_REASON_BYTES = 1024
_NOTHING = memoryview(b"")


class Receiver(Protocol):
    """The owner of a link takes in what comes over it; called on the event loop, so none of it may block.

    1) `destination` (frames with a body), 2) `received`, both for one frame after the other; finally 3) `lost`, once.
    """

    def destination(self, metadata: bytes, size_bytes: int) -> memoryview:
        """Writable, contiguous memory of exactly `size_bytes` for the body that follows; it counts from `received` on.

        Raises:
            PeerError: if it is not to be received; this ends the session.
        """

    def received(self, metadata: bytes, body: memoryview) -> None:
        """The frame is here: whole, checked, in order, exactly once.

        Raises:
            PeerError: if it makes no sense; this ends the session.
        """

    def lost(self, error: OffbeatError | None) -> None:
        """The session has ended for good: why, or None if the other side closed it in good order."""


@dataclass(frozen=True)
class Limits:
    """The most that a link may cost.

    Args:
        window_bytes: most that is sent and not acknowledged.
        max_metadata_bytes, max_body_bytes: of one frame, in both directions; the same on both sides.
        timeout: a peer from which, and from whose machine, nothing is heard for longer is lost; one that hung up, after
            `grace`.
    """

    window_bytes: int = 16 << 20
    max_metadata_bytes: int = 256 << 10
    max_body_bytes: int = 16 << 20
    timeout: timedelta = timedelta(seconds=5)

    @property
    def grace(self) -> timedelta:
        """The time that a listener waits for a peer that hung up: a fifth of the timeout."""
        return self.timeout / 5

    @property
    def bookkeeping_bytes(self) -> int:
        """Most memory that one link takes while its owner waits for `free`, apart from the bodies."""
        scratch_bytes = max(SCRATCH_BYTES, HEADER_BYTES + self.max_metadata_bytes)
        return SCRATCH_BYTES + scratch_bytes + self.window_bytes + self.max_metadata_bytes


@dataclass
class Counters:
    """The traffic over a link so far, in both directions; frames are its owner's only."""

    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: int = 0
    frames_out: int = 0
    repeated: int = 0
    reconnects: int = 0


@dataclass(slots=True)
class _Sending:
    """One frame on its way."""

    number: int
    kind: int
    metadata: bytes
    body: memoryview
    cost_bytes: int
    sent: Callable[[], None] | None
    urgent: bool = False


@dataclass
class _Half:
    """The next frame, whose body is being received, or was when the connection broke."""

    metadata: bytes
    body: memoryview = field(repr=False)


class Session:
    """One side of it.

    Args:
        limits: what it may cost.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.receiver: Receiver  # takes in what comes; to be set before anything does
        self.counters = Counters()
        self.received = 0  # number of the last frame that was received
        self.ended = False  # the other side has said its last frame
        self._reader = self._new_reader()
        self._half: _Half | None = None
        self._queue: collections.deque[_Sending] = collections.deque()
        self._flight: collections.deque[_Sending] = collections.deque()
        self._queue_bytes = self._flight_bytes = self._unasked_bytes = 0
        self._number = self._taken = self._acknowledged = 0
        self._owes_ack = False
        self._strikes = 0
        self._silent_s = self._unanswered_s = self._mute_s = 0.0
        self._gone_s: float | None = None  # for how long the other side has been away, if it hung up
        self._stuck_s, self._stuck_at_bytes = 0.0, 0  # since when, and where, a frame does not go on

    # -- sending -------------------------------------------------------------------------------------------------

    def send(
        self,
        metadata: bytes,
        body: Buffer = b"",
        sent: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Queue a frame; `body` must not change until `sent` is called, when it has been received.

        Args:
            urgent: whether word that it has been received is wanted at once.

        Raises:
            NetworkError: if it is longer than the limits say.
        """
        view = memoryview(body)
        view = view.cast("B") if view.nbytes else _NOTHING
        limits = self.limits
        for what, size, most in (
            ("metadata", len(metadata), limits.max_metadata_bytes),
            ("a body", len(view), limits.max_body_bytes),
        ):
            if size > most:
                raise NetworkError(f"Cannot send {what} of {size} bytes: one frame takes at most {most}. Cut it.")
        self._enqueue(Kind.DATA, metadata, view, sent, urgent=urgent)

    def end(self, sent: Callable[[], None]) -> None:
        """Queue the last frame; `sent` is called when the other side has received everything."""
        self._enqueue(Kind.END, b"", _NOTHING, sent)

    def fail(self, reason: str) -> bytes:
        """The last thing to be written, between two frames, when this side ends the session because of an error."""
        return head(reason.encode(errors="replace")[:_MAX_REASON_BYTES], kind=Kind.FAIL)

    @property
    def free(self) -> bool:
        """Whether no more than the window is queued or in flight."""
        return self._queue_bytes + self._flight_bytes <= self.limits.window_bytes

    @property
    def queued(self) -> bool:
        """Whether a frame waits to be taken."""
        return bool(self._queue)

    @property
    def ready(self) -> bool:
        """Whether `take` may have something."""
        return self._owes_ack or bool(self._queue)

    @property
    def idle(self) -> bool:
        """Whether everything queued has been received."""
        return not self._queue and not self._flight

    def take(self) -> list[bytes | memoryview]:
        """The bytes that go on the connection next, in this order; none if there are none or the window is full.

        What was taken has to be written whole before the next call, or the connection has to be given up.
        """
        pieces: list[bytes | memoryview] = []
        size, window_bytes = 0, self.limits.window_bytes
        while self._queue and size < _TAKE_BYTES and len(pieces) < _TAKE_FRAMES:
            frame = self._queue[0]
            cost_bytes = frame.cost_bytes
            if self._flight and self._flight_bytes + cost_bytes > window_bytes:
                break
            self._queue.popleft()
            self._flight.append(frame)
            self._queue_bytes -= cost_bytes
            self._flight_bytes += cost_bytes
            self._unasked_bytes += cost_bytes
            self._taken = max(self._taken, frame.number)
            # Each acknowledgement takes time on both sides, so it is asked for only where it is needed soon.
            room_bytes = window_bytes - self._flight_bytes
            urgent = (
                frame.urgent
                or not self._queue
                or self._unasked_bytes > window_bytes / 4
                or self._queue[0].cost_bytes > room_bytes
            )
            if urgent:
                self._unasked_bytes = 0
            # Not earlier: now the processor has the body in its cache when it is copied to the kernel.
            metadata, body = frame.metadata, frame.body
            pieces.append(
                head(metadata, body, kind=frame.kind, number=frame.number, received=self.received, urgent=urgent)
            )
            if body:
                pieces.append(body)
            size += cost_bytes
        if self._owes_ack and not pieces:
            pieces.append(head(b"", kind=Kind.ACK, received=self.received))
        if pieces:
            self._owes_ack, self._mute_s = False, 0.0
        return pieces

    def _enqueue(
        self,
        kind: int,
        metadata: bytes,
        body: memoryview,
        sent: Callable[[], None] | None,
        *,
        urgent: bool = False,
    ) -> None:
        self._number += 1
        cost_bytes = FRAME_COST_BYTES + HEADER_BYTES + len(metadata) + len(body)
        self._queue.append(_Sending(self._number, kind, metadata, body, cost_bytes, sent, urgent))
        self._queue_bytes += cost_bytes
        self.counters.frames_out += kind == Kind.DATA

    def _acknowledge(self, number: int) -> None:
        if number > self._taken:
            raise PeerError(
                f"Cannot continue with this peer: it acknowledges frame {number}, the last was {self._taken}."
            )
        for frames in (self._flight, self._queue):  # after a break, what had been in flight is in the queue
            while frames and frames[0].number <= number:
                frame = frames.popleft()
                if frames is self._flight:
                    self._flight_bytes -= frame.cost_bytes
                else:
                    self._queue_bytes -= frame.cost_bytes
                if frame.sent is not None:
                    frame.sent()
        self._acknowledged = max(self._acknowledged, number)

    # -- receiving -----------------------------------------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """The buffer for the next received bytes.

        Raises:
            PeerError: if this connection has to be given up.
        """
        return self._reader.get_buffer()

    @property
    def missing_bytes(self) -> int:
        """The bytes that are missing until something can be done with them; at least 1."""
        return self._reader.missing_bytes

    def buffer_updated(self, size_bytes: int) -> None:
        """Take in what was received into `get_buffer()`.

        Raises:
            PeerError: if this connection has to be given up.
            SessionOver: if the session has to.
        """
        self._silent_s = self._unanswered_s = 0.0
        self.counters.bytes_in += size_bytes
        reader = self._reader
        if not reader.buffer_updated(size_bytes):
            return
        # Its owner may end the link in any callback; then there is another reader.
        while (frame := reader.next_frame()) is not None and reader is self._reader:
            self._take_in(frame)

    def _take_in(self, frame: Frame) -> None:
        self._stuck_s = 0.0
        if frame.received > self._acknowledged:
            self._acknowledge(frame.received)
        if frame.kind == Kind.DATA or frame.kind == Kind.END:
            self._owes_ack |= frame.urgent or frame.kind == Kind.END
            if not self._is_next(frame):
                self.counters.repeated += 1
                return
            self.received, self._half, self._strikes = frame.number, None, 0
            if frame.kind == Kind.END:
                self.ended = True
                return
            self.counters.frames_in += 1
            try:
                self.receiver.received(frame.metadata, memoryview(frame.body))
            except PeerError as error:
                raise SessionOver(error) from error
        elif frame.kind == Kind.FAIL:
            reason = frame.metadata[:_MAX_REASON_BYTES].decode(errors="replace")
            raise SessionOver(PeerError(f"it ended the session: {reason}"))
        elif frame.kind != Kind.ACK:
            raise PeerError("Cannot continue with this peer: it sent a frame that belongs to no session.")

    def release_body(self) -> None:
        """Write no more into the memory of the body that is being received: its owner has another use for it."""
        if self._half is not None:
            self._half = _Half(self._half.metadata, memoryview(bytearray(self._half.body.nbytes)))
            self._reader.move_body(self._half.body)

    def _is_next(self, frame: Frame) -> bool:
        if self.ended or frame.number > self.received + 1:
            raise PeerError(f"Cannot continue with this peer: frame {frame.number} came after frame {self.received}.")
        return frame.number == self.received + 1

    def _place(self, frame: Frame, size_bytes: int) -> memoryview | None:
        if frame.kind != Kind.DATA:
            raise PeerError("Cannot continue with this peer: it sent a body where none belongs.")
        if not self._is_next(frame):
            return None
        half = self._half
        if half is not None:
            # A body is asked for once, so what comes again has to be the same.
            if half.metadata != frame.metadata or half.body.nbytes != size_bytes:
                raise PeerError(f"Cannot continue with this peer: it sent another frame {frame.number} than before.")
            return half.body
        try:
            body = memoryview(self.receiver.destination(frame.metadata, size_bytes)).cast("B")
        except PeerError as error:
            raise SessionOver(error) from error
        self._half = _Half(frame.metadata, body)
        return body

    # -- the connection ------------------------------------------------------------------------------------------

    def resumed(self, received: int) -> None:
        """Resume on a new connection; the other side has received all frames up to `received`.

        Raises:
            PeerError: if that cannot be.
        """
        self.broke()
        self._gone_s = None
        if received < self._acknowledged:
            raise PeerError(
                f"Cannot continue with this peer: it has received frame {self._acknowledged}, and now says {received}."
            )
        self._acknowledge(received)
        self._owes_ack = True  # a word at once: the other side has waited for one

    def broke(self) -> None:
        """The connection is gone. What was not acknowledged is to be taken again."""
        self._reader = self._new_reader()
        self._queue.extendleft(reversed(self._flight))
        self._queue_bytes += self._flight_bytes
        self._flight.clear()
        self._flight_bytes = 0

    def hung_up(self) -> None:
        """The other side ended the connection; it is waited for, but not for long."""
        self._gone_s = 0.0

    @property
    def has_hung_up(self) -> bool:
        """Whether the other side ended the connection, and is waited for."""
        return self._gone_s is not None

    def forget(self) -> None:
        """The session has ended: let go of all bodies."""
        self.broke()
        self._queue.clear()
        self._queue_bytes, self._half = 0, None

    def strike(self, error: PeerError) -> None:
        """The connection had to be given up because of `error`.

        Raises:
            SessionOver: if that has happened too often.
        """
        self._strikes += 1
        if self._strikes >= _STRIKES:
            raise SessionOver(error) from error

    def passed(self, elapsed_s: float, *, listening: bool = True, answered_s: float = math.inf) -> None:
        """`elapsed_s` more have passed; if it is time for a word, `take` has one.

        Args:
            listening: whether something could have been heard.
            answered_s: seconds since the other side's machine last answered for it; infinite if that is not known.

        Raises:
            SessionOver: if the other side has been silent, or has not come back, for too long.
            PeerError: if this connection has to be given up.
        """
        timeout_s = self.limits.timeout.total_seconds()
        heard_nothing_s = elapsed_s if listening else 0.0
        self._silent_s += heard_nothing_s
        self._unanswered_s = min(self._unanswered_s + heard_nothing_s, answered_s)
        self._mute_s += elapsed_s
        grace_s = self.limits.grace.total_seconds()
        if self._gone_s is not None:
            self._gone_s += elapsed_s
            if self._gone_s > grace_s - 0.5 * timeout_s / TICKS:
                raise SessionOver(NetworkError(f"it hung up, and was not back within {grace_s:g} s"))
        if self._unanswered_s > timeout_s * (1 - 1 / TICKS):
            raise SessionOver(NetworkError(f"it has been silent for {timeout_s:g} s"))
        if self._mute_s >= timeout_s / _BEATS:
            self._owes_ack = True
        if not listening or not self._reader.begun or self.counters.bytes_in >= self._stuck_at_bytes + _TRICKLE_BYTES:
            self._stuck_s, self._stuck_at_bytes = 0.0, self.counters.bytes_in
        self._stuck_s += elapsed_s
        if self._stuck_s > timeout_s / 2 and self._silent_s < timeout_s / 2:
            self._stuck_s = 0.0
            raise PeerError("Cannot continue with this peer: a frame that it has begun does not continue.")

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard."""
        return self._silent_s

    @property
    def unanswered_s(self) -> float:
        """Seconds since anything was heard of the other side, or its machine answered for it."""
        return self._unanswered_s

    def _new_reader(self) -> Reader:
        limits = self.limits
        return Reader(self._place, max_metadata_bytes=limits.max_metadata_bytes, max_body_bytes=limits.max_body_bytes)


class SessionOver(Exception):
    """The session cannot go on.

    Args:
        reason: what its owner is told.
    """

    def __init__(self, reason: OffbeatError) -> None:
        super().__init__(str(reason))
        self.reason = reason
