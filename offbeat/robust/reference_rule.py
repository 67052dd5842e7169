"""Rules that hold each contribution against a reference: what a validator computes on data that is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.errors import PlanError
from offbeat.number_range import RealNumbers
from offbeat.robust.rule import Rule

if TYPE_CHECKING:
    import torch


class ReferenceRule(Rule):
    """A rule that goes by a reference on trusted data. An honest contribution is as long as it is, or the rule is told.

    Attributes:
        calibrate: how long an honest contribution is, in units of the reference's norm. 1 where a validator's batches
            are as large as the workers'; more where they are larger, since a mean of more samples is less noisy, and
            shorter: of k times as many samples between 1 and the square root of k.

    Raises:
        PlanError: if `calibrate` is not above 0 and finite.
    """

    calibrate: float = 1.0  # a field of every one
    needs_gram = True
    needs_reference = True
    minority_counts = "contributions are compared with the reference, and not with each other"

    def __post_init__(self) -> None:
        if self.calibrate not in RealNumbers(above=0):
            raise PlanError(
                f"Cannot take contributions to be {self.calibrate!r} times as long as the reference: above 0, and "
                "finite - at `plan.validator.calibrate`."
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether it was told how long honest contributions are."""
        return self.calibrate != 1

    def least(self) -> int:
        return 1

    def most_faulty(self, n: int) -> int:
        return n - 1

    def calibrated(self, gram: torch.Tensor) -> torch.Tensor:
        """The Gram matrix of the contributions and the reference, made as long as an honest contribution is."""
        if not self.is_calibrated:
            return gram
        gram = gram.clone()
        gram[-1] *= self.calibrate
        gram[:, -1] *= self.calibrate
        return gram
