"""Merged gradients: a gradient waits for the next one where that costs less than a message of its own.

Shi et al., "MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms" (INFOCOM 2019),
algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.scheduling.schedule import GradientSlice, Schedule
from offbeat.scheduling.slices import pack

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile


@dataclass(frozen=True)
class MergedGradient:
    """Sends gradients as they are complete, merged with the next where that is sooner done.

    >>> MergedGradient()
    MergedGradient()
    """

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        buckets: list[list[int]] = []
        done_s = 0.0  # all that was closed is
        for i in profile.arrivals:
            if buckets and _merges(profile, buckets[-1], i, done_s):
                buckets[-1].append(i)
            else:
                if buckets:
                    done_s = _done_s(profile, buckets[-1], done_s)
                buckets.append([i])
        blocks = [
            block
            for bucket in buckets
            for block in pack(profile, (GradientSlice(i, 0, profile.gradients[i].numel) for i in bucket), float("inf"))
        ]
        return Schedule.of_blocks_under_way(blocks)


def _merges(profile: BackwardProfile, bucket: list[int], i: int, done_s: float) -> bool:
    """Whether a gradient is complete before what is open could be sent, or less behind than one more costs."""
    start_s = max(done_s, max(profile.gradients[j].ready_s for j in bucket))
    return profile.gradients[i].ready_s < start_s + max(profile.latency_s, profile.gap_s)


def _done_s(profile: BackwardProfile, bucket: list[int], done_s: float) -> float:
    """The time at which a bucket is done, if all before it are by `done_s`."""
    start_s = max(done_s, max(profile.gradients[j].ready_s for j in bucket))
    return start_s + profile.latency_s + profile.takes_s(sum(profile.gradients[j].size_bytes for j in bucket))
