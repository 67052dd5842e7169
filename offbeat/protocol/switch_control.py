"""The control of a switch: what workers and operators say to it beside the packets.

worker or operator                             switch
  | -- JoinSwitchJob(job, shape, worker) ------> |   a worker; the first one creates the job
  | <----- SwitchJobJoined(number, cookie) ----- |   where its packets go, and what they have to say
  | -- MeetAtSwitch(job) ----------------------> |   a worker of the job
  | <----- MetAtSwitch() ----------------------- |   once all of its workers have asked
  | -- EvictFromSwitchJob(job, worker, why) ---> |   a worker of the job, or an operator
  | -- SetSwitchStrategy(job, ..., plan) ------> |   a worker of the job, or an operator
  | <----- SwitchStrategySet(effective) -------- |   from which clock on it decides, or that it has to be tried again
  | -- GetSwitchPlan(job) ---------------------> |   a worker that has seen another epoch than that of its plan
  | <----- SwitchPlan(plan, epoch) ------------- |
  | -- GetSwitchStatus() ----------------------> |   anybody
  | <----- SwitchStatus(jobs) ------------------ |
  | <----- SwitchRefused(reason) --------------- |   instead of any of these answers

Each request has a number from 1, which its answer repeats; number 0 is refused when the link ends for what it has said.
A worker that says good-bye, or whose process is gone, is evicted; a job ends with its last worker.

A worker whose link ended otherwise, since it or the switch stood still, comes back as the member that it is, by its
cookie (`SwitchReturn`) and the secret with which it joined. Until then it is waited for: the others say if it is lost.

A switch that was started again knows no job. Its workers join again and say how far they are (`SwitchReturn`); they are
answered once all are there whom none of them takes for lost, and each is told how far the others are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from offbeat.protocol.bounds import Count, Seconds, Secret, Text
from offbeat.protocol.decoding import read_message
from offbeat.protocol.group_progress import GroupProgress

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Worker = Annotated[int, msgspec.Meta(ge=0, lt=64)]
_Window = Annotated[int, msgspec.Meta(ge=0, lt=128)]
_Exponent = Annotated[int, msgspec.Meta(ge=-90, le=126)]
_Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_Magnitude = Annotated[float, msgspec.Meta(ge=0, lt=1e40)]
_JobName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Strategy(msgspec.Struct, frozen=True):
    """One policy's record at a switch; `offbeat.switch.strategy` compiles it from the policy.

    Args:
        path: "stream" for sums of all workers' chunks, "table" for sums that each worker reads when it likes.
        window: steps that a worker may be ahead of the slowest (table); None for as many as the ring has room for.
        quorum: members whose contributions settle an exchange (stream); None for all.
        wait_s: seconds for which an exchange of a whole quorum waits for the other members (stream).
        keeps_late: whether a worker that was left out of an exchange keeps its contribution for the next one.
        most: steps that single workers may be allowed to be ahead, by a controller; None if it is `window`.
        renews: whether all meet where it holds, to go on with an empty table.
    """

    path: Literal["stream", "table"] = "stream"
    window: _Window | None = 0
    quorum: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    keeps_late: bool = False
    wait_s: Seconds = 0.0
    most: _Window | None = None
    renews: bool = False

    @property
    def settling(self) -> int | None:
        """Members whose contributions settle an exchange at once; None for all."""
        return None if self.wait_s else self.quorum

    def window_in(self, ring: int) -> int:
        """The window over a ring of so many clocks, which leaves room for `ring` - 2 steps at most."""
        return ring - 2 if self.window is None else self.window

    def slack_in(self, ring: int) -> int:
        """Steps that any worker may be ahead, by the window or by name, over a ring of so many clocks."""
        return max(self.window_in(ring), self.most or 0)


class SwitchReturn(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's knowledge of a job that a switch has forgotten.

    Args:
        members: the ranks that are still there, as far as it knows.
        cookie: that it has in the job, if the switch knows that after all; None if it has none yet.
        progress: its exchanges (stream).
        clock: its own (table); None if it has left, and only brings back what it had added.
        settled: how often all have read the same table.
        windows: old, new, effective clock and epoch of the strategy.
        plan: of which that is the policy, as TOML; "" if none was said.
    """

    members: Annotated[tuple[_Worker, ...], msgspec.Meta(min_length=1, max_length=64)]
    cookie: _Number | None = None
    progress: GroupProgress = GroupProgress(0)
    clock: _Number | None = None
    settled: Count = 0
    windows: tuple[_Window, _Window, _Number, _Epoch] | None = None
    plan: Text = ""


class JoinSwitchJob(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A request to take a worker into a job, which is created if there is none of that name.

    Args:
        request: number of the request.
        job: its name.
        worker: rank of the worker that asks.
        workers, values, slots, ring, rows: the shape of the job.
        least_slots: with which it can do as well, if the switch has no room for `slots`; 0 if it cannot with fewer.
        strategy: that it begins with.
        exponent: of all values in the table.
        most: the largest magnitude of a worker's value in a sum of the stream, as it is sent; 0 if none is too large.
        again: of a job that the switch had before it was started again; None for a new one.
        secret: of the process that asks. A rank belongs to the process that was admitted: only its secret moves the
            rank to another link.
    """

    request: _Number
    job: _JobName
    worker: _Worker
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)]
    values: Annotated[int, msgspec.Meta(ge=16, le=2048)]
    slots: Annotated[int, msgspec.Meta(ge=4, le=1 << 16)]
    ring: Annotated[int, msgspec.Meta(ge=4, le=128)]
    rows: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    least_slots: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    strategy: Strategy = Strategy()
    exponent: _Exponent = 0
    most: _Magnitude = 0.0
    again: SwitchReturn | None = None
    secret: Secret = b""


class SwitchJobJoined(msgspec.Struct, tag=True, frozen=True):
    """The answer: the job's number and the worker's cookie, for its packets, and the UDP port that takes them.

    Args:
        slots: that the job has.
        progress: of all who have joined again, by rank (stream).
        clock: the last that all of them had finished (table).
        settled: the most that one of them has said.
    """

    request: _Number
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    cookie: _Number
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    slots: Annotated[int, msgspec.Meta(ge=4, le=1 << 16)]
    progress: Annotated[dict[int, GroupProgress], msgspec.Meta(max_length=64)] = {}
    clock: _Number = 0
    settled: Count = 0


class MeetAtSwitch(msgspec.Struct, tag=True, frozen=True):
    """A request to be told when all workers of a job have made it."""

    request: _Number
    job: _JobName


class MetAtSwitch(msgspec.Struct, tag=True, frozen=True):
    """The answer."""

    request: _Number


class EvictFromSwitchJob(msgspec.Struct, tag=True, frozen=True):
    """Go on without a worker; once is enough, and again does nothing. There is no answer."""

    job: _JobName
    worker: _Worker
    why: Text = ""


class SetSwitchStrategy(msgspec.Struct, tag=True, frozen=True):
    """A request for another policy.

    Args:
        plan: of which it is the policy, as TOML; "" if only the switch is to know.
        reason: of the controller that wants it; "" if a person does.
    """

    request: _Number
    job: _JobName
    strategy: Strategy
    plan: Text = ""
    reason: Text = ""


class SwitchStrategySet(msgspec.Struct, tag=True, frozen=True):
    """The answer.

    Args:
        is_set: False while the change before is not in effect for all workers: ask again.
        effective: the first clock that it decides about.
        epoch: counts changes.
        window_old: that decides about the clocks before.
    """

    request: _Number
    is_set: bool
    effective: _Number = 0
    epoch: _Number = 0
    window_old: _Window = 0


class GetSwitchPlan(msgspec.Struct, tag=True, frozen=True):
    """A request for the plan whose policy was set last."""

    request: _Number
    job: _JobName


class SwitchPlan(msgspec.Struct, tag=True, frozen=True):
    """The answer; `plan` is "" if none was said, and holds from the clock `effective` on, for this `reason`."""

    request: _Number
    strategy: Strategy
    plan: Text
    epoch: _Number
    effective: _Number
    window_old: _Window
    reason: Text = ""


class GetSwitchStatus(msgspec.Struct, tag=True, frozen=True):
    """A request for what the switch knows of a job, or of all."""

    request: _Number
    job: Annotated[str, msgspec.Meta(max_length=256)] = ""


class SwitchMemberStatus(msgspec.Struct, frozen=True):
    """One worker.

    Args:
        silent_s: None as long as no packet of it has come.
        waited_s: for others.
        left_out: sums that were closed without it, since it came too late.
        clamped: the part of its values that was larger than the job's cap.
        typical: the root of the mean square of its values, as they were added; 0 without a cap.
    """

    worker: _Worker
    finished: _Number
    lag: Count
    silent_s: Seconds | None
    counts: Annotated[dict[str, Count], msgspec.Meta(max_length=64)]
    waited_s: Seconds = 0.0
    left_out: Count = 0
    clamped: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    typical: _Magnitude = 0.0


class SwitchJobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job; `low` and `high` are the newest step that all, or any, have finished, `exponent` is of its table.

    `most` is the largest magnitude of a worker's value, as it is sent.
    """

    job: _JobName
    number: _Number
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)]
    values: Count
    slots: Count
    ring: Count
    rows: Count
    exponent: _Exponent = 0
    most: _Magnitude = 0.0
    strategy: Strategy
    low: _Number
    high: _Number
    window_old: _Window
    window_new: _Window
    effective: _Number
    epoch: _Number
    members: Annotated[tuple[SwitchMemberStatus, ...], msgspec.Meta(max_length=64)]
    refused: Annotated[dict[str, Count], msgspec.Meta(max_length=64)]


class SwitchStatus(msgspec.Struct, tag=True, frozen=True):
    """The answer.

    Args:
        target: what the packets are summed by.
        dropped: packets of any job or of none that were not taken in, by why.
    """

    request: _Number
    target: Text
    jobs: Annotated[tuple[SwitchJobStatus, ...], msgspec.Meta(max_length=4096)]
    dropped: Annotated[dict[str, Count], msgspec.Meta(max_length=64)]


class SwitchRefused(msgspec.Struct, tag=True, frozen=True):
    """The answer to a request that cannot be granted."""

    request: _Number
    reason: Text


ToSwitch = JoinSwitchJob | MeetAtSwitch | EvictFromSwitchJob | SetSwitchStrategy | GetSwitchPlan | GetSwitchStatus
FromSwitch = SwitchJobJoined | MetAtSwitch | SwitchStrategySet | SwitchPlan | SwitchStatus | SwitchRefused
# What each role may say; see `offbeat.wire.messages.HandshakeClaim`.
SAYS: dict[str, tuple[type, ...]] = {
    "worker": (JoinSwitchJob, MeetAtSwitch, EvictFromSwitchJob, SetSwitchStrategy, GetSwitchPlan, GetSwitchStatus),
    "onlooker": (GetSwitchStatus,),
    "operator": (EvictFromSwitchJob, SetSwitchStrategy, GetSwitchStatus),
}

_encode = msgspec.msgpack.Encoder().encode
_to_switch = msgspec.msgpack.Decoder(ToSwitch).decode
_from_switch = msgspec.msgpack.Decoder(FromSwitch).decode


def pack(message: ToSwitch | FromSwitch) -> bytes:
    """The message as a frame's metadata."""
    return _encode(message)


def to_switch_of(metadata: Buffer) -> ToSwitch:
    """Read what is said to a switch.

    Raises:
        PeerError: if it is none of that.
    """
    message: ToSwitch = read_message(_to_switch, metadata, "this peer of a switch")
    return message


def from_switch_of(metadata: Buffer) -> FromSwitch:
    """Read what a switch says.

    Raises:
        PeerError: if it is none of that.
    """
    message: FromSwitch = read_message(_from_switch, metadata, "this switch")
    return message
