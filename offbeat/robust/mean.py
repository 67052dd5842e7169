"""The weighted mean: no rule against liars, and what all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.robust.rule import Rule


@dataclass(frozen=True)
class Mean(Rule):
    """The weighted mean of all contributions; one faulty one can make it anything.

    >>> import torch
    >>> Mean()(torch.tensor([[1.0], [4.0]]), weights=[2, 1])
    tensor([2.])
    """

    is_weighted = True
    compares = False

    def least(self) -> int:
        return 1

    def most_faulty(self, n: int) -> int:
        return 0
