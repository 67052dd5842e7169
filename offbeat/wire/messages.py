"""Messages of the control connection, and of the handshake that opens a link.

    peer                                    hub
      | <----------- Hello(nonce) ----------- |
      | -- Join(claim, nonce, proof) -------> |   both prove that they know the run's token: see `handshake`
      | <----------- Welcome(proof) --------- |
      | -- Report(words, status) -----------> |   whenever they change, and once a second, then with its status
      | -- Ask(number, stacks) -------------> |
      | <----------- Show ------------------- |   to the peers whose stack is wanted; they answer with a Report
      | <----------- Roster(number, words) -- |
      | -- Bye -----------------------------> |
      | <----------- Roster(0, words) ------- |   when the hub's own worker has ended

onlooker (`HandshakeClaim.role`)                 hub
      | -- AskAll(number) ------------------> |   may say nothing else
      | <----------- Overview(number, ...) -- |
      | <----------- Bye -------------------- |   the job has ended

Between a worker and its own sentinel, over a socket pair: Config, Ready, Ask, Roster, Bye. A link is opened by the same
Hello, Join and Welcome, or by Refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from offbeat.protocol.decoding import read_message
from offbeat.protocol.worker_status import TrainingStatus
from offbeat.wire.frame import Frame, encode

MAX_TEXT = 8192
MAX_WORLD = 4096

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD)]
Role = Literal["worker", "validator", "shard", "onlooker", "operator", "peer"]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The latest known state of one worker.

    Args:
        phase: "starting", "computing", "exchanging" (waits inside an exchange of gradients), "waiting" (for anything
            else), "busy" (with something that needs no other), "raised", "lost" (raised because of another worker) or
            "finished".
        operation: what it waits for, or is busy with.
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
        residual: the norm of what it has computed and not sent; filled in by the hub.
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
    residual: float = 0.0
    age_s: float = 0.0


class Hello(msgspec.Struct, tag=True, frozen=True):
    nonce: Nonce


class HandshakeClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The claim of a dialler: its rank and role.

    Args:
        rank: a worker's or a validator's; of no meaning for others.
        role: what it comes for; who takes it in takes nothing else from it.
        job: the name of what it belongs to; "" on the control connection.
        session: the link's, drawn by the one that dials; b"" on the control connection.
        received: number of the last frame it has received in this session.
        resumes: it was welcome in this session before.
    """

    rank: Rank
    role: Role = "worker"
    job: Name = ""
    session: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    received: Number = 0
    resumes: bool = False


class Join(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """`role_proof`: that whoever dials knows the validators' token, too; b"" if it does not."""

    claim: HandshakeClaim
    nonce: Nonce
    proof: Nonce
    role_proof: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """`received`: number of the last frame received in this session."""

    proof: Nonce
    received: Number = 0


class HandshakeRefused(msgspec.Struct, tag=True, frozen=True):
    """A refusal with its reason, only for a dialler that has proved that it may know why."""

    proof: Nonce
    reason: Text


class ReportWords(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    words: WorkerReport
    status: TrainingStatus | None = None


class AskRoster(msgspec.Struct, tag=True, frozen=True):
    """`stacks`: ranks whose Python stack is wanted as well. `patience_s`: how long the answer may take."""

    number: int
    stacks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=16)] = ()
    patience_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 2.0


class Show(msgspec.Struct, tag=True, frozen=True):
    """Report with the stack."""


class ClusterReport(msgspec.Struct, tag=True, frozen=True):
    """`words`: of every worker, by rank. `hub_lost_s`: for how many seconds the hub has been out of reach.

    Number 0 answers nobody: it is the hub's farewell, with the last words of its own worker.
    """

    number: int
    words: Annotated[tuple[WorkerReport, ...], msgspec.Meta(max_length=MAX_WORLD)]
    hub_lost_s: float | None = None


class AskAll(msgspec.Struct, tag=True, frozen=True):
    """A request for the state of all workers."""

    number: Number


class Overview(msgspec.Struct, tag=True, frozen=True):
    """The answer to the question of the same number.

    Args:
        words: of every worker, by rank.
        statuses: by rank, of those that have said any.
        world: how many workers the job began with.
        running_s: seconds since the hub was opened.
    """

    number: Number
    words: Annotated[tuple[WorkerReport, ...], msgspec.Meta(max_length=MAX_WORLD)]
    statuses: Annotated[dict[Rank, TrainingStatus], msgspec.Meta(max_length=MAX_WORLD)]
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
    running_s: float


class Bye(msgspec.Struct, tag=True, frozen=True):
    """The worker is done; `well` if that was to be expected, else its last words say why."""

    well: bool = True


class Config(msgspec.Struct, tag=True, frozen=True):
    """Worker to its sentinel; `hub` is None where the hub is to be opened at `bind`.

    `stays_without_worker`: the others go on without this worker, so the hub stays as long as one of them is connected.
    """

    rank: Rank
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
    pid: int
    host: Name
    token: bytes
    hub: Name | None
    bind: Name
    stays_without_worker: bool = msgspec.field(default=False, name="outlives")


class SentinelReady(msgspec.Struct, tag=True, frozen=True):
    """Sentinel to its worker; `hub` is "address:port", `error` why there is none."""

    hub: Name = ""
    error: Text = ""


Message = (
    Hello
    | Join
    | Welcome
    | HandshakeRefused
    | ReportWords
    | AskRoster
    | Show
    | ClusterReport
    | AskAll
    | Overview
    | Bye
    | Config
    | SentinelReady
)
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
    message: Message = read_message(_decoder.decode, frame.metadata, "this peer")
    return message
