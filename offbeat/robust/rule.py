"""The noun: a rule makes one vector of the contributions of n workers, f of which may say anything.

A rule looks at all coordinates at once (`judge`), at each by itself (`combine`), or first the one and then the other.
What it looks at all at once is the Gram matrix of the contributions: every distance, norm and angle is in it, and Gram
matrices of parts of a vector add up, so that nobody has to hold all of it. So:

    gram     = sum over blocks of stack_ND stack_ND'          whoever holds the blocks
    scales   = rule.judge(gram, weights)                       one decides for all blocks
    block    = rule.combine(stack_ND, scales)                  whoever holds the blocks

Rules, checked by `offbeat.testing.check_rule`:

1. The same contributions give the same bits; their order makes no other difference than that of rounding.
2. A contribution with the scale 0 is not looked at again, whatever is in it.
3. With up to f faulty contributions no coordinate is beyond what the correct ones say, or all of it is within the
   bound that the paper gives. Where the correct ones are equal they are the result, at any scale, or the rule declares
   why a minority still counts (`minority_counts`).
4. `check(n)` says what is amiss before anything is computed; what it lets pass does not fail.
5. A rule that is not weighted says so, and gives all the same weight.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, get_args

import torch

from offbeat.errors import PlanError
from offbeat.short_name import short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Scope = Literal["model", "block"]
TooFew = Literal["skip", "hold", "raise"]  # what to do when fewer contribute than a rule needs
_COLUMNS = 1 << 16  # at once, so that what is computed in several passes stays in a core's cache


class Rule(ABC):
    """A robust rule: a frozen description of how contributions become one.

    Attributes:
        needs_gram: whether `judge` looks at the Gram matrix; else every contribution that counts has its weight.
        needs_losses: whether `judge` looks at losses on trusted samples as well, see `LossRule`.
        needs_reference: whether a vector that is trusted stands last in the stack and in the Gram matrix.
        reference_is_previous: whether that vector is the update before, and not one on trusted data.
        scope: what the Gram matrix is of: all blocks of the "model" together, or each "block" by itself.
        compares: whether contributions are held against each other, so that they have to be of the same elements.
        judges_norms: whether the norm of a contribution beside the reference's decides about it.
        is_weighted: whether the weights of contributions, such as their samples, count.
        minority_counts: why up to f faulty contributions still move the result where all others are equal; "" if they
            do not.
    """

    needs_gram = False
    needs_losses = False
    needs_reference = False
    reference_is_previous = False
    compares = True
    judges_norms = False
    is_weighted = False
    minority_counts = ""
    scope: Scope = "model"

    @property
    def adds_up(self) -> bool:
        """Whether contributions that have their scales are added up, and no more."""
        return type(self).combine is Rule.combine

    @property
    def needs_validator(self) -> bool:
        """Whether it goes by a reference, or by losses, on trusted data, which only a validator can bring."""
        return self.needs_losses or (self.needs_reference and not self.reference_is_previous)

    @property
    def is_calibrated(self) -> bool:
        """Whether it was told how long honest contributions are beside the reference."""
        return False

    @property
    def judges_model(self) -> bool:
        """Whether nothing can be combined before all blocks of all contributions are there."""
        return self.needs_gram and self.scope == "model"

    @abstractmethod
    def least(self) -> int:
        """The fewest contributions of which it can make one."""

    @abstractmethod
    def most_faulty(self, n: int) -> int:
        """The breakdown point: of n contributions so many may be anything, whatever the rule was told."""

    def check(self, n: int) -> str:
        """Say why it cannot be used with n contributions, and the way out; "" if it can be.

        >>> from offbeat.robust import Krum
        >>> Krum(faulty=2).check(6)
        'Krum(faulty=2) needs at least 7 contributions, and there are 6. Use faulty=1, or more workers'
        """
        if n >= self.least():
            return ""
        fewer = self.most_faulty(n)
        way = f"Use faulty={fewer}, or more workers" if fewer > 0 else "Use more workers, or Median()"
        return f"{short_name(self)} needs at least {self.least()} contributions, and there are {n}. {way}"

    def calibrated(self, gram: torch.Tensor) -> torch.Tensor:
        """The Gram matrix that `judge` is to look at, of that of contributions as they came."""
        return gram

    def judge(self, gram: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Decide by what each contribution is multiplied before they are combined.

        Args:
            gram: [n, n] float64, `calibrated`, with the reference as one more row and column at the end, if any.
            weights: [n] float64, above 0.

        Returns:
            [n] float64 like `gram`; 0 for what is rejected.
        """
        return weights / weights.sum()

    def combine(self, stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        """Combine a block of the contributions, by default by adding them up.

        Args:
            stack_ND: [n, D]; the reference last, if there is one. Left as it is.
            scales_N: [n] as `judge` returned them.

        Returns:
            [D] in the dtype of the contributions.
        """
        return add_scaled(stack_ND, scales_N)

    def __call__(
        self, stack_ND: torch.Tensor, weights: Sequence[float] | None = None, reference: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Make one vector of whole contributions.

        Args:
            stack_ND: [n, D] finite.
            weights: of each; all alike if None.
            reference: [D], for a rule that needs one.

        Raises:
            ValueError: if `check` finds something amiss, or the reference is missing.
        """
        if why := self.check(len(stack_ND)):
            raise ValueError(f"Cannot combine: {why}.")
        if self.needs_reference != (reference is not None):
            raise ValueError(
                f"Cannot combine: {short_name(self)} {'needs a' if self.needs_reference else 'takes no'} reference."
            )
        whole = stack_ND if reference is None else torch.cat((stack_ND, reference[None]))
        given = torch.ones(len(stack_ND), dtype=torch.float64)
        if weights is not None and self.is_weighted:
            given = torch.tensor(weights, dtype=torch.float64)
        gram = gram_of(whole) if self.needs_gram else torch.zeros(len(whole), len(whole), dtype=torch.float64)
        return self.combine(whole, self.judge(self.calibrated(gram), given))


def check_scope(scope: Scope) -> None:
    """Check that a Gram matrix can be of this.

    Raises:
        PlanError: if it cannot.
    """
    if scope not in get_args(Scope):
        choices = " or ".join(map(repr, get_args(Scope)))
        raise PlanError(f"Cannot judge by {scope!r}: choose {choices} - at `plan.validator.scope`.")


def gram_of(stack_ND: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The Gram matrix [n, n] of vectors, summed in float64: distances are differences of what is in it.

    A vector with NaN or Inf spoils its own row and column only.
    """
    gram = torch.zeros(len(stack_ND), len(stack_ND), dtype=torch.float64)
    for chunk in zip(*(vector.split(_COLUMNS) for vector in stack_ND), strict=True):
        wide = torch.stack(chunk).double()
        gram += (wide @ wide.T).cpu()
    return gram


def distances_of(gram: torch.Tensor) -> torch.Tensor:
    """The squares of the distances [n, n] of vectors, from their Gram matrix."""
    norms = gram.diagonal()
    return (norms[:, None] + norms[None] - 2 * gram).clamp_(min=0).fill_diagonal_(0)


def add_scaled(stack_ND: torch.Tensor | Sequence[torch.Tensor], scales_N: torch.Tensor) -> torch.Tensor:
    """Add up vectors [n, D] that are multiplied by scales [n]; one with the scale 0 may hold anything."""
    counts = scales_N.nonzero().view(-1).tolist()
    total = torch.zeros_like(stack_ND[0], dtype=summed_in(stack_ND[0].dtype))
    for i in counts:
        total.add_(stack_ND[i], alpha=float(scales_N[i]))
    return total.to(stack_ND[0].dtype)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: two values of float16 may add up to more than it can hold, and bfloat16 rounds each sum."""
    return torch.promote_types(dtype, torch.float32)


def counted(stack_ND: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
    """Leave out the contributions whose scale is 0, for rules that look at each coordinate."""
    keep = scales_N != 0
    return stack_ND[: len(keep)] if bool(keep.all()) else stack_ND[: len(keep)][keep.to(stack_ND.device)]


def by_coordinate(stack_ND: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply a function of sorted columns [n, C], float32 or wider, to a part of the coordinates at a time; [D]."""
    out = torch.empty_like(stack_ND[0])
    for begin in range(0, stack_ND.shape[1], _COLUMNS):
        place = slice(begin, begin + _COLUMNS)
        out[place] = function(sorted_rows(stack_ND[:, place].to(summed_in(out.dtype))))
    return out


def sorted_rows(stack_NC: torch.Tensor) -> torch.Tensor:
    """Sort each column of [n, C] by itself, the least first; what is NaN or infinite comes last.

    By a sorting network of minima and maxima of whole rows (Batcher's odd-even merge): a core compares several columns
    at once, which sorting one column after the other does not.
    """
    rows = list(stack_NC.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("inf")).unbind(0))
    for i, j in _comparators(len(rows)):
        rows[i], rows[j] = torch.minimum(rows[i], rows[j]), torch.maximum(rows[i], rows[j])
    return torch.stack(rows)


@functools.lru_cache(maxsize=256)
def _comparators(n: int) -> tuple[tuple[int, int], ...]:
    """The comparisons of Batcher's odd-even merge sort of n elements (Knuth, vol. 3, algorithm 5.2.2M)."""
    found = []
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            found += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(found)


def nearest_mean(sorted_NC: torch.Tensor, center_C: torch.Tensor, count: int) -> torch.Tensor:
    """The mean [C] of those `count` values of each column that are nearest to its center; of sorted columns.

    They stand beside each other: of the windows of that many the first whose next value is not nearer than its first.
    """
    n = len(sorted_NC)
    first = torch.zeros_like(center_C, dtype=torch.int16)
    for i in range(n - count):
        first += (center_C - sorted_NC[i]) > (sorted_NC[i + count] - center_C)
    total = torch.zeros_like(center_C)
    for j in range(n):
        inside = (first <= j) & (j < first + count)
        total += torch.where(inside, sorted_NC[j], 0)
    return total / count
