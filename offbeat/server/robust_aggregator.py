"""A robust rule in the place of the mean, where each shard makes its blocks: rules that look at each coordinate."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.protocol.optimizer_spec import Hyper
    from offbeat.robust import Rule
    from offbeat.server.aggregator import BlockContribution


class RobustAggregator:
    """An `Aggregator` that combines by a rule.

    A block that holds NaN or Inf is rejected before any arithmetic. Where fewer are left than the rule needs, the
    update leaves the block as it is, which is said once.

    Args:
        rule: that looks at each coordinate by itself.
        tell: says what people should know.
    """

    def __init__(self, rule: Rule, tell: Callable[[str], None]) -> None:
        self._rule, self._tell = rule, tell
        self._told: set[str] = set()

    def combine(self, contributions: Sequence[BlockContribution], dtype: torch.dtype) -> torch.Tensor | None:
        """Decode all, reject what is not finite, and combine the others."""
        decoded = [(one, one.part.decode(dtype)) for one in contributions if one.weight > 0]
        finite = [(one, values) for one, values in decoded if bool(torch.isfinite(values).all())]
        for one, _ in decoded if len(finite) < len(decoded) else ():
            if all(one is not other for other, _ in finite):
                self._say(f"What rank {one.worker} pushes holds NaN or Inf: such blocks are rejected.")
        if not finite:
            return None
        if why := self._rule.check(len(finite)):
            self._say(f"Updates are left out: {why}.")
            return None
        weights = [one.weight if self._rule.is_weighted else 1.0 for one, _ in finite]
        scales = torch.tensor(weights, dtype=torch.float64)
        return self._rule.combine(torch.stack([values for _, values in finite]), scales / scales.sum())

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def agreed_hyper(said: Sequence[tuple[Hyper, ...]]) -> tuple[Hyper, ...]:
    """The hyper-parameters that most contributions name; of as many the first. One that lies about them is outvoted."""
    count = Counter(repr(one) for one in said)
    ((most, _),) = count.most_common(1)
    return next(one for one in said if repr(one) == most)
