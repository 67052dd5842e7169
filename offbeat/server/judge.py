"""The judge of contributions: what a rule makes of their Gram matrix, be it of one block or of a whole update."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from offbeat.robust import LossRule
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.robust import Rule


MOST_SCALE = 1e30  # which every float type can be multiplied by


def pack_gram(gram: torch.Tensor) -> bytes:
    """Write a part of a Gram matrix [n, n] as it travels; of what is not finite only that is left, on the diagonal."""
    finite = gram.diagonal().isfinite()
    whole = torch.where(finite[:, None] & finite, gram, 0.0)
    whole.diagonal()[~finite] = torch.inf
    return struct.pack(f"<{whole.numel()}d", *whole.view(-1).tolist())


def less_noise(gram: torch.Tensor, turn: float) -> torch.Tensor:
    """The Gram matrix as honest contributions would have it without their noise, or better; see `docs/robust.md`.

    Nobody can tell a contribution that noise has made longer, or turned away from the reference, from one that was so
    before. So each has the benefit of the doubt: it is no longer than the reference unless noise does not explain its
    length, and leads away from it only by what noise does not explain.

    Args:
        gram: [n, n] with the reference last; of the others the squares of norms are less what may be noise, and may be
            below 0.
        turn: the part of an inner product with a unit vector that may be noise.
    """
    gram, own = gram.clone(), gram[-1, -1]
    squares = gram.diagonal()[:-1]
    squares.clamp_(min=float(own))
    bound = (squares * own).sqrt()  # of Cauchy and Schwarz: no cosine is beyond 1
    products = (gram[:-1, -1] + turn * own.sqrt()).clamp(-bound, bound)
    gram[:-1, -1] = gram[-1, :-1] = products
    return gram


class Judge:
    """A rule at work: what it decides about each contribution; what it has to leave out is said once.

    Args:
        rule: that decides.
        tell: says what people should know.
        turn: by which noise may turn contributions away from a reference, see `less_noise`; 0 without noise.
    """

    def __init__(self, rule: Rule, tell: Callable[[str], None], turn: float = 0.0) -> None:
        self._rule, self._tell, self._turn = rule, tell, turn
        self._told: set[str] = set()

    def scales(
        self, gram: torch.Tensor, workers: Sequence[int], weights: Sequence[float], losses: Sequence[float] = ()
    ) -> torch.Tensor:
        """Judge the contributions of one update.

        What holds NaN or Inf, or is so long that the square of its norm does not fit, is rejected: it has no finite
        place on the diagonal. All is rejected if too few are left, or there is no reference where one is needed.

        Args:
            gram: [n, n] float64, with the reference as one more row and column at the end, if there is one.
            workers: that brought each.
            weights: of each, above 0.
            losses: on trusted samples, for a rule that needs them: without any contribution, and with each of those
                that have a finite place on the diagonal.

        Returns:
            The scales, as many as `gram` has rows; 0 for what is rejected.
        """
        rule, count = self._rule, len(workers)
        none = torch.zeros(len(gram), dtype=torch.float64)
        finite = gram.diagonal().isfinite()
        for worker in (worker for worker, is_finite in zip(workers, finite.tolist(), strict=False) if not is_finite):
            self.say(f"What rank {worker} pushes holds NaN or Inf, and is rejected.")
        kept = finite[:count].nonzero().view(-1)
        if not len(kept):
            return none
        if isinstance(rule, LossRule):
            return self._by_losses(rule, gram, workers, losses)
        if rule.check(len(kept)):
            self.say(too_few(rule, len(kept)))
            return none
        if rule.needs_reference:
            if len(gram) == count or not bool(finite[-1]):
                which = "holds NaN or Inf" if len(gram) > count else "has not come yet"
                self.say(f"Updates are left out: the reference that {short_name(rule)} needs {which}.")
                return none
            kept = torch.cat((kept, torch.tensor([count])))
        given = [weights[i] if rule.is_weighted else 1.0 for i in kept.tolist() if i < count]
        seen, said = rule.calibrated(gram[kept][:, kept]), torch.tensor(given, dtype=torch.float64)
        if self._turn:
            seen = less_noise(seen, self._turn)
        judged = rule.judge(seen, said)
        huge = judged.abs() > MOST_SCALE
        for place in huge.nonzero().view(-1).tolist():
            self.say(f"What rank {workers[int(kept[place])]} pushes is next to nothing, and is rejected.")
        judged = torch.where(huge, 0.0, judged)
        if not bool(judged.isfinite().all()):
            self.say(f"Updates are left out: {short_name(rule)} makes no numbers of contributions as long as these.")
            return none
        return none.index_copy(0, kept[: len(judged)], judged)

    def _by_losses(
        self, rule: LossRule, gram: torch.Tensor, workers: Sequence[int], losses: Sequence[float]
    ) -> torch.Tensor:
        """Judge by losses. What is not finite has none, and is among those that are left out, as the worst there is."""
        none = torch.zeros(len(gram), dtype=torch.float64)
        if rule.check(len(workers)):
            self.say(too_few(rule, len(workers)))
            return none
        if not losses:
            return none
        found, is_finite = iter(losses[1:]), gram.diagonal().isfinite().tolist()
        after = [next(found) if one else math.inf for one in is_finite]
        judged = rule.judge(gram, torch.ones(len(gram), dtype=torch.float64), [losses[0], *after])
        for worker, scale, one, loss in zip(workers, judged.tolist(), is_finite, after, strict=True):
            if one and not scale and not loss <= losses[0]:  # not of whom others do more for it
                self.say(f"What rank {worker} pushes raises the loss on trusted samples, and is rejected.")
        if not bool(judged.any()):
            self.say(
                f"Updates are left out: by the loss on trusted samples {short_name(rule)} accepts no contribution."
            )
        return judged

    def know(self, count: int) -> None:
        """Say nothing of updates of so few contributions: people have been told why they are no more."""
        self._told.add(too_few(self._rule, count))

    def say(self, text: str) -> None:
        """Tell people something, once."""
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def too_few(rule: Rule, count: int) -> str:
    """Say why a rule can make nothing of so few contributions."""
    return f"Updates are left out: {rule.check(count)}."
