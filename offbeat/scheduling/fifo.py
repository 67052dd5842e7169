"""First in, first out: buckets in the order in which gradients are complete, as DistributedDataParallel has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.scheduling.schedule import GradientSlice, Schedule
from offbeat.scheduling.scheduler import check_size
from offbeat.scheduling.slices import pack

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile


@dataclass(frozen=True)
class FIFO:
    """Sends buckets of whole gradients as they are complete; what it gains is that the next forward hides the rest.

    Args:
        bucket_bytes: at which a bucket is closed.

    Raises:
        PlanError: if a bucket is to hold nothing.

    >>> FIFO()
    FIFO(bucket_bytes=1048576)
    """

    bucket_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        check_size("bucket_bytes", self.bucket_bytes)

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        whole = (GradientSlice(i, 0, profile.gradients[i].numel) for i in profile.arrivals)
        return Schedule.of_blocks_under_way(list(pack(profile, whole, self.bucket_bytes)))
