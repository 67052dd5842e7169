"""The events of the coordinator: each has its time, since the coordinator has no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Set

    from offbeat.coordinator.instructions import Timer
    from offbeat.coordinator.progress import TrainingProgress
    from offbeat.errors import OffbeatError
    from offbeat.protocol.checkpoints import RequestReplacement
    from offbeat.protocol.data_leases import MemoryExhausted, RegisterLoader, RequestLease, ReturnLease, SetDataState
    from offbeat.protocol.loss_scores import ContributionsScored
    from offbeat.protocol.plan_swap import PlanAgreement, SwapPlan
    from offbeat.protocol.shards import ModelFilled, PushDone, PushNearlyDone, UpdateMeasured, WorkerDrained
    from offbeat.protocol.status import TellStatus
    from offbeat.protocol.training import Announce, AskAllWorkers, LeaveAfter, ModelInfo, PullDone
    from offbeat.sync import Push

    WorkerMessage = (
        Announce
        | PullDone
        | AskAllWorkers
        | LeaveAfter
        | TellStatus
        | PlanAgreement
        | RequestReplacement
        | SetDataState
        | RegisterLoader
        | RequestLease
        | ReturnLease
        | MemoryExhausted
        | ContributionsScored
    )
    ShardMessage = ModelFilled | PushNearlyDone | PushDone | UpdateMeasured | WorkerDrained


@dataclass(frozen=True)
class CoordinatorEvent:
    """An event, with its time.

    Args:
        at_s: monotonic seconds; never less than those of the event before.
    """

    at_s: float


@dataclass(frozen=True)
class ModelBegun(CoordinatorEvent):
    """The first worker wants to train a model, with this plan, layout and optimizer."""

    model: int
    details: ModelInfo


@dataclass(frozen=True)
class ModelRestored(CoordinatorEvent):
    """A model continues from a snapshot or from memory, and waits for its workers until `PatienceOver`.

    Args:
        gone: of these workers, those that are not waited for, unless they come before the others.
        applied: by worker, its last contribution that counts, where the model continues from what all shards still
            had in memory; None if it was read from a snapshot.
    """

    model: int
    details: ModelInfo
    version: int
    progress: TrainingProgress
    gone: Set[int] = frozenset()
    applied: Mapping[int, int] | None = None


@dataclass(frozen=True)
class ModelForgotten(CoordinatorEvent):
    """All have left a model before there were any parameters."""

    model: int


@dataclass(frozen=True)
class WorkerOpened(CoordinatorEvent):
    """A worker takes part in a model, or takes part again.

    Args:
        entry: of its `OpenModel`.
        is_validator: it has shown that it is one.
    """

    worker: int
    model: int
    details: ModelInfo
    entry: int = 0
    is_validator: bool = False


@dataclass(frozen=True)
class WorkerSaid(CoordinatorEvent):
    """A worker that takes part says something.

    Args:
        body: that came with it.
        asker: what an answer to it is to be sent to, where not only workers may ask.
    """

    worker: int
    message: WorkerMessage
    body: bytes | bytearray = b""
    asker: Hashable = None


@dataclass(frozen=True)
class SwapAsked(CoordinatorEvent):
    """A worker or an operator wants another plan.

    Args:
        asker: what the answer is to be sent to.
        by: who that is, in words.
        is_trusted: it has shown what validators have to.
    """

    asker: Hashable
    message: SwapPlan
    by: str = ""
    is_trusted: bool = False


@dataclass(frozen=True)
class RanksAsked(CoordinatorEvent):
    """A request for ranks of new workers that are about to start.

    Args:
        asker: what the answer is to be sent to.
        count: how many.
        least: none is below this one.
    """

    asker: Hashable
    count: int
    least: int = 0


@dataclass(frozen=True)
class ShardSaid(CoordinatorEvent):
    """A shard says how far it is."""

    message: ShardMessage


@dataclass(frozen=True)
class PushLost(CoordinatorEvent):
    """The coordinating shard has lost a contribution with its worker: it came in part, and is in no update."""

    model: int
    push: Push


@dataclass(frozen=True)
class WorkerMissed(CoordinatorEvent):
    """A worker is gone before it has opened any model."""

    worker: int


@dataclass(frozen=True)
class WorkerGone(CoordinatorEvent):
    """A worker is gone.

    Args:
        error: why it is lost; None if it has said good-bye.
        replaced: another process has its rank now, so that nobody is told.
    """

    worker: int
    error: OffbeatError | None = field(default=None, compare=False)
    replaced: bool = False


@dataclass(frozen=True)
class PatienceOver(CoordinatorEvent):
    """Workers that took part before the server was restarted are not waited for any longer."""


@dataclass(frozen=True)
class ModelSettled(CoordinatorEvent):
    """A life has ended, and the next one continues from the shards' memory.

    Args:
        whole: contributions in updates that all shards turn out to have.
        withdrawn: those that are taken out of updates, with their samples; their workers push them again.
    """

    model: int
    whole: Collection[Push]
    withdrawn: Mapping[Push, float]


@dataclass(frozen=True)
class LifeOver(CoordinatorEvent):
    """The incarnation is over: what would follow could be in no snapshot, or another one begins."""


@dataclass(frozen=True)
class TimePassed(CoordinatorEvent):
    """A timer that was set is due."""

    timer: Timer
