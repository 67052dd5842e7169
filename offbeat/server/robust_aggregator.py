"""A robust rule in the place of the mean, where each shard makes its blocks: rules that look at each coordinate."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from offbeat.protocol.training import DensePayload
from offbeat.robust import gram_of
from offbeat.server.aggregator import BlockContribution
from offbeat.server.pushed_block import PushedBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from offbeat.protocol.optimizer_spec import Hyper
    from offbeat.robust import Rule


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


class ReferenceJudge:
    """Judges the contributions to each block beside the latest reference of that block; without one nothing counts.

    Args:
        rule: that needs a reference.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._latest: dict[int, torch.Tensor] = {}  # by block

    def judged(
        self, block: int, parts: Sequence[BlockContribution], references: Set[int], dtype: torch.dtype
    ) -> list[BlockContribution]:
        """Make one contribution of what the rule leaves of the workers'; none if nothing can be judged.

        Args:
            references: ranks of validators; the mean of what they bring is the reference.
        """
        finite = [(one.worker, one.part.decode(dtype)) for one in parts if one.weight > 0]
        finite = [(worker, values) for worker, values in finite if bool(torch.isfinite(values).all())]
        if trusted := [values for worker, values in finite if worker in references]:
            self._latest[block] = torch.stack(trusted).mean(0)
        stack = [values for worker, values in finite if worker not in references]
        if not stack or block not in self._latest:
            return []
        whole = torch.stack([*stack, self._latest[block]])
        scales = self._rule.judge(gram_of(whole), torch.ones(len(stack), dtype=torch.float64))
        if not bool((scales != 0).any()):
            return []
        return [BlockContribution(-1, 1.0, PushedBlock(DensePayload(), self._rule.combine(whole, scales)))]


def agreed_hyper(said: Sequence[tuple[Hyper, ...]]) -> tuple[Hyper, ...]:
    """The hyper-parameters that most contributions name; of as many the first. One that lies about them is outvoted."""
    count = Counter(repr(one) for one in said)
    ((most, _),) = count.most_common(1)
    return next(one for one in said if repr(one) == most)
