"""The bins of features whose values are in several places.

The places find the bins together, by sums and maxima. A feature of few values has a bin for each; any other is cut at
quantiles, which are found by their bits, the highest first. So bins depend on the values of all rows, and not on where
these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat.groups.summing import Summand, ordered, unordered

if TYPE_CHECKING:
    from offbeat.groups.summing import Summing

_GREATEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class FeatureBins:
    """The cuts between the values of each feature.

    Args:
        edges: of each feature, ascending: a bin ends with the values that are not above its edge. A feature of which
            values are missing has a last edge above all values: a tree can part those that are missing.
        has_missing: (features,).
    """

    edges: tuple[np.ndarray, ...]
    has_missing: np.ndarray

    @property
    def width(self) -> int:
        """Return the number of bins of each feature; the last one is of missing values."""
        return max((len(one) for one in self.edges), default=0) + 2

    @property
    def is_cut(self) -> np.ndarray:
        """Return (features, width - 2): whether a feature has that edge."""
        return np.arange(self.width - 2) < np.array([len(one) for one in self.edges])[:, None]

    def places(self, features: np.ndarray) -> np.ndarray:
        """Return (rows, features), int32: the bin of each value, counted through all features."""
        made = np.empty(features.shape, np.int32)
        for at, edges in enumerate(self.edges):
            column = features[:, at]
            place = np.where(np.isnan(column), self.width - 1, np.searchsorted(edges, column))
            made[:, at] = place + at * self.width
        return made


def common_bins(features: np.ndarray, most: int) -> Summing[FeatureBins]:
    """Return the bins by the values of all places.

    Args:
        features: (rows, features) of this place; NaN where a value is missing.
        most: bins of a feature, with the one for missing values.
    """
    columns = [np.sort(column[~np.isnan(column)] + 0.0) for column in features.T]  # -0.0 becomes 0.0
    there = np.array([len(column) for column in columns], np.int64)
    count, missing = (yield Summand(torch.from_numpy(np.stack((there, len(features) - there))))).numpy()
    limit = np.maximum(most - (missing > 0), 1)
    quantiles = yield from _quantiles(columns, count, limit, most)
    ends = yield from _completed(columns, quantiles, limit)
    nexts = np.full((len(columns), most), np.inf)
    for at, (column, mine) in enumerate(zip(columns, ends, strict=True)):
        nexts[at, : len(mine)] = np.append(column, np.inf)[np.searchsorted(column, mine, side="right")]
    nexts = -(yield Summand(torch.from_numpy(-nexts), "max")).numpy()
    edges = []
    for at, mine in enumerate(ends):
        low, high = mine[:-1], nexts[at, : max(len(mine) - 1, 0)]
        middle = low / 2 + high / 2
        cuts = np.where((low <= middle) & (middle < high), middle, low)
        edges.append(np.append(cuts, _GREATEST) if missing[at] else cuts)
    return FeatureBins(tuple(edges), missing > 0)


def _quantiles(columns: list[np.ndarray], count: np.ndarray, limit: np.ndarray, most: int) -> Summing[list[np.ndarray]]:
    """The values below which equal shares of each feature's values are, with the greatest one."""
    parts = np.minimum(np.arange(1, most + 1), limit[:, None])
    ranks = -(-count[:, None] * parts // limit[:, None])  # rounded up
    keys = [ordered(column) for column in columns]
    found = np.zeros(ranks.shape, np.uint64)
    for bit in range(63, -1, -1):
        trial = found | np.uint64(1 << bit)
        below = np.zeros(ranks.shape, np.int64)
        for at, mine in enumerate(keys):
            below[at] = np.searchsorted(mine, trial[at])
        total = (yield Summand(torch.from_numpy(below))).numpy()
        found = np.where(total < ranks, trial, found)
    return [np.unique(unordered(one)) if there else np.zeros(0) for one, there in zip(found, count, strict=True)]


def _completed(columns: list[np.ndarray], quantiles: list[np.ndarray], limit: np.ndarray) -> Summing[list[np.ndarray]]:
    """All values of a feature that has few; else its quantiles.

    In each round the places find the value before each that is known.
    """
    known, is_open = list(quantiles), [len(one) > 0 for one in quantiles]
    while any(is_open):
        before = np.full((len(columns), int(limit.max())), -np.inf)
        for at in np.flatnonzero(is_open):
            before[at, : len(known[at])] = np.append(-np.inf, columns[at])[np.searchsorted(columns[at], known[at])]
        found = (yield Summand(torch.from_numpy(before), "max")).numpy()
        for at in np.flatnonzero(is_open):
            grown = np.union1d(known[at], found[at][found[at] > -np.inf])
            is_open[at] = len(known[at]) < len(grown) <= limit[at]
            known[at] = grown if len(grown) <= limit[at] else quantiles[at]
    return known
