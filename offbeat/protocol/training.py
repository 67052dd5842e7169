"""Messages between workers and shards while training: from opening a model to notices for people."""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Digest, Dtype, Model, Samples, Seconds, Secret, Text
from offbeat.protocol.data_leases import Used
from offbeat.protocol.optimizer_spec import Hyper, Name, OptimizerSpec

MOST_REFUSAL = 4096  # characters
MOST_NUMBERS = 128  # of a question


class PieceOf(msgspec.Struct, frozen=True, array_like=True):
    """`offbeat.server.blocks.ParameterSlice` on the wire; `name` is an index into `ModelInfo.names`."""

    name: Annotated[int, msgspec.Meta(ge=0)]
    start: Count
    numel: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class BlockOf(msgspec.Struct, frozen=True, array_like=True):
    """`offbeat.server.blocks.Block` on the wire."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    dtype: Dtype
    pieces: Annotated[tuple[PieceOf, ...], msgspec.Meta(min_length=1, max_length=1 << 20)]


class OpenModel(msgspec.Struct, tag=True, frozen=True):
    """A worker wants to train a model; the body is its `ModelInfo`, which may be long.

    Args:
        entry: how often this worker has come to the job, itself included.
    """

    model: Model
    entry: Count = 0


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """A question that all were asked, and its answer."""

    number: Count
    numbers: Annotated[tuple[float, ...], msgspec.Meta(max_length=MOST_NUMBERS)]
    workers: Count


class Reconnect(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a worker that took part before.

    Args:
        life: of the server, as it last was here.
        clock: number of the contribution it computes, or holds; those that follow have to be a `Count`, too.
        version: of the parameters it has.
        holds: it has a contribution, which was not acknowledged.
        waits: it does not compute, so its parameters may be overwritten.
        weight: samples of its last contribution; None before the first.
        done: contributions that were acknowledged, and are not in two snapshots that it knows of: number and samples.
        answered: the last questions it has the answers of.
        swaps: how often the plan of the job was swapped, as far as it knows.
        secret: what this shard told it when it was taken in, which nobody else knows; empty if it was not.
    """

    life: Count
    clock: Annotated[int, msgspec.Meta(ge=0, lt=1 << 39)]
    version: Count
    holds: bool
    waits: bool
    weight: Samples | None = None
    done: Annotated[tuple[tuple[Count, Samples], ...], msgspec.Meta(max_length=1 << 16)] = ()
    answered: Annotated[tuple[Answered, ...], msgspec.Meta(max_length=64)] = ()
    swaps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 39)] = 0
    secret: Secret = b""


class ModelInfo(msgspec.Struct, frozen=True):
    """A worker's description of its model.

    Args:
        world: how many workers the job begins with.
        shards: how many there are.
        holders: over how many of them the model is dealt; a small one has fewer blocks than there are shards.
        plan: as TOML.
        layout: digest of the model's parameters and of how they are cut.
        names: of all its parameters.
        blocks: those that this shard holds.
        back: if the worker took part before.
        hosts: on how many these holders run.
        former: digests of plans that held before this one.
        swaps: how often it was swapped.
        ranks: of the workers that the job begins with here; () for all below `world`.
        seed: of the worker; None in what was written before workers said it.
    """

    world: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    shards: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    holders: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    plan: Text
    layout: Digest
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1 << 20)]
    blocks: Annotated[tuple[BlockOf, ...], msgspec.Meta(max_length=1 << 20)]
    optimizer: OptimizerSpec
    back: Reconnect | None = None
    hosts: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    former: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=1024)] = ()
    swaps: Count = 0
    ranks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)] = ()
    seed: int | None = None

    @property
    def begins_with(self) -> frozenset[int]:
        """Ranks of the workers that the job begins with here."""
        return frozenset(self.ranks or range(self.world))


class ModelOpened(msgspec.Struct, tag=True, frozen=True):
    """The worker is taken in.

    Args:
        wants_values: send `InitBlock` for each block of this shard.
        life: of the server.
        survives: it keeps snapshots, so it is worth while to wait for it when it is gone.
        later: not yet, because what it computes is outdated: open again when the parameters may be overwritten.
        secret: of this worker and this shard, in this life: who shows it is who was taken in; empty if it was said.
        kept: all that this worker was told in the life it knows is still in the parameters, though the life is another.
    """

    model: Model
    wants_values: bool
    life: Count = 0
    survives: bool = False
    later: bool = False
    secret: Secret = b""
    kept: bool = False


class LeaveAfter(msgspec.Struct, tag=True, frozen=True):
    """The worker was asked to leave (SIGTERM), and says good-bye next.

    Args:
        step: behind which one of its script it leaves.
    """

    step: Count


class InitBlock(msgspec.Struct, tag=True, frozen=True):
    model: Model
    block: Count


class ContributionInfo(msgspec.Struct, frozen=True):
    """The description of a contribution.

    Args:
        weight: samples it was computed from.
        hyper: the optimizer's hyper-parameters, by group.
        unused: parameters without a gradient, as indices into `ModelInfo.names`.
        used: leases of data it was computed from, by loader and number.
        change: it is a change of the parameters and no gradient; then `hyper` has one group, that of the outer
            optimizer, which is empty for a plain average.
        ends: it is the last of the worker's own steps, perhaps fewer than usual, and in an update by itself.
        step: how many steps the worker's script has made of this model before, for people.
        again: blocks that were pushed before the contribution was announced, and have changed since: of each of them
            only the `PushBlock` that comes `again` counts.
        computing_s: how long the worker computed, where it did so before all parameters had come; else None.
    """

    weight: Samples
    hyper: Annotated[tuple[Hyper, ...], msgspec.Meta(max_length=10_000)]
    unused: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)] = ()
    used: Used = ()
    change: bool = False
    ends: bool = False
    step: Count = 0
    again: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 << 20)] = ()
    computing_s: Seconds | None = None


class Announce(msgspec.Struct, tag=True, frozen=True):
    """A contribution has been computed."""

    model: Model
    clock: Count
    about: ContributionInfo


class Granted(msgspec.Struct, tag=True, frozen=True):
    """The worker may push; where it pushes early perhaps before it has announced that contribution."""

    model: Model
    clock: Count


class DensePayload(msgspec.Struct, tag="dense", frozen=True):
    """The body has each element of the block, in the block's own type."""


class CastPayload(msgspec.Struct, tag="cast", frozen=True):
    """The body has each element of the block, in another type."""

    dtype: Dtype


class EncodedPayload(msgspec.Struct, tag="encoded", frozen=True):
    """The body is what the codec of the plan has encoded of the block.

    Args:
        step: by which the codec's turn counts.
        change: whether it is of a change of the parameters, and not of a gradient.
    """

    step: Count
    change: bool = False


BlockPayload = DensePayload | CastPayload | EncodedPayload


class PushBlock(msgspec.Struct, tag=True, frozen=True):
    """One block of a contribution; `payload` says what its body is, see `offbeat.server.pushed_block`.

    Args:
        again: it takes the place of one that came before the contribution was announced, if that is still here.
    """

    model: Model
    clock: Count
    block: Count
    payload: BlockPayload
    again: bool = False


class ReleaseWorker(msgspec.Struct, tag=True, frozen=True):
    """Released for `step`.

    Args:
        staleness: updates between what the contribution was computed on and its own.
        values: whether the parameters follow.
        counted: whether the contribution is in an update; False if it was dropped, or there was none.
        again: announce the contribution that you hold once more, under the number `step`.
        waits: whether the worker waits until it is granted to push what it computes; else it pushes at once.
        asked: number of the first question of a worker that has just joined.
        fate: what became of the contribution that a worker came back with, to complete a sentence; "" if it had none.
    """

    model: Model
    step: Count
    version: Count
    staleness: Count
    values: bool = True
    counted: bool = False
    again: bool = False
    waits: bool = True
    asked: Count = 0
    fate: Text = ""


class PullBlock(msgspec.Struct, tag=True, frozen=True):
    """One block of the parameters for `step`.

    Args:
        number: how many contributions to what the worker waits for were withdrawn; see
            `offbeat.server.shard.update_scheduler`.
    """

    model: Model
    step: Count
    block: Count
    version: Count
    number: Count = 0


class PullOrder(msgspec.Struct, tag=True, frozen=True):
    """The order in which a worker wants the blocks of one shard from here on, where several are due at a time.

    Args:
        blocks: all of the model that this shard holds, each once.
    """

    model: Model
    blocks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 << 20)]


class PullDone(msgspec.Struct, tag=True, frozen=True):
    """All blocks are here.

    Args:
        pushes_early: the worker pushes what it computes next before that is announced, as soon as it may.
    """

    model: Model
    step: Count
    pushes_early: bool = False


class Evicted(msgspec.Struct, tag=True, frozen=True):
    """The job goes on without this worker."""

    model: Model
    reason: Text


class AskAllWorkers(msgspec.Struct, tag=True, frozen=True):
    """A question all workers ask together: the sums of their `numbers`. Who asks holds nobody up until it is answered.

    Args:
        refresh: give everybody the newest parameters with the answer; else only who missed an update meanwhile.
        refusal: why what all are to do cannot be; "" if this worker has done it.
    """

    number: Count
    question: Name
    refresh: bool = False
    numbers: Annotated[tuple[float, ...], msgspec.Meta(max_length=MOST_NUMBERS)] = ()
    refusal: Annotated[str, msgspec.Meta(max_length=MOST_REFUSAL)] = ""


class AllWorkersAnswer(msgspec.Struct, tag=True, frozen=True):
    """The answer to a collective question.

    Args:
        workers: how many were asked.
        disagreement: what others ask instead, or "".
        refused: who said why it cannot be, and why; "" if nobody did.
    """

    number: Count
    numbers: Annotated[tuple[float, ...], msgspec.Meta(max_length=MOST_NUMBERS)]
    workers: Count
    disagreement: Text = ""
    refused: Text = ""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A refusal, to a worker or to a shard that wants to follow. `disagrees`: it differs from what the other workers
    say.
    """

    reason: Text
    disagrees: bool = False


class SnapshotAck(msgspec.Struct, tag=True, frozen=True):
    """The worker's contributions before number `clock` are in the last two snapshots of every shard."""

    model: Model
    clock: Count


class TrainingOver(msgspec.Struct, tag=True, frozen=True):
    """Shard to validator: the last worker has said good-bye, and with it the job is over.

    Args:
        why: the server ends because all workers are gone without having said so; "" if all went well.
    """

    why: Text = ""


class Notice(msgspec.Struct, tag=True, frozen=True):
    """A notice for people.

    Args:
        waits: whether it says what all wait for from now on, or that they do not any more; None if it is about
            something else.
        life: whose beginning it reports. A worker that returns gets such a notice again, in case it missed it.
    """

    text: Text
    waits: bool | None = None
    life: Count | None = None
