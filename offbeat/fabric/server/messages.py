"""What workers and shards of a parameter server say to each other; bodies are raw elements of blocks.

worker                                       shard (the coordinator is the first)
  | -- Open(model) + details -----------------> |   to every shard, once per model
  | <----- Opened(wants_values) --------------- |
  | -- Fill(block) + values ------------------> |   the first worker, where the shard has none
  | -- Announce(clock, weight, hyper) --------> |   to the coordinator: it has computed a contribution
  | <----- Granted(clock) --------------------- |   it may push
  | -- Part(clock, block) + gradient ---------> |   to each block's shard
  | <----- Go(step, version, staleness) ------- |   released for the next step
  | <----- Values(step, block) + values ------- |   from each block's shard, as each is updated
  | -- Pulled(step) --------------------------> |   all blocks are here
  | -- Ask(number, question, ...) ------------> |   a collective question beside the data
  | <----- Answer(number, ...) ---------------- |
  | <----- Refused(reason) -------------------- |   what the worker asked cannot be; the session ends

The other shards say Enlist, Filled and Whole to the coordinator, and it tells them what it decides: Admit, Applied,
Dropped, Released, Gone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.errors import PeerError
from offbeat.fabric.server.optimizers import Hyper, Name, OptimizerSpec

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Model = Annotated[int, msgspec.Meta(ge=0, lt=256)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Digest = Annotated[str, msgspec.Meta(max_length=64)]
_Dtype = Annotated[str, msgspec.Meta(max_length=16)]


class PieceOf(msgspec.Struct, frozen=True, array_like=True):
    """`offbeat.fabric.server.blocks.Piece` on the wire; `name` is an index into `Details.names`."""

    name: Annotated[int, msgspec.Meta(ge=0)]
    start: _Count
    numel: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class BlockOf(msgspec.Struct, frozen=True, array_like=True):
    """`offbeat.fabric.server.blocks.Block` on the wire."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    dtype: _Dtype
    pieces: Annotated[tuple[PieceOf, ...], msgspec.Meta(min_length=1, max_length=1 << 20)]


class Open(msgspec.Struct, tag=True, frozen=True):
    """A worker wants to train a model; the body is its `Details`, which may be long."""

    model: _Model


class Details(msgspec.Struct, frozen=True):
    """What a worker says about its model.

    Args:
        world: how many workers the job begins with.
        shards: over how many the model is dealt.
        plan: as TOML.
        layout: digest of the model's parameters and of how they are cut.
        names: of all its parameters.
        blocks: those that this shard holds.
    """

    world: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    plan: _Text
    layout: _Digest
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1 << 20)]
    blocks: Annotated[tuple[BlockOf, ...], msgspec.Meta(max_length=1 << 20)]
    optimizer: OptimizerSpec


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The worker is taken in. `wants_values`: send `Fill` for each block of this shard."""

    model: _Model
    wants_values: bool


class Fill(msgspec.Struct, tag=True, frozen=True):
    model: _Model
    block: _Count


class About(msgspec.Struct, frozen=True):
    """What is to be known about a contribution.

    Args:
        weight: samples it was computed from.
        hyper: the optimizer's hyper-parameters, by group.
        unused: parameters without a gradient, as indices into `Details.names`.
    """

    weight: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
    hyper: Annotated[tuple[Hyper, ...], msgspec.Meta(max_length=10_000)]
    unused: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)] = ()


class Announce(msgspec.Struct, tag=True, frozen=True):
    """A contribution has been computed."""

    model: _Model
    clock: _Count
    about: About


class Granted(msgspec.Struct, tag=True, frozen=True):
    model: _Model
    clock: _Count


class Part(msgspec.Struct, tag=True, frozen=True):
    """One block of a contribution; the body has elements of `dtype`."""

    model: _Model
    clock: _Count
    block: _Count
    dtype: _Dtype


class Go(msgspec.Struct, tag=True, frozen=True):
    """Released for `step`.

    Args:
        staleness: updates between what the contribution was computed on and its own.
        values: whether the parameters follow.
    """

    model: _Model
    step: _Count
    version: _Count
    staleness: _Count
    values: bool = True


class Values(msgspec.Struct, tag=True, frozen=True):
    """One block of the parameters for `step`."""

    model: _Model
    step: _Count
    block: _Count
    version: _Count


class Pulled(msgspec.Struct, tag=True, frozen=True):
    model: _Model
    step: _Count


class Evicted(msgspec.Struct, tag=True, frozen=True):
    """The job goes on without this worker."""

    model: _Model
    reason: _Text


class Look(msgspec.Struct, tag=True, frozen=True):
    """Says how it goes; from a worker that waits, or from an onlooker."""

    number: _Count


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Args:
        phase: "computing", "held" (has a contribution and may not push it), "pushing", "pushed" (waits for others),
            "pulling" or "gone".
        step: that it computes or exchanges. clock: its contributions that have arrived.
        since_s: seconds it has been in this phase.
        samples: in its last contribution.
        computing_s, turn_s: moving averages of computing, and of a grant to the parameters being there; 0 if unknown.
        applied, dropped, lost: its contributions.
        staleness, worst: mean and maximum of updates between what a contribution was computed on and its own.
        lead: the most steps it was ahead of another worker when it was released.
        waited_s: from having a contribution to being released, in all.
        here_s: seconds since it first joined.
    """

    worker: _Count
    phase: Annotated[str, msgspec.Meta(max_length=16)]
    step: int = 0
    clock: int = 0
    since_s: float = 0.0
    samples: float = 0.0
    computing_s: float = 0.0
    turn_s: float = 0.0
    applied: int = 0
    dropped: int = 0
    lost: int = 0
    staleness: float = 0.0
    worst: int = 0
    lead: int = 0
    waited_s: float = 0.0
    here_s: float = 0.0


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    Args:
        policy: as Python.
        version: updates so far.
        started: whether all workers of the beginning have come.
        running_s: seconds since the model was opened.
    """

    model: _Model
    policy: _Text
    version: _Count
    started: bool
    running_s: float
    workers: Annotated[tuple[Seen, ...], msgspec.Meta(max_length=4096)]


class Sight(msgspec.Struct, tag=True, frozen=True):
    """The body is the scenes: of some hundred workers they are too long for a frame's metadata."""

    number: _Count


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A question all workers ask together: the sums of their `numbers`. Who asks holds nobody up until it is answered.

    Args:
        refresh: give everybody the newest parameters with the answer; else only who missed an update meanwhile.
    """

    number: _Count
    question: Name
    refresh: bool = False
    numbers: Annotated[tuple[float, ...], msgspec.Meta(max_length=8)] = ()


class Answer(msgspec.Struct, tag=True, frozen=True):
    """`workers`: how many were asked; `disagreement`: what others ask instead, or ""."""

    number: _Count
    numbers: Annotated[tuple[float, ...], msgspec.Meta(max_length=8)]
    workers: _Count
    disagreement: _Text = ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """`disagrees`: it differs from what the other workers say."""

    reason: _Text
    disagrees: bool = False


class Enlist(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: it takes part from now on."""


class Filled(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: it has the first values of all its blocks."""

    model: _Model


class Whole(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: all its blocks of a contribution have arrived."""

    model: _Model
    worker: _Count
    clock: _Count


class Admit(msgspec.Struct, tag=True, frozen=True):
    """The worker takes part; its next contribution has the number `clock`."""

    model: _Model
    worker: _Count
    clock: _Count


class Applied(msgspec.Struct, tag=True, frozen=True):
    """`offbeat.sync.Apply`, with what is to be known about each contribution."""

    model: _Model
    pushes: tuple[tuple[int, int], ...]
    about: tuple[About, ...]
    rate: float
    in_order: bool


class Dropped(msgspec.Struct, tag=True, frozen=True):
    """`coming`: the worker may have begun to push it."""

    model: _Model
    worker: _Count
    clock: _Count
    coming: bool


class Released(msgspec.Struct, tag=True, frozen=True):
    model: _Model
    worker: _Count
    step: _Count


class Gone(msgspec.Struct, tag=True, frozen=True):
    """The worker does not take part any more."""

    model: _Model
    worker: _Count


FromWorker = Open | Fill | Announce | Part | Pulled | Look | Ask
FromShard = Enlist | Filled | Whole
Decision = Admit | Applied | Dropped | Released | Gone  # of the coordinator, to all shards
ToWorker = Opened | Granted | Go | Values | Evicted | Answer | Sight | Refused
_encode = msgspec.msgpack.Encoder().encode
_from_guest = msgspec.msgpack.Decoder(FromWorker | FromShard).decode
_decision = msgspec.msgpack.Decoder(Decision).decode
_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
_details = msgspec.msgpack.Decoder(Details).decode
_scenes = msgspec.msgpack.Decoder(Annotated[tuple[Scene, ...], msgspec.Meta(max_length=256)]).decode


def pack(message: FromWorker | ToWorker | FromShard | Decision | Details | tuple[Scene, ...]) -> bytes:
    """The message as a frame's metadata, or body."""
    return _encode(message)


def details_of(body: bytes | bytearray) -> Details:
    """What a worker says about its model.

    Raises:
        PeerError: if it is not that.
    """
    try:
        details: Details = _details(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"Cannot understand this worker's model: {error}.") from error
    if any(piece.name >= len(details.names) for block in details.blocks for piece in block.pieces):
        raise PeerError("Cannot understand this worker's model: a piece belongs to no parameter.")
    return details


def scenes_of(body: bytes | bytearray | memoryview) -> tuple[Scene, ...]:
    """What the coordinator sees.

    Raises:
        PeerError: if it is not that.
    """
    try:
        scenes: tuple[Scene, ...] = _scenes(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"Cannot understand what this server sees: {error}.") from error
    return scenes


def from_guest(metadata: bytes) -> FromWorker | FromShard:
    """What a worker says, or another shard to the coordinator.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    try:
        message: FromWorker | FromShard = _from_guest(metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"Cannot understand this peer: {error}.") from error
    return message


def decision_of(metadata: bytes) -> Decision:
    """What the coordinator says to another shard.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    try:
        message: Decision = _decision(metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"Cannot understand the coordinator: {error}.") from error
    return message


def to_worker(metadata: bytes) -> ToWorker:
    """What a shard says.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    try:
        message: ToWorker = _to_worker(metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"Cannot understand this server: {error}.") from error
    return message
