"""What an exchange can find out about the workers, in words: who is at another batch, whose gradient is NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.engine.control import odd_ones
from offbeat.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.engine.control import Control
    from offbeat.engine.flat import Flat


def different_batches(control: Control, *, step: int, stamp: int) -> DisagreementError:
    """The error that says which ranks are at another batch. Collective."""
    texts = control.texts("the comparison of batches", str(stamp))
    odd, usual = odd_ones(texts)
    where = ", ".join(f"rank {rank} is at batch {texts[rank]}" for rank in odd)
    return DisagreementError(
        f"The workers disagree about the step: at exchange {step} {where}, the others at batch "
        f"{texts[usual]}. A worker skipped a step, or took one more; let every worker call backward once per batch."
    )


def nonfinite(control: Control, bad: Sequence[Flat]) -> str:
    """Whose gradients, of which parameters, hold NaN or Inf. Collective."""
    mine = some([name for flat in bad for name in flat.nonfinite])
    texts = control.texts("the search for NaN and Inf", mine)
    culprits = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    summed = f"the mean of {some([flat.bucket.label for flat in bad])}, in none of the workers' own"
    return f"NaN or Inf in the gradient of {culprits or summed}"


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
