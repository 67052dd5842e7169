"""The check of the numbers that a method is made with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Container


def check_number(method: object, name: str, allowed: Container[object], advice: str) -> None:
    """Refuse a value that a method cannot have.

    Args:
        method: that has it.
        name: of its field.
        allowed: the values that it may have.
        advice: which these are, in words.

    Raises:
        PlanError: if it is none of them.
    """
    value = getattr(method, name)
    if value not in allowed:
        raise PlanError(
            f"Cannot plan {type(method).__name__} with {name}={value!r}: choose {advice} - at `plan.collective.{name}`."
        )
