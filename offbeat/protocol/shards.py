"""Messages among shards: progress to the coordinator, and its decisions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Model, Seconds
from offbeat.protocol.optimizer_spec import Hyper
from offbeat.protocol.training import ContributionInfo


class RegisterShard(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: it takes part from now on.

    Args:
        held: number and life of each snapshot that it could go on from.
        least: later snapshots have to have greater numbers.
    """

    held: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=16)] = ()
    least: Count = 0


class BeginLife(msgspec.Struct, tag=True, frozen=True):
    """Coordinator to shard: its incarnation begins.

    Args:
        life: of the server.
        snapshot: number and life of the one to go on from; None for none.
    """

    life: Count
    snapshot: tuple[Count, Count] | None = None


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


class WorkerDrained(msgspec.Struct, tag=True, frozen=True):
    """Shard to coordinator: after a `WorkerRemoved` of this number it takes nothing more of that worker."""

    model: Model
    number: Count


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
        about: each contribution, without its hyper-parameters.
        hyper: those of the first one that has samples; they are the whole update's.
    """

    model: Model
    pushes: tuple[tuple[int, int], ...]
    about: tuple[ContributionInfo, ...]
    hyper: tuple[Hyper, ...]
    rate: float
    in_order: bool


class DropContribution(msgspec.Struct, tag=True, frozen=True):
    """`coming`: the worker may have begun to push it."""

    model: Model
    worker: Count
    clock: Count
    coming: bool


class ReleaseFromShard(msgspec.Struct, tag=True, frozen=True):
    model: Model
    worker: Count
    step: Count


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
