"""The codec of messages between workers and the shards of a parameter server; bodies are raw elements of blocks.

worker                                          shard (the coordinator is the first)
  | -- OpenModel(model) + ModelInfo -----------> |   once per model, to the coordinator when all others have opened it
  | <----- ModelOpened(wants_values) ----------- |
  | -- InitBlock(block) + values --------------> |   the first worker, where the shard has none
  | -- Announce(clock, weight, hyper) ---------> |   to the coordinator: it has computed a contribution
  | <----- Granted(clock) ---------------------- |   it may push; not if it was told not to wait for that
  | -- PushBlock(clock, block) + gradient -----> |   to each block's shard
  | <----- ReleaseWorker(step, version, ...) --- |   released for the next step
  | <----- PullBlock(step, block) + values ----- |   from each block's shard, as each is updated
  | -- PullOrder(blocks) ----------------------> |   to each shard: which first, where several are due at a time
  | -- PullDone(step) -------------------------> |   all blocks are here
  | -- AskAllWorkers(number, question, ...) ---> |   a collective question beside the data
  | <----- AllWorkersAnswer(number, ...) ------- |
  | -- FetchState(model) ----------------------> |   to each shard: the optimizer's state, for a checkpoint
  | <----- StatePart(block, name, key) + elements|   one per tensor, then TransferDone
  | -- RequestReplacement(model) --------------> |   the first worker, to the coordinator: it has other parameters
  | <----- MayPut(refused) --------------------- |   from each shard, when all others wait for that
  | -- PutState(block, name, key) + elements --> |   the state back; also the values. Then PutStateDone, and
  | <----- TransferDone ------------------------ |   the answer to that
  | <----- SnapshotAck(clock) ------------------ |   its contributions before that one are in two snapshots
  | <----- Notice(text) ------------------------ |   something for people
  | <----- Refused(reason) --------------------- |   what the worker asked cannot be; the session ends
  | -- TellStatus(status) ---------------------> |   to the coordinator, for whoever looks
  | -- LeaveAfter(step) -----------------------> |   to the coordinator: it was asked to leave, and ends in order

A validator says the same, but for what is about leased data, and is told when the workers are done:
  | <----- TrainingOver ------------------------ |
How it finds out losses is said in `loss_scores`.

What the other shards say to the coordinator (`FromShard`), and what it tells them (`FromCoordinator`), is in `shards`.
How another plan comes to hold is said in `plan_swap`. A worker that comes back says so in its `ModelInfo` (see
`offbeat.coordinator.reconnect`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, get_args

import msgspec

from offbeat.errors import PeerError
from offbeat.protocol.checkpoints import (
    FetchState,
    MayPut,
    PutState,
    PutStateDone,
    RequestReplacement,
    StatePart,
    TransferDone,
)
from offbeat.protocol.data_leases import FromData, ToData
from offbeat.protocol.decoding import read_message
from offbeat.protocol.loss_scores import (
    ContributionsScored,
    FetchContribution,
    FetchedBlock,
    ScoreContributions,
)
from offbeat.protocol.plan_swap import AdoptPlan, PlanAgreement, PlanProposed, SwapPlan, SwapResult
from offbeat.protocol.rank_reservation import RanksReserved, ReserveRanks
from offbeat.protocol.shards import (
    AdmitWorker,
    AllowReplacement,
    ApplyContributions,
    BeginLife,
    CommitUpdates,
    DropContribution,
    ModelFilled,
    PushDone,
    PushNearlyDone,
    PushOverdue,
    RegisterShard,
    ReleaseFromShard,
    SaveLastSnapshot,
    ScaleContributions,
    SnapshotMark,
    SnapshotSaved,
    UpdateMeasured,
    WithdrawContribution,
    WorkerDrained,
    WorkerRemoved,
    WorkersUnheard,
)
from offbeat.protocol.status import GetStatus, ModelStatus, StatusReply, TellStatus
from offbeat.protocol.training import (
    AllWorkersAnswer,
    Announce,
    AskAllWorkers,
    Evicted,
    Granted,
    InitBlock,
    LeaveAfter,
    ModelInfo,
    ModelOpened,
    Notice,
    OpenModel,
    PullBlock,
    PullDone,
    PullOrder,
    PushBlock,
    Refused,
    ReleaseWorker,
    SnapshotAck,
    TrainingOver,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

FromValidator = FetchContribution | ContributionsScored  # and from no worker
FromWorker = (
    OpenModel
    | InitBlock
    | Announce
    | PushBlock
    | PullOrder
    | PullDone
    | GetStatus
    | TellStatus
    | AskAllWorkers
    | FetchState
    | RequestReplacement
    | PutState
    | PutStateDone
    | FromData
    | SwapPlan
    | PlanAgreement
    | LeaveAfter
    | FromValidator
)
FromShard = (
    RegisterShard
    | ModelFilled
    | PushNearlyDone
    | PushDone
    | UpdateMeasured
    | PushOverdue
    | WorkerDrained
    | SaveLastSnapshot
    | SnapshotSaved
    | WorkersUnheard
)
# Of the coordinator, to all shards.
Decision = (
    AdmitWorker
    | ApplyContributions
    | ScaleContributions
    | DropContribution
    | ReleaseFromShard
    | WorkerRemoved
    | CommitUpdates
    | WithdrawContribution
    | AllowReplacement
)
FromCoordinator = Decision | BeginLife | SnapshotMark | Refused | AdoptPlan
ToWorker = (
    ModelOpened
    | Granted
    | ReleaseWorker
    | PullBlock
    | Evicted
    | AllWorkersAnswer
    | StatusReply
    | Refused
    | SnapshotAck
    | Notice
    | StatePart
    | TransferDone
    | MayPut
    | ToData
    | PlanProposed
    | AdoptPlan
    | SwapResult
    | RanksReserved
    | TrainingOver
    | ScoreContributions
    | FetchedBlock
)
# What each role may say to a shard; see `offbeat.wire.messages.HandshakeClaim`.
SAYS: dict[str, tuple[type, ...]] = {
    "worker": tuple(kind for kind in get_args(FromWorker) if kind not in get_args(FromValidator)),
    "validator": tuple(kind for kind in get_args(FromWorker) if kind not in get_args(FromData)),
    "shard": get_args(FromShard),
    "onlooker": (GetStatus,),
    "operator": (GetStatus, SwapPlan, ReserveRanks),
}

_encode = msgspec.msgpack.Encoder().encode
_from_peer = msgspec.msgpack.Decoder(FromWorker | FromShard | ReserveRanks).decode
_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
_details = msgspec.msgpack.Decoder(ModelInfo).decode
_status_reply = msgspec.msgpack.Decoder(StatusReply).decode
_statuses = msgspec.msgpack.Decoder(Annotated[tuple[ModelStatus, ...], msgspec.Meta(max_length=256)]).decode


def pack(
    message: FromWorker | ReserveRanks | ToWorker | FromShard | FromCoordinator | ModelInfo | tuple[ModelStatus, ...],
) -> bytes:
    """The message as a frame's metadata, or body."""
    return _encode(message)


def details_of(body: bytes | bytearray) -> ModelInfo:
    """Read a worker's `ModelInfo`.

    Raises:
        PeerError: if it is not that.
    """
    details: ModelInfo = read_message(_details, body, "this worker's model")
    if any(piece.name >= len(details.names) for block in details.blocks for piece in block.pieces):
        raise PeerError("Cannot understand this worker's model: a piece belongs to no parameter.")
    return details


def statuses_of(body: bytes | bytearray | memoryview) -> tuple[ModelStatus, ...]:
    """The status of every model.

    Raises:
        PeerError: if it is not that.
    """
    statuses: tuple[ModelStatus, ...] = read_message(_statuses, body, "what this server sees")
    return statuses


def status_reply_of(metadata: bytes, body: Buffer) -> tuple[int, tuple[ModelStatus, ...]]:
    """Read the answer to `GetStatus`: its number, and the status of every model.

    Raises:
        PeerError: if it is no such answer.
    """
    reply: StatusReply = read_message(_status_reply, metadata, "what this server sees")
    return reply.number, statuses_of(memoryview(body))


def from_peer(metadata: bytes) -> FromWorker | FromShard | ReserveRanks:
    """Read a message from a worker, an onlooker or an operator, or from another shard to the coordinator.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: FromWorker | FromShard | ReserveRanks = read_message(_from_peer, metadata, "this peer")
    return message


def from_coordinator(metadata: bytes) -> FromCoordinator:
    """Read a message from the coordinator to another shard.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: FromCoordinator = read_message(_from_coordinator, metadata, "the coordinator")
    return message


def to_worker(metadata: bytes) -> ToWorker:
    """Read a message from a shard to a worker.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: ToWorker = read_message(_to_worker, metadata, "this server")
    return message
