"""Priority-based parameter propagation: slices by the order of layers, one at a time.

Jayarajan et al., "Priority-based parameter propagation for distributed DNN training" (MLSys 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.scheduling.schedule import Schedule, ScheduledBlock
from offbeat.scheduling.scheduler import check_size
from offbeat.scheduling.slices import cut
from offbeat.scheduling.urgency_queue import sent_order

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile


@dataclass(frozen=True)
class Priority:
    """Sends slices of gradients, the most urgent that is complete first, each when the one before is there.

    Args:
        slice_bytes: of a slice, at most.

    Raises:
        PlanError: if a slice is to hold nothing.

    >>> Priority()
    Priority(slice_bytes=200000)
    """

    slice_bytes: int = 50_000 * 4  # 50,000 parameters, the paper's

    def __post_init__(self) -> None:
        check_size("slice_bytes", self.slice_bytes)

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        slices = [one for i in range(len(profile.gradients)) for one in cut(profile, i, self.slice_bytes)]
        return Schedule.of_blocks_under_way([ScheduledBlock((one,)) for one in sent_order(profile, slices, 1)], 1)
