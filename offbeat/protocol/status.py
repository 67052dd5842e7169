"""The status of a job, and the messages that ask for it.

An onlooker and a server need not be of the same version: what a server leaves out has a default, what it says besides
is passed over.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Model, Text
from offbeat.protocol.worker_status import TableClock, TrainingStatus

_Seconds = Annotated[float, msgspec.Meta(gt=-1e15, lt=1e15)]  # refuses NaN as well
_WAITING = ("held", "pushing", "pushed", "waiting", "exchanging")
ENDS = ("gone", "left", "done", "evicted", "failed")
"""How a worker may have ended, as its phase."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Args:
        phase: "computing", "held" (has a contribution and may not push it), "pushing", "pushed" (waits for others),
            "pulling", "waiting" (for all others, as in `Run.mean`), or how it ended: "left" (it was told to), "done",
            "evicted" or "gone". Without a server also "starting", "exchanging", "busy", "paused", "unreachable" and
            "failed".
        step: that it computes or exchanges, as workers are compared. clock: its contributions that have arrived.
        made: how many steps its script has made of the model, as `Run.step` counts them.
        since_s: seconds it has been in this phase.
        samples: in its last contribution.
        computing_s, turn_s: moving averages of computing, and of a release to the parameters being there; 0 if unknown.
        applied, dropped, lost: its contributions.
        staleness, worst: mean and maximum of updates between what a contribution was computed on and its own.
        lead: the most steps it was ahead of another worker when it was released.
        waited_s: from having a contribution to being released, in all.
        here_s: seconds since it joined; 0 if the server does not say.
        status: what it says itself; None if it has not lately, or cannot be understood.
        table: its clock on a switch's table; None if there is none.
        validates: it is a validator.
    """

    worker: Count
    phase: Annotated[str, msgspec.Meta(max_length=16)]
    step: Count = 0
    clock: Count = 0
    made: Count = 0
    since_s: _Seconds = 0.0
    samples: _Seconds = 0.0
    computing_s: _Seconds = 0.0
    turn_s: _Seconds = 0.0
    applied: Count = 0
    dropped: Count = 0
    lost: Count = 0
    staleness: _Seconds = 0.0
    worst: Count = 0
    lead: Count = 0
    waited_s: _Seconds = 0.0
    here_s: _Seconds = 0.0
    status: TrainingStatus | None = None
    table: TableClock | None = None
    validates: bool = False

    @property
    def gone(self) -> bool:
        return self.phase in ENDS

    @property
    def step_s(self) -> float:
        """Seconds that a step takes it when nobody keeps it waiting; 0 if unknown."""
        return self.computing_s + self.turn_s if self.computing_s > 0 else 0.0


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for cached_property
    """One model.

    Args:
        policy: as Python.
        version: updates so far.
        started: whether all workers of the beginning have come.
        world: how many these were to be; 0 if the server does not say.
        running_s: seconds since the model was opened.
        note: what happened to the server, in words; "" if nothing did.
        pace: who paces the rounds and why, if the server can tell.
        plan: that holds, as TOML.
        fabric: as Python, of a job without a server; there `version` counts steps. "" if there is a server.
    """

    model: Model
    policy: Text
    version: Count
    started: bool
    running_s: _Seconds
    workers: Annotated[tuple[WorkerStatus, ...], msgspec.Meta(max_length=4096)]
    note: Text = ""
    pace: Text = ""
    world: Count = 0
    plan: Text = ""
    fabric: Text = ""

    @cached_property
    def present(self) -> tuple[WorkerStatus, ...]:
        """The workers that take part."""
        return tuple(seen for seen in self.workers if not seen.gone)

    @cached_property
    def low(self) -> int:
        """The clock of the slowest worker."""
        return min((seen.clock for seen in self.present), default=0)

    def ahead(self, seen: WorkerStatus) -> int:
        """Count the steps that a worker is ahead of the slowest one's contributions, which is what policies bound."""
        return max(0, seen.step - self.low)

    def waiting_share(self, seen: WorkerStatus) -> float:
        """Part of its time in which a worker waited for others, the present wait included."""
        waited_s = seen.waited_s + (seen.since_s if seen.phase in _WAITING else 0.0)
        here_s = seen.here_s or self.running_s
        return min(1.0, waited_s / here_s) if here_s > 0 else 0.0

    @property
    def counts(self) -> str:
        """The unit of `version`, in words."""
        return "steps" if self.fabric else "updates"

    def updates_per_s(self, then: ModelStatus | None = None) -> float:
        """Updates per second since `then`, or in all."""
        since_s, since = (0.0, 0) if then is None else (then.running_s, then.version)
        return (self.version - since) / (self.running_s - since_s) if self.running_s > since_s else 0.0


class GetStatus(msgspec.Struct, tag=True, frozen=True):
    """Worker that waits, or onlooker, to coordinator: a request for the status."""

    number: Count


class StatusReply(msgspec.Struct, tag=True, frozen=True):
    """The answer to the question of the same number.

    Its body is the status of every model: of some hundred workers that is too long for a frame's metadata.
    """

    number: Count


class TellStatus(msgspec.Struct, tag=True, frozen=True):
    """A worker says how its training goes, about once a second; nothing is decided by it."""

    status: TrainingStatus
