"""The number of contributions that may be anything, as rules are told it."""

from __future__ import annotations

from offbeat.errors import PlanError


def check_faulty(faulty: int) -> None:
    """See that it is a number of contributions.

    Raises:
        PlanError: if it is not.
    """
    if type(faulty) is not int or faulty < 0:
        raise PlanError(
            f"Cannot expect {faulty!r} faulty contributions: choose a whole number from 0 - at `plan.rule.faulty`."
        )
