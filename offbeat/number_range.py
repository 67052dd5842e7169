"""The ranges that the numbers of a plan have to be in: nothing is in one that only looks like a number.

True, "4" and 4.0 are no whole numbers, True and "0.5" no numbers: they would be written into a plan as what they are,
and be compared, printed and digested as something else.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class WholeNumbers:
    """The whole numbers from `least` on, to `most` if that is given.

    >>> [value in WholeNumbers(1) for value in (1, 0, 2.0, True, "3", None)]
    [True, False, False, False, False, False]
    """

    least: int = 0
    most: int | None = None

    def __contains__(self, value: object) -> bool:
        return type(value) is int and self.least <= value and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class TruthValues:
    """True and False, and no number that is equal to one of them.

    >>> [value in TruthValues() for value in (True, False, 1, "yes")]
    [True, True, False, False]
    """

    def __contains__(self, value: object) -> bool:
        return type(value) is bool


@dataclass(frozen=True)
class RealNumbers:
    """The numbers between bounds, each of which is in the range (`least`, `most`) or not (`above`, `below`).

    Args:
        finite: whether infinity is in none, nor a whole number that is too large for a float.

    >>> [value in RealNumbers(above=0, most=1) for value in (0.5, 1, 0, math.nan, True, "0.5", None)]
    [True, True, False, False, False, False, False]
    """

    least: float = -math.inf
    most: float = math.inf
    above: float | None = None
    below: float | None = None
    finite: bool = True

    def __contains__(self, value: object) -> bool:
        if type(value) is not int and type(value) is not float:
            return False
        return (
            self.least <= value <= self.most
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (not self.finite or -sys.float_info.max <= value <= sys.float_info.max)
        )
