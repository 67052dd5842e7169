"""A run's records, summed up over equal bins of time or of steps: a long run is drawn as clearly as a short one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from offbeat.report.records import StepRecord

MOST_BINS = 240
Band = tuple["NDArray[np.float64]", "NDArray[np.float64]", "NDArray[np.float64]", "NDArray[np.float64]"]


def edges_of(begin: float, end: float, most: int = MOST_BINS) -> NDArray[np.float64]:
    """Borders of bins between two times, in seconds; about a second or more each, but at least eight."""
    count = max(8, min(most, math.ceil(end - begin)))
    return np.linspace(begin, max(end, begin + 1e-3), count + 1)


def spread(
    steps: Iterable[StepRecord], edges: NDArray[np.float64], amounts: Iterable[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Amounts of steps, each spread evenly over the time that its step took.

    Args:
        edges: of bins, unix time.
        amounts: of each step, such as its samples.

    Returns:
        The sums of each bin, and how many seconds of it were covered by steps.
    """
    sums, covered = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    width_s = edges[1] - edges[0]
    for step, amount in zip(steps, amounts, strict=True):
        begin, end = step.time_s, step.time_s + max(step.step_s, 1e-9)
        if end <= edges[0] or begin >= edges[-1]:
            continue
        first = min(max(int((begin - edges[0]) / width_s), 0), len(sums) - 1)
        last = min(max(int((end - edges[0]) / width_s), 0), len(sums) - 1)
        for index in range(first, last + 1):
            within_s = max(0.0, min(end, edges[index + 1]) - max(begin, edges[index]))
            sums[index] += amount * within_s / (end - begin)
            covered[index] += within_s
    return sums, covered


def band(points: Sequence[tuple[float, float]], most: int = MOST_BINS) -> Band:
    """The band that holds most of a cloud of points, from left to right.

    Args:
        points: (x, y), in any order; at least one.

    Returns:
        The middles of the bins that hold points, and in each the 10 % quantile, the median and the 90 % quantile of y.
    """
    x, y = (np.array(column, dtype=np.float64) for column in zip(*sorted(points), strict=True))
    if len(x) <= most:
        return x, y, y, y
    borders = np.linspace(x[0], np.nextafter(x[-1], np.inf), most + 1)
    which = np.clip(np.searchsorted(borders, x, side="right") - 1, 0, most - 1)
    cuts = np.flatnonzero(np.diff(which)) + 1
    groups = np.split(y, cuts)
    middles = np.array([group.mean() for group in np.split(x, cuts)])
    low, middle, high = (np.array([np.quantile(group, q) for group in groups]) for q in (0.1, 0.5, 0.9))
    return middles, low, middle, high


def with_gaps(of: Band) -> Band:
    """The same, but broken where nothing was recorded for much longer than usual: no line is drawn across that."""
    x = of[0]
    if len(x) < 3:
        return of
    apart = np.diff(x)
    wide = np.flatnonzero(apart > 5 * np.median(apart)) + 1
    x, low, middle, high = (np.insert(column, wide, np.nan) for column in of)
    return x, low, middle, high
