"""Credits: slices by urgency, so many bytes of them under way.

Peng et al., "A generic communication scheduler for distributed DNN training acceleration" (ByteScheduler, SOSP 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.scheduling import credit_tuner
from offbeat.scheduling.schedule import Schedule, ScheduledBlock
from offbeat.scheduling.scheduler import check_size
from offbeat.scheduling.slices import cut
from offbeat.scheduling.timeline import play
from offbeat.scheduling.urgency_queue import sent_order

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile

_LEAST_BYTES = 1 << 16
_MOST_SLICES = 2048


@dataclass(frozen=True)
class Credit:
    """Sends slices of gradients, the most urgent that is complete first, as long as there is credit.

    Args:
        slice_bytes: of a slice, at most; the default is the published program's 1,000,000 parameters.
        credit_bytes: under way at a time; the default is its 4,000,000 parameters.
        trials: how many pairs of these two are tried on the timeline of what was measured in the first steps, these
            two first (Bayesian optimization, by `optuna`); the fastest is taken. 0 for these two as they are. The
            published program tries 15 in steps of the training itself, about 100 steps each.

    Raises:
        PlanError: if a slice is to hold nothing, or nothing is to be under way; or if pairs are to be tried, and
            `optuna` is not installed.

    >>> Credit()
    Credit(slice_bytes=4000000, credit_bytes=16000000, trials=0)
    """

    slice_bytes: int = 4_000_000
    credit_bytes: int = 16_000_000
    trials: int = 0

    def __post_init__(self) -> None:
        check_size("slice_bytes", self.slice_bytes)
        check_size("credit_bytes", self.credit_bytes)
        if self.trials < 0:
            raise PlanError(
                f"Cannot try {self.trials!r} pairs of slice and credit: give a whole number from 1, or 0 for none - at "
                "`plan.scheduling.trials`."
            )
        if self.trials:
            credit_tuner.check_library(self)

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile."""
        if not self.trials:
            return _of_sizes(profile, self.slice_bytes, self.credit_bytes)
        least = max(_LEAST_BYTES, profile.size_bytes // _MOST_SLICES)
        sizes = credit_tuner.best_sizes(
            lambda slice_bytes, credit_bytes: play(profile, _of_sizes(profile, slice_bytes, credit_bytes)).step_s,
            (self.slice_bytes, self.credit_bytes),
            least=least,
            most=max(least, profile.size_bytes),
            trials=self.trials,
        )
        return _of_sizes(profile, *sizes)


def _of_sizes(profile: BackwardProfile, slice_bytes: int, credit_bytes: int) -> Schedule:
    slices = [one for i in range(len(profile.gradients)) for one in cut(profile, i, slice_bytes)]
    order = sent_order(profile, slices, credit_bytes)
    return Schedule.of_bytes_under_way([ScheduledBlock((one,)) for one in order], credit_bytes, profile)
