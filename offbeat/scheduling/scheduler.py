"""The Protocol of a scheduler: from a profile to a schedule, without I/O, time or memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from offbeat.scheduling.profile import BackwardProfile
    from offbeat.scheduling.schedule import Schedule


class Scheduler(Protocol):
    """The Protocol of a scheduler: in what order and in what portions are gradients sent? A frozen part of a plan.

    One whose schedules have two rounds says so by an attribute of the class, `needs_reduce_scatter = True`: a plan over
    a fabric that cannot carry them is then refused when it is made.
    """

    def schedule(self, profile: BackwardProfile) -> Schedule:
        """Make the schedule of a profile: the same from the same numbers."""
