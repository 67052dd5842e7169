"""Rules that are told how many contributions may be anything."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import PlanError
from offbeat.number_range import WholeNumbers
from offbeat.robust.rule import Rule


@dataclass(frozen=True)
class ResilientRule(Rule):
    """A rule that bears so many faulty contributions, which are fewer than half if it does not say otherwise.

    Args:
        faulty: how many contributions may be anything.

    Raises:
        PlanError: if `faulty` is negative.
    """

    faulty: int

    def __post_init__(self) -> None:
        check_faulty(self.faulty)

    def least(self) -> int:
        return 2 * self.faulty + 1

    def most_faulty(self, n: int) -> int:
        return (n - 1) // 2


def check_faulty(faulty: int, path: str = "plan.rule.faulty") -> None:
    """See that it is a number of contributions.

    Args:
        path: of this number in a plan.

    Raises:
        PlanError: if it is not.
    """
    if faulty not in WholeNumbers():
        raise PlanError(f"Cannot expect {faulty!r} faulty contributions: choose a whole number from 0 - at `{path}`.")
