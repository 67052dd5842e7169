"""Messages among shards: progress to the coordinator, and its decisions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Factor, Model, Samples, Seconds
from offbeat.protocol.optimizer_spec import Hyper
from offbeat.protocol.training import ContributionInfo

MOST_WHOLE = 1 << 13  # contributions that a shard tells the coordinator of in one message
MOST_COMPARED = 256  # contributions of one update, by their Gram matrix


class HeldLife(msgspec.Struct, frozen=True, array_like=True):
    """The memory of the life that has just ended, of a shard that was not killed.

    Args:
        life: of the server.
        heard: how many messages of the coordinator it received in that life.
        models: that it holds a part of.
        whole: model, worker and number of each contribution whose blocks have all arrived here.
    """

    life: Count
    heard: Count
    models: Annotated[tuple[Model, ...], msgspec.Meta(max_length=1 << 16)] = ()
    whole: Annotated[tuple[tuple[Model, Count, Count], ...], msgspec.Meta(max_length=MOST_WHOLE)] = ()


class RegisterShard(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: it takes part from now on.

    Args:
        held: number and life of each snapshot that it could go on from.
        least: later snapshots have to have greater numbers.
        process: a random number that this process drew when it started.
        memory: what it has of the last life; None if it was started since, or cannot continue from it.
    """

    held: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=16)] = ()
    least: Count = 0
    process: Count = 0
    memory: HeldLife | None = None


class BeginLife(msgspec.Struct, tag=True, frozen=True):
    """Coordinator to shard: its incarnation begins.

    Args:
        life: of the server.
        snapshot: number and life of the one to go on from; None for none.
        from_memory: continue from what all shards still have in memory of the life before.
    """

    life: Count
    snapshot: tuple[Count, Count] | None = None
    from_memory: bool = False


class SaveLastSnapshot(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: it is about to end, and asks for a last snapshot."""


class SnapshotSaved(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: a snapshot is written, or could not be.

    Args:
        cost_s: what it took, from the first copy to the disk.
    """

    number: Count
    well: bool
    cost_s: Seconds


class SnapshotMark(msgspec.Struct, tag=True, frozen=True):
    """Keep all models as they are after what was decided so far.

    Args:
        number: of the snapshot.
        keep: number and life of the last one that all shards have, which is to stay.
        is_last: nothing is decided any more, because a shard is about to end.
    """

    number: Count
    keep: tuple[Count, Count] | None = None
    is_last: bool = False


class ModelFilled(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: it has the first values of all its blocks."""

    model: Model


class PushNearlyDone(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: of its blocks of a contribution no more than a tenth is to come."""

    model: Model
    worker: Count
    clock: Count


class PushDone(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: all its blocks of a contribution have arrived.

    Args:
        entry: of the worker's `OpenModel`; one that comes to the job again may push the same number anew.
    """

    model: Model
    worker: Count
    clock: Count
    entry: Count = 0


class PushOverdue(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: nothing comes of a contribution that an update waits for, though its worker is alive."""

    model: Model
    worker: Count
    clock: Count


class WorkersUnheard(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: it can hear none of the workers any more, or (`unheard` is False) one of them again."""

    unheard: bool


class WorkerDrained(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: after a `WorkerRemoved` of this number it takes nothing more of that worker."""

    model: Model
    number: Count


class MeasuredContribution(msgspec.Struct, array_like=True, frozen=True):
    """A contribution that has a row in a Gram matrix.

    Args:
        weight: samples it was computed from.
    """

    worker: Count
    clock: Count
    weight: Samples


class UpdateMeasured(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: all its blocks of an update are here, and it waits for `ScaleContributions`.

    Args:
        version: of the update.
        rows: the contributions that weigh something, and are no references.
        gram: of them in the blocks of this shard, float64 row by row, little-endian; with the reference last, if there
            is one. What holds NaN or Inf has no finite square of its norm, on the diagonal. Where contributions are
            noised for privacy their squares are less what may be noise, and may be below 0.
        reference: the version that the reference is of; 0 for none yet.
        change: the contributions are changes of the parameters, and no gradients.
        rate: of the update.
    """

    model: Model
    version: Count
    rows: Annotated[tuple[MeasuredContribution, ...], msgspec.Meta(max_length=MOST_COMPARED)]
    gram: Annotated[bytes, msgspec.Meta(max_length=8 * (MOST_COMPARED + 1) ** 2)]
    reference: Count = 0
    change: bool = False
    rate: Factor = 1.0


class AdmitWorker(msgspec.Struct, tag=True, frozen=True):
    """The worker takes part; its next contribution has the number `clock`.

    Args:
        entry: of its `OpenModel`; what was meant for an earlier one is not sent.
    """

    model: Model
    worker: Count
    clock: Count
    entry: Count = 0


class ApplyContributions(msgspec.Struct, tag=True, frozen=True):
    """`offbeat.sync.Apply`, with what is to be known about each contribution.

    Args:
        about: each contribution, without its hyper-parameters if they are those in `hyper`.
        hyper: those of the first one that has samples; they are the whole update's, or what most name by a rule; or a
            validator's. Empty where no validator has said any yet.
        references: ranks of those whose contributions are references on trusted data, which are never applied.
        is_short: fewer contributions than the rule needs weigh something, which the coordinator has told people.
    """

    model: Model
    pushes: tuple[tuple[int, int], ...]
    about: tuple[ContributionInfo, ...]
    hyper: tuple[Hyper, ...]
    rate: float
    in_order: bool
    references: tuple[Count, ...] = ()
    is_short: bool = False


class ScaleContributions(msgspec.Struct, tag=True, frozen=True):
    """Make an update that all shards have measured: it is the sum of what is in it, each multiplied by its scale.

    Args:
        scales: of each contribution that weighs something; 0 for those that are rejected.
        reference: scale of the reference.
        keeps_reference: whether a reference that came with this update is finite, and is the latest from now on.
    """

    model: Model
    version: Count
    scales: Annotated[tuple[tuple[Count, Count, Factor], ...], msgspec.Meta(max_length=MOST_COMPARED)]
    reference: Factor = 0.0
    keeps_reference: bool = True


class DropContribution(msgspec.Struct, tag=True, frozen=True):
    """`coming`: the worker may have begun to push it."""

    model: Model
    worker: Count
    clock: Count
    coming: bool


class ReleaseFromShard(msgspec.Struct, tag=True, frozen=True):
    """Give the worker the parameters of `step`.

    Args:
        as_is: without the updates that wait to be judged, since it may be this validator that they wait for.
    """

    model: Model
    worker: Count
    step: Count
    as_is: bool = False


class WorkerRemoved(msgspec.Struct, tag=True, frozen=True):
    """The worker does not take part any more.

    Args:
        number: to be answered with in `WorkerDrained`; 0 if nothing is to be answered.
    """

    model: Model
    worker: Count
    number: Count = 0


class CommitUpdates(msgspec.Struct, tag=True, frozen=True):
    """The contribution is whole at all shards."""

    model: Model
    worker: Count
    clock: Count


class AllowReplacement(msgspec.Struct, tag=True, frozen=True):
    """The worker may put other parameters, and another state.

    Args:
        number: of its `RequestReplacement`.
    """

    model: Model
    worker: Count
    number: Count


class WithdrawContribution(msgspec.Struct, tag=True, frozen=True):
    """The contribution is in an update, and will never be whole: its worker is gone, and so is what came of it."""

    model: Model
    worker: Count
    clock: Count
