"""Questions about the workers that an exchange may raise: who is at another batch, whose gradient is NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.engine.control_group import odd_ones
from offbeat.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.engine.control_group import ControlGroup


def different_batches(control: ControlGroup, *, step: int, stamp: int) -> DisagreementError:
    """The error that says which ranks are at another batch. Collective."""
    texts = control.texts("the comparison of batches", str(stamp))
    odd, usual = odd_ones(texts)
    where = ", ".join(f"rank {rank} is at batch {texts[rank]}" for rank in odd)
    return DisagreementError(
        f"The workers disagree about the step: at exchange {step} {where}, the others at batch "
        f"{texts[usual]}. A worker skipped a step, or took one more; let every worker call backward once per batch."
    )


def nonfinite(control: ControlGroup, places: Sequence[str], mine: Sequence[str]) -> str:
    """Name the workers whose gradients hold NaN or Inf, and the parameters. Collective.

    Args:
        places: where the mean does.
        mine: parameters of which this worker's own gradient does.
    """
    texts = control.texts("the search for NaN and Inf", some(mine))
    culprits = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items() if text)
    summed = f"the mean of {some(places)}, in none of the workers' own"
    return f"NaN or Inf in the gradient of {culprits or summed}"


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
