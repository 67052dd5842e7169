"""When is a schedule made anew? When what it was made from has moved for several steps in a row.

Every schedule costs a question to all workers, and new memory: so where the new one was not worth it, the next is asked
for after twice as many steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.scheduling.timeline import lower_bound_s, play

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat.scheduling.profile import BackwardProfile
    from offbeat.scheduling.schedule import Schedule

BANDWIDTH_MOVED = 0.15  # of what the schedule was made for
BLOCKS_LATE = 0.2  # of the pause between two bursts of gradients
IN_A_ROW = 5  # steps
_FIRST_QUIET = 10  # steps behind a schedule that was not worth it
_MOST_QUIET = 640
_WORTH = 0.02  # of a step: what a new schedule gains at least
_LEAST_S = 0.001


class ReplanTrigger:
    """A worker's wish to have the schedule made anew.

    Attributes:
        reason: for it, in words; "" if there is none.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._in_a_row: dict[str, int] = {}
        self._quiet, self._next_quiet = 0, _FIRST_QUIET

    @property
    def is_suspicious(self) -> bool:
        """Whether something has moved lately."""
        return any(self._in_a_row.values())

    def observe(self, moved: Mapping[str, str]) -> None:
        """Take a step into account.

        Args:
            moved: by what can move, what has, in words; "" if it has not.
        """
        self._quiet = max(0, self._quiet - 1)
        for what, text in moved.items():
            self._in_a_row[what] = self._in_a_row.get(what, 0) + 1 if text else 0
        due = (text for what, text in moved.items() if self._in_a_row[what] >= IN_A_ROW)
        self.reason = "" if self._quiet else next(due, "")

    def decided(self, *, is_new: bool) -> None:
        """Begin to watch anew: all have come to a profile, and to a new schedule or not."""
        self.reason, self._in_a_row = "", {}
        if is_new:
            self._quiet, self._next_quiet = 0, _FIRST_QUIET
        else:
            self._quiet, self._next_quiet = self._next_quiet, min(_MOST_QUIET, 2 * self._next_quiet)


def can_be_worth_it(profile: BackwardProfile, instead_of: Schedule) -> bool:
    """Whether there can be a schedule by this profile that `is_worth_it`; else nobody needs to be asked for one."""
    return lower_bound_s(profile) <= _enough_s(play(profile, instead_of).step_s)


def is_worth_it(profile: BackwardProfile, schedule: Schedule, instead_of: Schedule) -> bool:
    """Whether a schedule gains enough by a profile: at least 2 % of a step, and 1 ms."""
    return play(profile, schedule).step_s <= _enough_s(play(profile, instead_of).step_s)


def _enough_s(step_s: float) -> float:
    """The time that a step has to take at most, instead of so much: less is what measurements differ by."""
    return step_s - max(_WORTH * step_s, _LEAST_S)
