"""What workers and shards of a parameter server say to each other; bodies are raw elements of blocks.

worker                                       shard (the coordinator is the first)
  | -- Open(model) + details -----------------> |   once per model, to the coordinator when all others have opened it
  | <----- Opened(wants_values) --------------- |
  | -- Fill(block) + values ------------------> |   the first worker, where the shard has none
  | -- Announce(clock, weight, hyper) --------> |   to the coordinator: it has computed a contribution
  | <----- Granted(clock) --------------------- |   it may push; not if it was told not to wait for that
  | -- Part(clock, block) + gradient ---------> |   to each block's shard
  | <----- Go(step, version, staleness) ------- |   released for the next step
  | <----- Values(step, block) + values ------- |   from each block's shard, as each is updated
  | -- Pulled(step) --------------------------> |   all blocks are here
  | -- Ask(number, question, ...) ------------> |   a collective question beside the data
  | <----- Answer(number, ...) ---------------- |
  | -- Fetch(model) --------------------------> |   to each shard: the optimizer's state, for a checkpoint
  | <----- Piece(block, name, key) + elements - |   one per tensor, then Done
  | -- Put(block, name, key) + elements ------> |   the same back; also the values. Then PutAll, and Done for that
  | <----- Safe(clock) ------------------------ |   its contributions before that one are in a snapshot
  | <----- Told(text) ------------------------- |   something for people
  | <----- Refused(reason) -------------------- |   what the worker asked cannot be; the session ends

The other shards say Enlist, Filled, Nearly, Whole, Save and Saved to the coordinator, and it tells them what it
decides: Begin, Admit, Applied, Dropped, Released, Gone, Mark. Who comes back says so in its details (see
`offbeat.fabric.server.resume`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec

from offbeat.errors import PeerError
from offbeat.fabric.server.deals import FromData, ToData, Used
from offbeat.fabric.server.optimizers import Hyper, Name, OptimizerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """A worker wants to train a model; the body is its `Details`, which may be long.

    Args:
        entry: how often this worker has come to the job, itself included.
    """

    model: _Model
    entry: _Count = 0


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """A question that all were asked, and its answer."""

    number: _Count
    numbers: Annotated[tuple[float, ...], msgspec.Meta(max_length=8)]
    workers: _Count


class Back(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says that took part before.

    Args:
        life: of the server, as it last was here.
        clock: number of the contribution it computes, or holds.
        version: of the parameters it has.
        holds: it has a contribution, which was not acknowledged.
        waits: it does not compute, so its parameters may be overwritten.
        weight: samples of its last contribution; None before the first.
        done: contributions that were acknowledged, and are in no snapshot that it knows of: number and samples.
        answered: the last questions it has the answers of.
    """

    life: _Count
    clock: _Count
    version: _Count
    holds: bool
    waits: bool
    weight: Annotated[float, msgspec.Meta(ge=0, lt=1e15)] | None = None
    done: Annotated[tuple[tuple[_Count, float], ...], msgspec.Meta(max_length=1 << 16)] = ()
    answered: Annotated[tuple[Answered, ...], msgspec.Meta(max_length=64)] = ()


class Details(msgspec.Struct, frozen=True):
    """What a worker says about its model.

    Args:
        world: how many workers the job begins with.
        shards: how many there are.
        holders: over how many of them the model is dealt; a small one has fewer blocks than there are shards.
        plan: as TOML.
        layout: digest of the model's parameters and of how they are cut.
        names: of all its parameters.
        blocks: those that this shard holds.
        back: if the worker took part before.
    """

    world: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    holders: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    plan: _Text
    layout: _Digest
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1 << 20)]
    blocks: Annotated[tuple[BlockOf, ...], msgspec.Meta(max_length=1 << 20)]
    optimizer: OptimizerSpec
    back: Back | None = None


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The worker is taken in.

    Args:
        wants_values: send `Fill` for each block of this shard.
        life: of the server.
        survives: it keeps snapshots, so it is worth while to wait for it when it is gone.
        later: not yet, because what it computes is outdated: open again when the parameters may be overwritten.
    """

    model: _Model
    wants_values: bool
    life: _Count = 0
    survives: bool = False
    later: bool = False


class Fill(msgspec.Struct, tag=True, frozen=True):
    model: _Model
    block: _Count


class About(msgspec.Struct, frozen=True):
    """What is to be known about a contribution.

    Args:
        weight: samples it was computed from.
        hyper: the optimizer's hyper-parameters, by group.
        unused: parameters without a gradient, as indices into `Details.names`.
        change: it is a change of the parameters and no gradient; then `hyper` has one group, that of the outer
            optimizer, which is empty for a plain average.
    """

    weight: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
    hyper: Annotated[tuple[Hyper, ...], msgspec.Meta(max_length=10_000)]
    unused: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)] = ()
    used: Used = ()
    change: bool = False


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
        counted: whether the contribution is in an update; False if it was dropped, or there was none.
        again: announce the contribution that you hold once more, under the number `step`.
        waits: whether the worker waits until it is granted to push what it computes; else it pushes at once.
    """

    model: _Model
    step: _Count
    version: _Count
    staleness: _Count
    values: bool = True
    counted: bool = False
    again: bool = False
    waits: bool = True


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
        note: what happened to the server, in words; "" if nothing did.
        pace: who paces the rounds and why, in a sentence; "" if that is not known here.
    """

    model: _Model
    policy: _Text
    version: _Count
    started: bool
    running_s: float
    workers: Annotated[tuple[Seen, ...], msgspec.Meta(max_length=4096)]
    note: _Text = ""
    pace: _Text = ""


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


class Safe(msgspec.Struct, tag=True, frozen=True):
    """The worker's contributions before number `clock` are in a snapshot of every shard."""

    model: _Model
    clock: _Count


class Told(msgspec.Struct, tag=True, frozen=True):
    """Something that people should know."""

    text: _Text


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Send the optimizer's state in all blocks of a model that are here."""

    model: _Model
    number: _Count


class Piece(msgspec.Struct, tag=True, frozen=True):
    """A part of the optimizer's state; the body is its elements.

    Args:
        number: of the `Fetch`.
        name: of the parameter, as an index into `Details.names`.
        single: whether it is one number for all elements, such as a count of steps.
    """

    model: _Model
    number: _Count
    block: _Count
    name: _Count
    key: Annotated[str, msgspec.Meta(max_length=64)]
    dtype: _Dtype
    single: bool


class Put(msgspec.Struct, tag=True, frozen=True):
    """Take over a part of the optimizer's state; or, without a key, the values of the whole block."""

    model: _Model
    block: _Count
    name: _Count = 0
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""
    dtype: _Dtype = ""
    single: bool = False


class PutAll(msgspec.Struct, tag=True, frozen=True):
    """Everything was put."""

    model: _Model
    number: _Count


class Done(msgspec.Struct, tag=True, frozen=True):
    """A `Fetch` or a `PutAll` is done."""

    number: _Count


class Enlist(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: it takes part from now on.

    Args:
        held: number and life of each snapshot that it could go on from.
        least: later snapshots have to have greater numbers.
    """

    held: Annotated[tuple[tuple[_Count, _Count], ...], msgspec.Meta(max_length=16)] = ()
    least: _Count = 0


class Begin(msgspec.Struct, tag=True, frozen=True):
    """From the coordinator to a shard: its life begins.

    Args:
        life: of the server.
        snapshot: number and life of the one to go on from; None for none.
    """

    life: _Count
    snapshot: tuple[_Count, _Count] | None = None


class Save(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: it is about to end, and would like to leave a snapshot."""


class Saved(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: a snapshot is written, or could not be.

    Args:
        cost_s: what it took, from the first copy to the disk.
    """

    number: _Count
    well: bool
    cost_s: float


class Mark(msgspec.Struct, tag=True, frozen=True):
    """Keep all models as they are after what was decided so far.

    Args:
        number: of the snapshot.
        keep: number and life of the last one that all shards have, which is to stay.
        is_last: nothing is decided any more, because a shard is about to end.
    """

    number: _Count
    keep: tuple[_Count, _Count] | None = None
    is_last: bool = False


class Filled(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: it has the first values of all its blocks."""

    model: _Model


class Nearly(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: of its blocks of a contribution no more than a tenth is to come."""

    model: _Model
    worker: _Count
    clock: _Count


class Whole(msgspec.Struct, tag=True, frozen=True):
    """From a shard to the coordinator: all its blocks of a contribution have arrived."""

    model: _Model
    worker: _Count
    clock: _Count


class Admit(msgspec.Struct, tag=True, frozen=True):
    """The worker takes part; its next contribution has the number `clock`.

    Args:
        entry: of its `Open`; what was meant for an earlier one is not sent.
    """

    model: _Model
    worker: _Count
    clock: _Count
    entry: _Count = 0


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


FromWorker = Open | Fill | Announce | Part | Pulled | Look | Ask | Fetch | Put | PutAll | FromData
FromShard = Enlist | Filled | Nearly | Whole | Save | Saved
Decision = Admit | Applied | Dropped | Released | Gone  # of the coordinator, to all shards
FromChief = Decision | Begin | Mark
ToWorker = Opened | Granted | Go | Values | Evicted | Answer | Sight | Refused | Safe | Told | Piece | Done | ToData
# What each role may say to a shard; see `offbeat.wire.messages.Claim`.
SAYS: dict[str, tuple[type, ...]] = {"worker": get_args(FromWorker), "shard": get_args(FromShard), "onlooker": (Look,)}
_encode = msgspec.msgpack.Encoder().encode
_from_guest = msgspec.msgpack.Decoder(FromWorker | FromShard).decode
_from_chief = msgspec.msgpack.Decoder(FromChief).decode
_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
_details = msgspec.msgpack.Decoder(Details).decode
_scenes = msgspec.msgpack.Decoder(Annotated[tuple[Scene, ...], msgspec.Meta(max_length=256)]).decode


def pack(message: FromWorker | ToWorker | FromShard | FromChief | Details | tuple[Scene, ...]) -> bytes:
    """The message as a frame's metadata, or body."""
    return _encode(message)


def details_of(body: bytes | bytearray) -> Details:
    """What a worker says about its model.

    Raises:
        PeerError: if it is not that.
    """
    details: Details = _read(_details, body, "this worker's model")
    if any(piece.name >= len(details.names) for block in details.blocks for piece in block.pieces):
        raise PeerError("Cannot understand this worker's model: a piece belongs to no parameter.")
    return details


def scenes_of(body: bytes | bytearray | memoryview) -> tuple[Scene, ...]:
    """What the coordinator sees.

    Raises:
        PeerError: if it is not that.
    """
    scenes: tuple[Scene, ...] = _read(_scenes, body, "what this server sees")
    return scenes


def from_guest(metadata: bytes) -> FromWorker | FromShard:
    """What a worker or an onlooker says, or another shard to the coordinator.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: FromWorker | FromShard = _read(_from_guest, metadata, "this peer")
    return message


def from_chief(metadata: bytes) -> FromChief:
    """What the coordinator says to another shard.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: FromChief = _read(_from_chief, metadata, "the coordinator")
    return message


def to_worker(metadata: bytes) -> ToWorker:
    """What a shard says.

    Raises:
        PeerError: if it is none of the declared messages.
    """
    message: ToWorker = _read(_to_worker, metadata, "this server")
    return message


def _read(decode: Callable[[Any], Any], data: bytes | bytearray | memoryview, what: str) -> Any:
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError: text that is not UTF-8
        raise PeerError(f"Cannot understand {what}: {error}.") from error
