"""What is said on the control connection.

    peer                                    hub
      | <----------- Hello(nonce) ----------- |
      | -- Join(rank, nonce, proof) --------> |   both prove that they know the run's token, without sending it
      | <----------- Welcome(proof) --------- |
      | -- Report(words) -------------------> |   whenever they change, and once a second
      | -- Ask(number, stacks) -------------> |
      | <----------- Show ------------------- |   to the peers whose stack is wanted; they answer with a Report
      | <----------- Roster(number, words) -- |
      | -- Bye -----------------------------> |
      | <----------- Roster(0, words) ------- |   when the hub's own worker has ended

Between a worker and its own sentinel, over a socket pair: Config, Ready, Ask, Roster, Bye.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

import msgspec

from offbeat.errors import PeerError
from offbeat.wire.frame import Frame, encode

MAX_TEXT = 8192
MAX_WORLD = 4096

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one worker.

    Args:
        phase: "starting", "computing", "exchanging" (waits inside an exchange of gradients), "waiting" (for anything
            else), "raised", "lost" (raised because of another worker) or "finished".
        operation: what it waits for, if it waits.
        step: exchanges it has completed, of all its models together.
        bucket, buckets: which one it waits for, of how many; -1 if it is none.
        stamp: batches it has drawn.
        since_s: seconds it has been in this phase.
        process: "running", "paused", "dead" or "unreachable".
        state_since_s: seconds the process has been so.
        heartbeat_age_s: seconds since a thread of it last ran.
        busy: share of one core it used lately.
        traceback: of the exception that ended it, or "".
        stack: where its threads are, if that was asked for, or "".
        age_s: seconds since its sentinel said so; filled in by the hub.
    """

    rank: Rank
    host: Name = ""
    pid: int = 0
    phase: Name = "starting"
    operation: Name = ""
    step: int = -1
    model: int = 0
    bucket: int = -1
    buckets: int = 0
    stamp: int = 0
    since_s: float = 0.0
    process: Name = "running"
    state_since_s: float = 0.0
    heartbeat_age_s: float = 0.0
    busy: float = 0.0
    traceback: Text = ""
    stack: Text = ""
    age_s: float = 0.0


class Hello(msgspec.Struct, tag=True, frozen=True):
    nonce: Nonce


class Join(msgspec.Struct, tag=True, frozen=True):
    rank: Rank
    nonce: Nonce
    proof: Nonce


class Welcome(msgspec.Struct, tag=True, frozen=True):
    proof: Nonce


class Report(msgspec.Struct, tag=True, frozen=True):
    words: Words


class Ask(msgspec.Struct, tag=True, frozen=True):
    """`stacks`: ranks whose Python stack is wanted as well. `patience_s`: how long the answer may take."""

    number: int
    stacks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=16)] = ()
    patience_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 2.0


class Show(msgspec.Struct, tag=True, frozen=True):
    """Report with the stack."""


class Roster(msgspec.Struct, tag=True, frozen=True):
    """`words`: of every worker, by rank. `hub_lost_s`: for how many seconds the hub has been out of reach.

    Number 0 answers nobody: it is the hub's farewell, with the last words of its own worker.
    """

    number: int
    words: Annotated[tuple[Words, ...], msgspec.Meta(max_length=MAX_WORLD)]
    hub_lost_s: float | None = None


class Bye(msgspec.Struct, tag=True, frozen=True):
    """The worker is done; `well` if that was to be expected, else its last words say why."""

    well: bool = True


class Config(msgspec.Struct, tag=True, frozen=True):
    """From a worker to its sentinel; `hub` is None where the hub is to be opened at `bind`."""

    rank: Rank
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
    pid: int
    host: Name
    token: bytes
    hub: Name | None
    bind: Name


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the sentinel to its worker; `hub` is "address:port", `error` why there is none."""

    hub: Name = ""
    error: Text = ""


Message = Hello | Join | Welcome | Report | Ask | Show | Roster | Bye | Config | Ready
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """The message as a frame's bytes."""
    return encode(Frame(_encoder.encode(message)))


def unpack(frame: Frame) -> Message:
    """The message in a frame.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    try:
        message: Message = _decoder.decode(frame.metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"Cannot understand this peer: {error}.") from error
    return message


def proof(token: bytes, side: str, rank: int, first: bytes, second: bytes) -> bytes:
    """HMAC-SHA256 over who says it, for which rank, and both nonces."""
    return hmac.new(token, b"|".join((side.encode(), str(rank).encode(), first, second)), hashlib.sha256).digest()
