"""NaN and Inf in what one worker brings by itself, where others go on without it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from offbeat.errors import NumericsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.engine.step_metrics import StepMetrics
    from offbeat.plan import Nonfinite

_log = logging.getLogger("offbeat")
_MOST_NAMED = 3


def leave_out(names: Sequence[str], choice: Nonfinite, *, what: str, step: int, metrics: StepMetrics) -> bool:
    """Decide whether this is to count for nothing, and say so if it is.

    Args:
        names: parameters whose part holds NaN or Inf.
        choice: the plan's.
        what: it is, such as "gradient".

    Raises:
        NumericsError: if the plan says so.
    """
    if not names or choice == "pass":
        return False
    more = ", ..." if len(names) > _MOST_NAMED else ""
    text = f"step {step}: the {what} of {', '.join(names[:_MOST_NAMED])}{more} holds NaN or Inf on this worker"
    if choice == "raise":
        raise NumericsError(
            f"{text}. Lower the learning rate or clip; nonfinite='skip' leaves such steps out, 'pass' lets them "
            "through - at `plan.nonfinite`."
        )
    metrics.event("skipped", f"{text}; it is left out.", step)
    _log.warning("%s; it is left out.", text)
    return True
