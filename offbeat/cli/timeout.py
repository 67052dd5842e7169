"""The option `--timeout` of several commands: a number of seconds that every wait can go by."""

from __future__ import annotations

from offbeat.errors import PlanError

LEAST_S, MOST_S = 0.1, 86_400.0


def check_timeout(seconds: float) -> float:
    """Return it if it can be a timeout.

    Raises:
        PlanError: if it is no number of seconds in the bounds.
    """
    if not LEAST_S <= seconds <= MOST_S:  # nan is not, either
        raise PlanError(
            f"Cannot use a timeout of {seconds:g} s: choose a number of seconds from {LEAST_S:g} to {MOST_S:g} (a day) "
            "- at --timeout."
        )
    return seconds
