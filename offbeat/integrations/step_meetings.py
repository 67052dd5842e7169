"""Who meets the others in every step, where a plan lets workers go on by themselves? That plan would be in vain.

Frameworks sum losses, or count tokens, over all workers whenever they like. Now and then that does no harm; in each
step it makes all wait for the slowest one, whatever the plan says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from offbeat.plan import Plan
    from offbeat.run.run import Run

_MOST_IN_A_ROW = 3


def lets_go_on(plan: Plan) -> bool:
    """Whether workers make steps without waiting for all others."""
    return plan.sync.bound != 0 or plan.steps_locally


class StepMeetings:
    """The meetings of one worker with all others, outside of its run's own exchanges.

    Args:
        run: what trains.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._last, self._in_a_row = run, -1, 0

    def note(self, what: str, way_out: str) -> None:
        """The workers meet.

        Args:
            what: makes them, such as "Accelerator.gather".
            way_out: how to do without.

        Raises:
            PlanError: if it is so in one step after the other, and the plan has them go on by themselves.
        """
        step = self._run.step
        if step == self._last:
            return
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last = step
        if self._in_a_row >= _MOST_IN_A_ROW and lets_go_on(self._run.plan):
            raise PlanError(
                f"Cannot have {what} in every step under {short_name(self._run.plan.sync)}: all would wait there for "
                f"the slowest worker, which that policy is to avoid. {way_out}, or use BSP() - at `plan.sync`."
            )
