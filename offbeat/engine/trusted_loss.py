"""The loss on trusted samples, as a validator's script has named it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.errors import ModelError
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat.robust import Rule


class TrustedLoss:
    """The loss that the script of a validator has named last.

    Attributes:
        function: computes it, on the samples at hand; None if it was not named since the last update was judged.
    """

    def __init__(self) -> None:
        self.function: Callable[[], torch.Tensor | float] | None = None

    def check(self, rule: Rule) -> None:
        """See that there is a loss.

        Raises:
            ModelError: if there is none.
        """
        if self.function is None:
            raise ModelError(
                f"Cannot judge by {short_name(rule)}: this validator's script does not say what the loss is. Before "
                "each optimizer.step() call run.score_by(lambda: loss_function(model(x), y)), with the batch at hand."
            )

    def forget(self) -> None:
        """Have the script name it again: the next update is to be judged on other samples."""
        self.function = None

    def compute(self) -> float:
        """Compute it, in the mode that the model is in.

        Raises:
            ModelError: if it is no single number.
        """
        assert self.function is not None, "checked before the contribution was brought"
        with torch.no_grad():
            loss = self.function()
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ModelError(
                f"Cannot judge by a loss of shape {list(loss.shape)}: a single number is needed. Return its mean in "
                "run.score_by."
            )
        return float(loss)
