"""Sums of floats whose bits do not depend on the version of Python.

`sum` rounds after each addition before Python 3.12, and compensates for it since. What decides (rates of updates,
batches, when a policy is swapped) is to come out alike on both: on the workers of one job, in a resumed run, in the
simulator's predictions, and where `offbeat verify-run` decides again.
"""

from __future__ import annotations

import operator
import sys
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def add_up(values: Iterable[float]) -> float:
    """Add up from left to right, rounding after each addition.

    >>> add_up([0.1] * 10), add_up([])
    (0.9999999999999999, 0)
    """
    if sys.version_info < (3, 12):
        return sum(values)
    return reduce(operator.add, values, 0)
