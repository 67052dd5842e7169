"""Reduce-scatter in backward, all-gather in the next forward pass: the two halves of an all-reduce, apart.

Zhang et al., "DeAR: Accelerating distributed deep learning with fine-grained all-reduce pipelining" (ICDCS 2023).

Backward has only half of the bytes to hide, and nothing in it is urgent: sums of parts are needed by nobody before the
forward pass begins. So blocks are reduced as they are complete, and gathered in the order in which the forward pass
needs them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from offbeat.scheduling.schedule import GradientSlice, Schedule
from offbeat.scheduling.scheduler import check_size
from offbeat.scheduling.slices import pack
from offbeat.scheduling.timeline import play

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile

_LEAST_BYTES = 1 << 16
_MOST_BLOCKS = 512
_AS_GOOD = 1.003  # of the fastest: each block costs something that the timeline knows nothing of


@dataclass(frozen=True)
class ReduceScatterGather:
    """Reduces blocks of whole gradients as they are complete; gathers them as the next forward pass needs them.

    Args:
        bucket_bytes: at which a block is closed; None for that of a few sizes which the timeline says is the fastest.
            The published program begins with 25 MB, and tries other sizes while it trains.

    Raises:
        PlanError: if a block is to hold nothing.

    >>> ReduceScatterGather()
    ReduceScatterGather(bucket_bytes=None)
    """

    bucket_bytes: int | None = None

    needs_reduce_scatter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            check_size("bucket_bytes", self.bucket_bytes)

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        if self.bucket_bytes is not None:
            return _of_size(profile, self.bucket_bytes)
        floor = max(profile.latency_s, profile.gap_s) * profile.bandwidth  # what is smaller leaves the link idle
        least = max(_LEAST_BYTES, int(min(floor, profile.size_bytes)), profile.size_bytes // _MOST_BLOCKS)
        sizes = itertools.takewhile(lambda size: size < 2 * profile.size_bytes, (least << i for i in range(64)))
        plans = [_of_size(profile, size) for size in (least, *itertools.islice(sizes, 1, None))]
        steps_s = [play(profile, plan).step_s for plan in plans]
        good = [plan for plan, step_s in zip(plans, steps_s, strict=True) if step_s <= _AS_GOOD * min(steps_s)]
        return min(good, key=lambda plan: len(plan.blocks))


def _of_size(profile: BackwardProfile, bucket_bytes: int) -> Schedule:
    whole = (GradientSlice(i, 0, profile.gradients[i].numel) for i in profile.arrivals)
    return Schedule.of_two_rounds(list(pack(profile, whole, bucket_bytes)))
