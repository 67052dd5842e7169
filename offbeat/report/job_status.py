"""A job as its parameter server sees it: how to ask, what is answered, and what follows from it.

`Scene` and `Seen` are those of `offbeat.protocol.messages`, declared again: importing that room loads torch, which
takes seconds, and who only looks should not wait. They are read leniently, so an onlooker and a server need not be of
the same version: what a server leaves out has a default, what it says besides is passed over. A test compares the two
declarations.
"""

from __future__ import annotations

import statistics
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec

from offbeat.errors import PeerError
from offbeat.protocol.worker_status import Status
from offbeat.report.per_worker import PACE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Seconds = Annotated[float, msgspec.Meta(gt=-1e15, lt=1e15)]  # refuses NaN as well
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]

_WAITING = ("held", "pushing", "pushed", "waiting", "exchanging")
ENDS = ("gone", "left", "done", "evicted", "failed")
"""How a worker may have ended, as its phase."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
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
    """

    worker: _Count
    phase: Annotated[str, msgspec.Meta(max_length=16)]
    step: _Count = 0
    clock: _Count = 0
    made: _Count = 0
    since_s: _Seconds = 0.0
    samples: _Seconds = 0.0
    computing_s: _Seconds = 0.0
    turn_s: _Seconds = 0.0
    applied: _Count = 0
    dropped: _Count = 0
    lost: _Count = 0
    staleness: _Seconds = 0.0
    worst: _Count = 0
    lead: _Count = 0
    waited_s: _Seconds = 0.0
    here_s: _Seconds = 0.0
    status: Status | None = None

    @property
    def gone(self) -> bool:
        return self.phase in ENDS

    @property
    def step_s(self) -> float:
        """How long a step takes it when nobody keeps it waiting; 0 if unknown."""
        return self.computing_s + self.turn_s if self.computing_s > 0 else 0.0


class Scene(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: for cached_property
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

    model: _Count
    policy: _Text
    version: _Count
    started: bool
    running_s: _Seconds
    workers: Annotated[tuple[Seen, ...], msgspec.Meta(max_length=4096)]
    note: _Text = ""
    pace: _Text = ""
    world: _Count = 0
    plan: _Text = ""
    fabric: _Text = ""

    @cached_property
    def present(self) -> tuple[Seen, ...]:
        """The workers that take part."""
        return tuple(seen for seen in self.workers if not seen.gone)

    @cached_property
    def low(self) -> int:
        """The clock of the slowest worker."""
        return min((seen.clock for seen in self.present), default=0)

    def ahead(self, seen: Seen) -> int:
        """How many steps a worker is ahead of what the slowest has brought, which is what policies bound."""
        return max(0, seen.step - self.low)

    def waiting_share(self, seen: Seen) -> float:
        """Part of its time in which a worker waited for others, the present wait included."""
        waited_s = seen.waited_s + (seen.since_s if seen.phase in _WAITING else 0.0)
        here_s = seen.here_s or self.running_s
        return min(1.0, waited_s / here_s) if here_s > 0 else 0.0

    @property
    def counts(self) -> str:
        """What `version` counts, in words."""
        return "steps" if self.fabric else "updates"

    def updates_per_s(self, then: Scene | None = None) -> float:
        """Since `then`, or in all."""
        since_s, since = (0.0, 0) if then is None else (then.running_s, then.version)
        return (self.version - since) / (self.running_s - since_s) if self.running_s > since_s else 0.0


class Look(msgspec.Struct, tag=True, frozen=True):
    """The question."""

    number: _Count


_Scenes = Annotated[tuple[Scene, ...], msgspec.Meta(max_length=256)]


class Sight(msgspec.Struct, tag=True, frozen=True):
    """The answer to the question of the same number."""

    number: _Count
    scenes: _Scenes = ()


_encode = msgspec.msgpack.Encoder().encode
_sight = msgspec.msgpack.Decoder(Sight).decode
_scenes = msgspec.msgpack.Decoder(_Scenes).decode


def look(number: int) -> bytes:
    """The question, as a frame's metadata."""
    return _encode(Look(number))


def sight_of(metadata: bytes, body: Buffer = b"") -> Sight:
    """What the server answers.

    Args:
        body: the scenes, where they are too many for the metadata of a frame.

    Raises:
        PeerError: if it is no such answer.
    """
    try:
        sight: Sight = _sight(metadata)
        if memoryview(body):
            sight = Sight(sight.number, _scenes(body))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError: text that is not UTF-8
        raise PeerError(f"Cannot understand what this server sees: {error}.") from error
    return sight


def pacemaker(scene: Scene) -> str:
    """Who paces the rounds, in one sentence; nothing if there is too little to compare."""
    if scene.pace:
        return scene.pace
    known = [seen for seen in scene.present if seen.step_s]
    if len(known) < 2:
        return ""
    slowest = max(known, key=lambda seen: seen.step_s)
    usual_s = statistics.median(seen.step_s for seen in known if seen is not slowest)
    if slowest.step_s < PACE * usual_s:
        return (
            f"No worker stands out: a step takes the slowest, rank {slowest.worker}, {_ms(slowest.step_s)}, and the "
            f"others {_ms(usual_s)} (median)."
        )
    if not slowest.turn_s:
        return (
            f"Rank {slowest.worker} sets the pace: it computes {_ms(slowest.step_s)} per step, "
            f"{slowest.step_s / usual_s - 1:.0%} longer than the others' median of {_ms(usual_s)}."
        )
    return (
        f"Rank {slowest.worker} sets the pace: a step takes it {_ms(slowest.step_s)} ({_ms(slowest.computing_s)} of it "
        f"computing), {slowest.step_s / usual_s - 1:.0%} longer than the others' median of {_ms(usual_s)}."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
