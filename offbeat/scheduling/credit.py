"""Credits: slices by urgency, so many bytes of them under way.

Peng et al., "A generic communication scheduler for distributed DNN training acceleration" (ByteScheduler, SOSP 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.scheduling.schedule import Schedule, ScheduledBlock
from offbeat.scheduling.slices import cut
from offbeat.scheduling.urgency_queue import sent_order

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile


@dataclass(frozen=True)
class Credit:
    """Sends slices of gradients, the most urgent that is complete first, as long as there is credit.

    Args:
        slice_bytes: of a slice, at most; the default is the published program's 1,000,000 parameters.
        credit_bytes: under way at a time; the default is its 4,000,000 parameters.

    >>> Credit()
    Credit(slice_bytes=4000000, credit_bytes=16000000)
    """

    slice_bytes: int = 4_000_000
    credit_bytes: int = 16_000_000

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        slices = [one for i in range(len(profile.gradients)) for one in cut(profile, i, self.slice_bytes)]
        order = sent_order(profile, slices, self.credit_bytes)
        return Schedule.of_bytes_under_way([ScheduledBlock((one,)) for one in order], self.credit_bytes, profile)
