"""What can be seen of a job, and how it is asked for."""

from __future__ import annotations

from typing import Annotated

import msgspec

from offbeat.protocol.bounds import Count, Model, Text
from offbeat.protocol.worker_status import Status


class Look(msgspec.Struct, tag=True, frozen=True):
    """Says how it goes; from a worker that waits, or from an onlooker."""

    number: Count


class TellStatus(msgspec.Struct, tag=True, frozen=True):
    """A worker says how its training goes, about once a second; nothing is decided by it."""

    status: Status


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Args:
        phase: "computing", "held" (has a contribution and may not push it), "pushing", "pushed" (waits for others),
            "pulling", "waiting" (for all others, as in `Run.mean`), or how it ended: "left" (it was told to), "done",
            "evicted" or "gone".
        step: that it computes or exchanges, as workers are compared. clock: its contributions that have arrived.
        made: how many steps its script has made of the model, as `Run.step` counts them.
        since_s: seconds it has been in this phase.
        samples: in its last contribution.
        computing_s, turn_s: moving averages of computing, and of a release to the parameters being there; 0 if unknown.
        applied, dropped, lost: its contributions.
        staleness, worst: mean and maximum of updates between what a contribution was computed on and its own.
        lead: the most steps it was ahead of another worker when it was released.
        waited_s: from having a contribution to being released, in all.
        here_s: seconds since it first joined.
        status: what it says itself, if it has said anything lately.
    """

    worker: Count
    phase: Annotated[str, msgspec.Meta(max_length=16)]
    step: int = 0
    clock: int = 0
    made: int = 0
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
    status: Status | None = None


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    Args:
        policy: as Python.
        version: updates so far.
        started: whether all workers of the beginning have come.
        world: how many these were to be.
        running_s: seconds since the model was opened.
        note: what happened to the server, in words; "" if nothing did.
        pace: who paces the rounds and why, in a sentence; "" if that is not known here.
        plan: that holds, as TOML.
    """

    model: Model
    policy: Text
    version: Count
    started: bool
    running_s: float
    workers: Annotated[tuple[Seen, ...], msgspec.Meta(max_length=4096)]
    note: Text = ""
    pace: Text = ""
    world: Count = 0
    plan: Text = ""


class Sight(msgspec.Struct, tag=True, frozen=True):
    """The body is the scenes: of some hundred workers they are too long for a frame's metadata."""

    number: Count
