"""Fits whose rows are in several places, as generators: each place yields its part of a sum, and is sent the sum.

All places run the same generator on their own rows. They are sent the same sums, so they take the same steps and end
with the same model: Kingpin's gradient accumulation for algebraic models, and histograms of trees (Li and Kumar, PVLDB
14(11), 2021). Without I/O: whoever runs the generators carries the parts.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from offbeat.groups.fitting import BucketFit, BucketTask

T = TypeVar("T")


class Summand(NamedTuple):
    """One place's part of a sum.

    Args:
        values: of one shape and dtype in all places.
        op: "max" for the largest in place of the sum.
    """

    values: torch.Tensor
    op: Literal["sum", "max"] = "sum"


Summing = Generator[Summand, torch.Tensor, T]
"""A fit in one of several places, which returns the same in all of them."""


@runtime_checkable
class SummingModel(Protocol):
    """The Protocol of a model spec that can be fitted to a group of which several places have rows."""

    def fit_summed(self, tasks: Callable[[], Iterable[BucketTask]], configs: Sequence[Any]) -> Summing[BucketFit]:
        """Fit one model for each configuration to the rows of all places.

        Args:
            tasks: called as often as the rows of this place are needed; returns one part of them at least, which may
                have no rows.
        """


def run_alone(work: Summing[T]) -> T:
    """Run a fit whose rows are all here."""
    try:
        part = next(work)
        while True:
            part = work.send(part.values)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def run_together(works: Sequence[Summing[T]]) -> list[T]:
    """Run a fit whose rows are in several places of this process, and return what each has made of it."""
    parts = [next(work) for work in works]
    while True:
        op = parts[0].op
        total = parts[0].values.clone()
        for part in parts[1:]:
            total = total + part.values if op == "sum" else torch.maximum(total, part.values)
        found, parts = [], list[Summand]()
        for work in works:
            try:
                parts.append(work.send(total.clone()))
            except StopIteration as end:
                found.append(end.value)
        if found:
            return found


def greatest(values: np.ndarray, count: int, place: int, places: int) -> Summing[np.ndarray]:
    """Return which of this place's values are among the greatest of all places; of equal ones, the last.

    The least of them is found by its bits, the highest first: each is a sum of how many values are at least that.

    Args:
        values: (rows,), float64; NaN counts as the greatest.
        count: of values that are among them.
        place, places: of this one, and how many there are.
    """
    keys = ordered(values)
    least = np.uint64(0)
    for bit in range(63, -1, -1):
        trial = least | np.uint64(1 << bit)
        total = yield Summand(torch.tensor([int((keys >= trial).sum())], dtype=torch.int64))
        if int(total) >= count:
            least = trial
    is_above, is_equal = keys > least, keys == least
    mine = torch.zeros(2, places, dtype=torch.int64)
    mine[0, place], mine[1, place] = int(is_above.sum()), int(is_equal.sum())
    above, equal = (yield Summand(mine)).tolist()
    after = sum(equal[place + 1 :])
    taken = min(max(count - sum(above) - after, 0), equal[place])
    found = is_above
    if taken:
        found[np.flatnonzero(is_equal)[-taken:]] = True
    return found


def ordered(values: np.ndarray) -> np.ndarray:
    """Return whole numbers, uint64, in the order of floating-point values; NaN is the greatest."""
    bits = (np.asarray(values, np.float64) + 0.0).view(np.int64)  # -0.0 becomes 0.0
    keys = np.where(bits < 0, ~bits.view(np.uint64), bits.view(np.uint64) | np.uint64(1 << 63))
    return np.where(np.isnan(values), np.iinfo(np.uint64).max, keys)


def unordered(keys: np.ndarray) -> np.ndarray:
    """Return the floating-point values of which `ordered` has made whole numbers."""
    top = np.uint64(1 << 63)
    return np.where(keys >= top, keys ^ top, ~keys).view(np.float64)
