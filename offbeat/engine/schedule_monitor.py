"""A watch on steps that go by a schedule: whether blocks are done when it was predicted, and if not, what has changed.

It costs a few numbers per block, and every few steps one per gradient. Each worker watches by itself; where one finds
that things have moved it asks for a new schedule, and all make it from what all have found
(`CrossIterationReducer.vote`).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from offbeat.errors import DisagreementError
from offbeat.scheduling import (
    BANDWIDTH_MOVED,
    BLOCKS_LATE,
    BackwardProfile,
    LinkMonitor,
    ReplanTrigger,
    bursts_of,
    slowest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat.scheduling import Schedule

_LATE = 0.1  # of backward: less is what it costs to carry blocks meanwhile, where bursts are close
_EACH = 4  # steps: gradients are looked at in one of them, unless something has moved
_KEPT = 5  # steps, of which the median counts
_ENOUGH = 3  # of them: with fewer, times are as they were
_ENOUGH_DONE = 4  # operations of a step, to be choosy about which of them say what the link carries


class OperationTimes(NamedTuple):
    """The times of one operation, in clock seconds: of a block's exchange, or of one of its two rounds.

    Args:
        complete_s: all that it sends was.
        issued_s, done_s: it was.
        is_seen: somebody waited for it when it was done; else it may have been done earlier.
    """

    complete_s: float
    issued_s: float
    done_s: float
    is_seen: bool


class StepTaken(NamedTuple):
    """One step that went by the schedule.

    Args:
        operations: of all blocks, and behind them, with two rounds, of all gathers; in the order of the schedule.
        backward_began_s, backward_ended_s: in clock seconds.
        forward_s: of the forward pass before it, but for what was waited for.
        samples: of this worker.
        workers: that took part.
    """

    operations: Sequence[OperationTimes]
    backward_began_s: float
    backward_ended_s: float
    forward_s: float
    samples: int
    workers: int


class Checkable(Protocol):
    """The Protocol of what a worker tells: it says what in it cannot be; "" if all can."""

    @property
    def trouble(self) -> str: ...


T = TypeVar("T", bound=Checkable)


class ScheduleMonitor:
    """The watch on the steps of one schedule.

    Args:
        profile, schedule: that were agreed on.
        earlier: the watch on the steps before, which this one goes on from.
        is_of_host: whether the host's clock tells when gradients are complete; else that is not looked at, nor how long
            the passes take.
    """

    def __init__(
        self,
        profile: BackwardProfile,
        schedule: Schedule,
        earlier: ScheduleMonitor | None = None,
        *,
        is_of_host: bool = True,
    ) -> None:
        self.profile, self._is_of_host = profile, is_of_host
        # Each of two rounds sends half of what an all-reduce does.
        sizes, rounds = schedule.sizes_bytes(profile), 2 if schedule.gathers else 1
        self._sizes = [sizes[index] // rounds for index in (*range(len(sizes)), *schedule.gathers)]
        self._complete_s: list[float] = []  # of each block, as predicted: no block comes before one that is earlier
        for block in schedule.blocks:
            ready_s = max(profile.gradients[one.gradient].ready_s for one in block.slices)
            self._complete_s.append(max(ready_s, *self._complete_s[-1:]) if self._complete_s else ready_s)
        self._pause_s = profile.backward_s / len(bursts_of(profile))
        if earlier is None:
            self.trigger = ReplanTrigger()
            self.link = LinkMonitor(profile.latency_s, profile.bandwidth, profile.gap_s)
        else:
            self.trigger, self.link = earlier.trigger, earlier.link
        # What was agreed on is of the slowest: a faster worker has nothing to tell but what is slower than that, or
        # faster than it was itself.
        self._own_bandwidth = max(profile.bandwidth, self.link.bandwidth)
        self._has_forward = profile.forward_s > 0
        self._late_s: list[float] = []  # in the first steps
        self._steps = 0
        self._ready: dict[str, deque[float]] = {one.name: deque(maxlen=_KEPT) for one in profile.gradients}
        self._forward_s: deque[float] = deque(maxlen=_KEPT)
        self._backward_s: deque[float] = deque(maxlen=_KEPT)
        self._samples = self._workers = 0  # of the first steps

    @property
    def watches_gradients(self) -> bool:
        """Whether `gradient_is_complete` is to be called in this step."""
        return self._is_of_host and (self.trigger.is_suspicious or self._steps % _EACH == 0)

    def gradient_is_complete(self, name: str, since_s: float) -> None:
        """Note so many seconds since backward began."""
        if since_s >= 0:
            self._ready[name].append(since_s)

    def step_taken(self, step: StepTaken) -> None:
        """Take a step into account."""
        self._steps += 1
        if self._is_of_host:
            self._forward_s.append(step.forward_s)
            self._backward_s.append(step.backward_ended_s - step.backward_began_s)
        if not self._samples:
            self._samples, self._workers = step.samples, step.workers
        self._observe_link(step)
        self.trigger.observe(self._moved(step))

    def measured(self) -> BackwardProfile:
        """The profile as this worker finds it now; what it knows too little of is as it was."""
        old = self.profile
        forward = statistics.median(self._forward_s) / old.forward_s if self._is_enough(self._forward_s) else 1.0
        forward = forward if forward > 0 else 1.0
        gradients = tuple(
            dataclasses.replace(
                one,
                ready_s=statistics.median(ready) if self._is_enough(ready) else one.ready_s,
                forward_s=one.forward_s * forward,
            )
            for one, ready in zip(old.gradients, self._ready.values(), strict=True)
        )
        backward_s = statistics.median(self._backward_s) if self._is_enough(self._backward_s) else old.backward_s
        link = self.link
        return BackwardProfile(
            gradients,
            backward_s=max(backward_s, *(one.ready_s for one in gradients)),
            latency_s=link.latency_s,
            bandwidth=link.bandwidth,
            gap_s=link.gap_s,
        )

    def _is_enough(self, times: Sequence[float]) -> bool:
        return len(times) >= _ENOUGH and self._has_forward

    def _moved(self, step: StepTaken) -> Mapping[str, str]:
        """The things that have moved since the schedule was made, in words."""
        before, now = self.profile.bandwidth, self.link.bandwidth
        limit_s = max(BLOCKS_LATE * self._pause_s, _LATE * self.profile.backward_s)
        late_s = statistics.median(
            one.complete_s - step.backward_began_s - expected_s
            for one, expected_s in zip(step.operations[: len(self._complete_s)], self._complete_s, strict=True)
        )
        if len(self._late_s) < _KEPT:
            self._late_s.append(late_s)
        is_early = late_s < min(0.0, statistics.median(self._late_s)) - limit_s
        has_slowed, has_sped_up = (
            now < (1 - BANDWIDTH_MOVED) * before,
            now > (1 + BANDWIDTH_MOVED) * self._own_bandwidth,
        )
        moved = {
            "bandwidth": (
                has_slowed or has_sped_up,
                f"the link carries {now / 1e6:.3g} MB of gradients in a second, and not {before / 1e6:.3g}",
            ),
            "workers": (
                step.workers != self._workers,
                f"{step.workers} workers take part, and not {self._workers}",
            ),
            "batch": (step.samples != self._samples, f"batches have {step.samples} samples, and not {self._samples}"),
            "lateness": (
                self._is_of_host and (late_s > limit_s or is_early),
                f"gradients are complete {abs(late_s) * 1e3:.3g} ms {'earlier' if late_s < 0 else 'later'}",
            ),
        }
        return {what: text if has else "" for what, (has, text) in moved.items()}

    def _observe_link(self, step: StepTaken) -> None:
        """Have those operations say what the link carries that do so best.

        Behind backward all is there on all workers, and nobody waits for another's gradients.
        """
        found = []  # size, seconds, whether the link was idle, whether backward was over
        before_s, is_seen = 0.0, True
        for size, one in zip(self._sizes, step.operations, strict=True):
            was_idle = one.issued_s >= before_s
            if one.is_seen and (was_idle or is_seen):
                since_s = one.issued_s if was_idle else before_s
                found.append((size, one.done_s - since_s, was_idle, since_s >= step.backward_ended_s))
            before_s, is_seen = one.done_s, one.is_seen
        busy = [one for one in found if not one[2]]
        behind = [one for one in busy if one[3]]
        # A block that found an idle link may have been issued before its gradients were complete, but on the host.
        rest = found if self._is_of_host else busy
        best = next((some for some in (behind, busy) if len(some) >= _ENOUGH_DONE), rest)
        for size, seconds, was_idle, _ in best:
            self.link.observe(size, seconds, was_idle=was_idle)


def agreed(told: Mapping[int, str]) -> BackwardProfile:
    """The profile of all workers' measurements, by rank.

    Raises:
        DisagreementError: if one of them cannot be, or is of other gradients.
    """
    profiles = {rank: read_profile(text, f"rank {rank}") for rank, text in told.items()}
    first = next(iter(profiles))
    for rank, one in profiles.items():
        theirs, ours = ([(g.name, g.numel, g.kind) for g in profiles[r].gradients] for r in (rank, first))
        if theirs != ours:
            raise DisagreementError(
                f"Cannot make a schedule: rank {rank} has {len(one.gradients)} gradients that are not those of rank "
                f"{first}. Build the same model on every worker."
            )
    return slowest(list(profiles.values()))


def read_profile(text: Any, source: str) -> BackwardProfile:
    """Read what `to_text` has made; arguments and errors are those of `read_told`."""
    return read_told(text, _decode, source)


def read_told(text: Any, decode: Callable[[Any], T], source: str) -> T:
    """Read what a worker has measured.

    Args:
        decode: makes it of its text.
        source: whose it is, such as "rank 2".

    Raises:
        DisagreementError: if it is nothing of the kind, or cannot be.
    """
    try:
        told = decode(text)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise DisagreementError(
            f"Cannot make a schedule: what {source} has told cannot be read ({error}). Run the same offbeat on all "
            "workers."
        ) from error
    if trouble := told.trouble:
        raise DisagreementError(
            f"Cannot make a schedule: {source} has told {trouble}. See that its clock runs on, and start it anew."
        )
    return told


def to_text(profile: BackwardProfile) -> str:
    """A worker's measurements, for `agreed`."""
    return msgspec.json.encode(profile).decode()


_decode = msgspec.json.Decoder(BackwardProfile).decode
