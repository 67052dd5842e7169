"""Rules that look at what each contribution does to the loss on trusted samples.

losses = loss(x), loss(x + u_1), ..., loss(x + u_n)      a validator finds them out
scales = rule.judge(gram, weights, losses)               one decides for all blocks
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from offbeat.robust.rule import Rule, gram_of
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence


class LossRule(Rule):
    """A rule that decides by losses; of the Gram matrix it looks at the diagonal alone, the squares of norms."""

    needs_gram = True
    needs_losses = True
    minority_counts = "contributions are ranked by the loss, and not by how many say the same"

    @abstractmethod
    def judge(self, gram: torch.Tensor, weights: torch.Tensor, losses: Sequence[float] = ()) -> torch.Tensor:
        """Decide by what each contribution is multiplied before they are combined.

        Args:
            gram: [n, n] float64.
            weights: [n] float64, above 0.
            losses: [1 + n] without any contribution, and with each; without losses nothing is accepted.

        Returns:
            [n] float64; 0 for what is rejected.
        """

    def __call__(
        self,
        stack_ND: torch.Tensor,
        weights: Sequence[float] | None = None,
        reference: torch.Tensor | None = None,
        losses: Sequence[float] = (),
    ) -> torch.Tensor:
        """Make one vector of whole contributions.

        Args:
            stack_ND: [n, D] finite.
            weights: of each; all alike if None.
            reference: none is taken.
            losses: [1 + n] without any contribution, and with each.

        Raises:
            ValueError: if `check` finds something amiss, there is a reference, or there are not as many losses.
        """
        n = len(stack_ND)
        if why := self.check(n):
            raise ValueError(f"Cannot combine: {why}.")
        if reference is not None or len(losses) != 1 + n:
            raise ValueError(
                f"Cannot combine: {short_name(self)} takes no reference, and needs {1 + n} losses: the one without any "
                f"contribution, and that with each; there are {len(losses)}."
            )
        given = torch.ones(n, dtype=torch.float64)
        if weights is not None and self.is_weighted:
            given = torch.tensor(weights, dtype=torch.float64)
        return self.combine(stack_ND, self.judge(gram_of(stack_ND), given, losses))
