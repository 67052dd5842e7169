"""A curve of any length in bounded memory.

Points are averaged into bins of consecutive points. When the bins are full, neighbours are merged and each bin takes
twice as many points from then on, so a run of a million steps costs as much as one of a thousand, and every part of it
is still seen: each bin keeps its least and greatest value.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Bin:
    """Sums over `count` points."""

    count: int
    x: float
    y: float
    low: float
    high: float

    def add(self, other: _Bin) -> None:
        self.count += other.count
        self.x += other.x
        self.y += other.y
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)


@dataclass
class Curve:
    """Points (x, y) in order of x.

    >>> curve = Curve(capacity=4)
    >>> for step in range(16):
    ...     curve.add(step, 2.0 * step)
    >>> len(curve), curve.points()[0]
    (4, (1.5, 3.0))

    Args:
        capacity: how many bins there are at most; even.
    """

    capacity: int = 600
    _per_bin: int = 1
    _bins: list[_Bin] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """One more point."""
        point = _Bin(1, x, y, y, y)
        if self._bins and self._bins[-1].count < self._per_bin:
            self._bins[-1].add(point)
            return
        if len(self._bins) == self.capacity:
            self._merge()
        self._bins.append(point)

    def _merge(self) -> None:
        for left, right in zip(self._bins[::2], self._bins[1::2], strict=True):
            left.add(right)
        del self._bins[1::2]
        self._per_bin *= 2

    def __len__(self) -> int:
        return len(self._bins)

    def points(self) -> list[tuple[float, float]]:
        """The mean (x, y) of each bin; y is NaN where a point of the bin was."""
        return [(b.x / b.count, b.y / b.count) for b in self._bins]

    def ranges(self) -> list[tuple[float, float, float]]:
        """(x, least y, greatest y) of each bin."""
        return [(b.x / b.count, b.low, b.high) for b in self._bins]
