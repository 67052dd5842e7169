"""The Protocol of a scheduler: from a profile to a schedule, without I/O, time or memory; and a check of its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers

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


def check_size(name: str, size_bytes: int) -> None:
    """Refuse a size that holds nothing.

    Args:
        name: of the scheduler's field.

    Raises:
        PlanError: if it is no whole number, or below 1.
    """
    if size_bytes not in WholeNumbers(1):
        raise PlanError(
            f"Cannot schedule with {name} = {size_bytes!r}: a block holds at least one byte. Give a whole "
            f"number from 1, or leave it out - at `plan.scheduling.{name}`."
        )
