"""The records of a history, as they are written: compact, declared, checked when they are read.

Events and decisions are those of `offbeat.sync`, field by field; what a policy remembers is not written down, because
who replays the events knows it, too.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal

import msgspec

from offbeat.sync import (
    Action,
    Adopted,
    Apply,
    Deadline,
    Drop,
    Event,
    Evict,
    Grant,
    Joined,
    Left,
    Pulled,
    Pushed,
    PushEnding,
    Ready,
    Release,
    Remember,
    TakesEveryNth,
    Wake,
)

FORMAT = 2
READS = (1, FORMAT)  # those before lack what is written since
Kind = Literal["coordinator", "shard", "worker"]

# Numbers that stand in files: they stay what they are.
_EVENTS: dict[int, type] = {
    1: Ready,
    2: PushEnding,
    3: Pushed,
    4: Pulled,
    5: Joined,
    6: Left,
    7: TakesEveryNth,
    8: Deadline,
    9: Adopted,
}
_ACTIONS: dict[int, type] = {1: Grant, 2: Apply, 3: Drop, 4: Release, 5: Evict, 6: Wake}

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Model = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Weight = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 18)]
_Line = Annotated[str, msgspec.Meta(max_length=1 << 12)]


def _mirror(kinds: dict[int, type]) -> dict[type, type[msgspec.Struct]]:
    """Make for each class one that is written as an array, with its number in front."""
    mirrors = {}
    for number, kind in kinds.items():
        hints = typing.get_type_hints(kind)
        fields: list[Any] = [
            (f.name, hints[f.name]) if f.default is dataclasses.MISSING else (f.name, hints[f.name], f.default)
            for f in dataclasses.fields(kind)
        ]
        mirrors[kind] = msgspec.defstruct(kind.__name__, fields, tag=number, array_like=True, frozen=True)
    return mirrors


_AS_WRITTEN = {**_mirror(_EVENTS), **_mirror(_ACTIONS)}
_AS_READ = {mirror: kind for kind, mirror in _AS_WRITTEN.items()}
_NAMES = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _AS_WRITTEN}
_WrittenEvent: Any = typing.Union[tuple(_AS_WRITTEN[kind] for kind in _EVENTS.values())]  # noqa: UP007
_WrittenAction: Any = typing.Union[tuple(_AS_WRITTEN[kind] for kind in _ACTIONS.values())]  # noqa: UP007


class HistoryHeader(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The first of every file: who wrote it.

    Args:
        format: of all that follows.
        kind: of process.
        job: that it took part in.
        rank: of a worker; 0 otherwise.
        began_s: seconds since 1970.
        offbeat: its version.
    """

    format: int
    kind: Kind
    job: _Line
    rank: _Rank
    began_s: float
    offbeat: _Line


class LifeBegan(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Coordinator: it decides about a model from now on.

    Args:
        life: of the server.
        plan: as TOML.
        version: of the parameters; above 0 if it goes on from a snapshot.
        hosts: over how many the parameters are spread.
        past: the number of each worker's next contribution, of those that took part before.
    """

    model: _Model
    life: _Count
    plan: _Text
    version: _Count = 0
    hosts: _Count = 1
    past: dict[_Rank, _Count] = {}


class WorkerReturned(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Coordinator: the worker that joins next took part before, or is a validator.

    Args:
        least: its next contribution has no lower number.
        weight: samples of its last one; None before the first.
        validates: it is a validator; older histories do not say so.
    """

    model: _Model
    worker: _Rank
    least: _Count
    weight: _Weight | None
    validates: bool = False


class PolicyStep(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Coordinator: an event, and the policy's decision.

    Args:
        asked: whether the policy was asked; it is not before all workers of the beginning are there.
        change, ends: of a contribution: it is a change of the worker's own, not a gradient; it is the last of those.
        apart: how many of the actions, the first ones, are about what an earlier policy had workers bring (see
            `offbeat.sync.transition`).
    """

    model: _Model
    event: _WrittenEvent
    actions: tuple[_WrittenAction, ...] = ()
    asked: bool = True
    change: bool = False
    ends: bool = False
    apart: _Count = 0


class PlanAdopted(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Coordinator, or each worker where there is none: another plan holds, for all models.

    Args:
        plan: as TOML.
        by: who wanted it, in words; "" if that is not known.
    """

    plan: _Text
    by: _Line = ""


class ShardServes(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Shard: it holds blocks of a model.

    Args:
        life: of the server.
        version: of the parameters; above 0 if it goes on from a snapshot.
        blocks: how many it holds.
    """

    model: _Model
    life: _Count
    version: _Count
    blocks: _Count


class UsedContribution(msgspec.Struct, array_like=True, frozen=True):
    """One contribution in an update.

    Args:
        blocks: in how many of the shard's it is.
        scale: by which it was multiplied, where updates are judged; 0 if it was rejected or is a reference, else None.
    """

    worker: _Rank
    clock: _Count
    weight: _Weight
    blocks: _Count
    scale: float | None = None


class UpdateMade(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Shard: it has made an update in all its blocks.

    Args:
        version: of the update, counting from 1.
        times: how often a block was updated; as many as there are blocks.
    """

    model: _Model
    version: _Count
    times: _Count
    rate: float
    used: tuple[UsedContribution, ...]


class UpdateJudged(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """Coordinator: a robust rule has decided about an update, whose contributions are there, whole.

    Args:
        version: of the update.
        scales: by which each contribution that weighs something is multiplied; 0 if it is rejected.
        reference: scale of the reference.
        squares, losses: what a rule that goes by losses decided by: the squares of the norms of all contributions, and
            the loss on trusted samples without any, and with each of those whose square is finite.
    """

    model: _Model
    version: _Count
    scales: tuple[tuple[_Rank, _Count, float], ...]
    reference: float = 0.0
    squares: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()


class ContributionsWithdrawn(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """Coordinator: a life ends, and the next one continues from the shards' memory without these contributions.

    They are in updates that not all shards have whole. Each worker still holds its own, and pushes it again.

    Args:
        pushes: worker and number of each.
    """

    model: _Model
    pushes: tuple[tuple[_Rank, _Count], ...]


class ModelPrepared(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Worker: it has prepared a model.

    Args:
        plan: as TOML.
        world: how many workers there are, where they are counted.
        numel: elements of all its parameters.
    """

    model: _Model
    plan: _Text
    world: _Count
    numel: _Count


class ParametersAfter(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Worker: the parameters it has after a step, or after all waited for the newest.

    Args:
        step: of its own, from 0.
        at_s: monotonic seconds of this process.
        digest: of the parameters; None if this step's was not computed.
        samples: that its contribution weighs.
        life: of the server; 0 without one.
        versions: of the parameters: of all blocks, if it is the same; else the lowest, the highest, and a digest of
            all. Empty without a server.
        numbers: under which its contribution was announced; more than one if the server was restarted meanwhile.
        counted: whether it was told that its contribution is in the parameters.
        weights: without a server, of the exchange in this step: this worker's, and the sum over all workers that came
            with the mean; several, if it was not the same for all buckets, and none if no mean was waited for. Empty
            without an exchange.
        given: of this worker's weight, what is in each of these sums, where they may be of some workers; `weights` has
            one for each bucket then. Empty where they are of all.
    """

    model: _Model
    step: _Count
    at_s: float
    digest: _Count | None
    samples: _Weight = 0.0
    life: _Count = 0
    versions: tuple[_Count, ...] = ()
    numbers: tuple[_Count, ...] = ()
    counted: bool = True
    weights: tuple[_Weight, ...] = ()
    given: tuple[_Weight, ...] = ()

    @property
    def is_brought(self) -> bool:
        """Whether it is of a contribution to a server; one that was outdated before it was announced has no number."""
        return bool(self.numbers) or (self.life > 0 and self.samples > 0)


class CheckpointLoaded(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Worker: it has loaded a checkpoint; what it has next is not what the version said before."""


class FabricMigrated(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """Worker, on either side: here one stretch of its run ends or begins, with a server or without one.

    Each stretch has a file and a name of its own.

    Args:
        border: name of the place, the same on all workers and on both sides.
        step: that they go on with.
        digest: of the parameters of all models.
    """

    border: _Line
    step: _Count
    digest: _Count


class WorkersAdmitted(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """Each worker, where there is no server: these take part from the next step on."""

    ranks: tuple[_Rank, ...]


class ParametersReplaced(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """Shard or coordinator: what the server had was replaced by what a worker had, such as a checkpoint.

    Args:
        version: of the parameters.
        worker: who brought it.
        is_data: it was the place in the data; else the parameters, and the optimizer's state.
    """

    model: _Model
    version: _Count
    worker: _Rank
    is_data: bool = False


class NoticeGiven(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """Coordinator: something breaks no law, but a person should know of it.

    Args:
        version: of the parameters.
        worker: whom it is about.
        what: as a sentence.
    """

    model: _Model
    version: _Count
    worker: _Rank
    what: _Line


class StepGranted(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """Worker, where a switch's table lets workers go on: it may go on behind a step.

    Args:
        clock: the step, as the switch counts; steps of all workers have the same numbers.
        low: the newest step that all had finished, as far as it knew.
        window: steps that a worker may be ahead of that behind this one.
        epoch: of the windows, which counts their changes.
        until: it may begin steps before this one by name, whatever the window is; 0 if nothing is said of that.
    """

    model: _Model
    clock: _Count
    low: _Count
    window: _Count
    epoch: _Count
    until: _Count = 0


class HistoryEnded(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The last: nothing is missing before it.

    Args:
        why: it ended before the job did; "" if all went well.
        gave_up: only the recording ended, because nothing more could be written; the process went on.
    """

    why: _Line = ""
    gave_up: bool = False


Record = (
    HistoryHeader
    | LifeBegan
    | WorkerReturned
    | PolicyStep
    | PlanAdopted
    | ShardServes
    | UpdateMade
    | UpdateJudged
    | ContributionsWithdrawn
    | ModelPrepared
    | ParametersAfter
    | CheckpointLoaded
    | FabricMigrated
    | WorkersAdmitted
    | ParametersReplaced
    | NoticeGiven
    | StepGranted
    | HistoryEnded
)


def policy_step(
    model: int,
    event: Event,
    actions: tuple[Action, ...],
    *,
    asked: bool,
    change: bool = False,
    ends: bool = False,
    apart: int = 0,
) -> PolicyStep:
    """Make the record of an event and the decision that followed it."""
    kept = tuple(_written(action) for action in actions if not isinstance(action, Remember))
    return PolicyStep(model, _written(event), kept, asked, change, ends, apart)


def event_of(record: PolicyStep) -> Event:
    """Read the event of a record."""
    event: Event = _read(record.event)
    return event


def actions_of(record: PolicyStep) -> tuple[Action, ...]:
    """Read the actions of a record."""
    return tuple(_read(action) for action in record.actions)


def _written(thing: Any) -> Any:
    kind = type(thing)
    return _AS_WRITTEN[kind](*[getattr(thing, name) for name in _NAMES[kind]])


def _read(mirror: Any) -> Any:
    kind = _AS_READ[type(mirror)]
    return kind(*[getattr(mirror, name) for name in _NAMES[kind]])
