"""A robust rule in the place of the mean.

A rule that looks at each coordinate, or judges each block by itself, makes a block at once. One that judges the whole
model is first handed each block to `measure`; the coordinator adds the Gram matrices up and judges them, and then the
contributions come back with their scales, to be combined.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from offbeat.robust import add_scaled, gram_of
from offbeat.server.judge import Judge, too_few

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.privacy import GaussianMechanism
    from offbeat.protocol.optimizer_spec import Hyper
    from offbeat.robust import Rule
    from offbeat.server.aggregator import BlockContribution


class RobustAggregator:
    """An `Aggregator` that combines by a rule.

    A block that holds NaN or Inf is rejected before any arithmetic. Where fewer are left than the rule needs, the
    update leaves the block as it is, which is said once.

    Args:
        rule: that combines.
        tell: says what people should know.
        privacy: by which contributions were noised, and references were not; None if none were.

    Attributes:
        judge: decides what counts.
    """

    def __init__(self, rule: Rule, tell: Callable[[str], None], privacy: GaussianMechanism | None = None) -> None:
        # Contributions that are held against each other, or ranked by what they do to the loss, are noised alike.
        self._privacy = privacy if rule.needs_reference and not rule.reference_is_previous else None
        self._rule, self.judge = rule, Judge(rule, tell, 0.0 if self._privacy is None else self._privacy.most_turn)
        self.keeps_update, self.needs_reference = rule.reference_is_previous, rule.needs_reference

    def measure(
        self, contributions: Sequence[BlockContribution], dtype: torch.dtype, reference: BlockContribution | None
    ) -> torch.Tensor:
        """Compute the Gram matrix of one block: of what weighs something, and the reference if the rule needs one.

        Where a rule goes by losses nobody looks at what is not on the diagonal, and it is 0.
        """
        rows = self._rows(contributions, reference)
        if self._rule.needs_losses:
            squares = [gram_of([one.part.decode(dtype)]).view(()) for one in rows]
            return torch.diag(torch.stack(squares)) if rows else torch.zeros(0, 0, dtype=torch.float64)
        return self._gram([one.part.decode(dtype) for one in rows], rows)

    def combine(
        self,
        contributions: Sequence[BlockContribution],
        dtype: torch.dtype,
        reference: BlockContribution | None = None,
    ) -> torch.Tensor | None:
        """Decode all, reject what is not finite, and combine the others; or only what the judgement has left of all."""
        if not self._rule.needs_gram:
            return self._by_coordinate(contributions, dtype)
        rows = self._rows(contributions, reference)
        if self._rule.judges_model:
            return self._scaled([(one.part.decode(dtype), one.scale) for one in rows if one.scale])
        decoded = [one.part.decode(dtype) for one in rows]
        own = [one for one in rows if not one.is_reference]
        scales = self.judge.scales(self._gram(decoded, rows), [one.worker for one in own], [one.weight for one in own])
        return self._scaled([(values, scale) for values, scale in zip(decoded, scales.tolist(), strict=True) if scale])

    def _rows(
        self, contributions: Sequence[BlockContribution], reference: BlockContribution | None
    ) -> list[BlockContribution]:
        rows = [one for one in contributions if one.weight > 0]
        return [*rows, reference] if self._rule.needs_reference and reference is not None else rows

    def _gram(self, decoded: Sequence[torch.Tensor], rows: Sequence[BlockContribution]) -> torch.Tensor:
        """Compute the Gram matrix, with the squares of norms less what may be noise: they add up over blocks, too.

        Only elements that were sent have noise: 0 is what a codec has left out.
        """
        gram = gram_of(decoded)
        if self._privacy is not None:
            for place, (values, row) in enumerate(zip(decoded, rows, strict=True)):
                if not row.is_reference:
                    gram[place, place] -= self._privacy.most_energy(int(values.count_nonzero()))
        return gram

    def _scaled(self, kept: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor | None:
        """Combine what has a scale; the others are not looked at."""
        if not kept:
            return None
        scales = torch.tensor([scale for _, scale in kept], dtype=torch.float64)
        return self._combined([values for values, _ in kept], scales)

    def _combined(self, rows: Sequence[torch.Tensor], scales: torch.Tensor) -> torch.Tensor:
        """Combine; where it is but a sum contributions are not copied into one stack for it."""
        return add_scaled(rows, scales) if self._rule.adds_up else self._rule.combine(torch.stack(list(rows)), scales)

    def _by_coordinate(self, contributions: Sequence[BlockContribution], dtype: torch.dtype) -> torch.Tensor | None:
        decoded = [(one, one.part.decode(dtype)) for one in contributions if one.weight > 0]
        finite = [(one, values) for one, values in decoded if bool(torch.isfinite(values).all())]
        for one, _ in decoded if len(finite) < len(decoded) else ():
            if all(one is not other for other, _ in finite):
                self.judge.say(f"What rank {one.worker} pushes holds NaN or Inf: such blocks are rejected.")
        if not finite:
            return None
        if self._rule.check(len(finite)):
            self.judge.say(too_few(self._rule, len(finite)))
            return None
        weights = [one.weight if self._rule.is_weighted else 1.0 for one, _ in finite]
        scales = torch.tensor(weights, dtype=torch.float64)
        return self._combined([values for _, values in finite], scales / scales.sum())


def agreed_hyper(said: Sequence[tuple[Hyper, ...]]) -> tuple[Hyper, ...]:
    """The hyper-parameters that most contributions name; of as many the first. One that lies about them is outvoted."""
    if all(one == said[0] for one in said):
        return said[0]
    count = Counter(repr(one) for one in said)
    ((most, _),) = count.most_common(1)
    return next(one for one in said if repr(one) == most)
