"""Sets of ranks as numbers that can be added up: each worker brings its own bit, and the sums say who has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def bit_of(rank: int, bits: int) -> tuple[float, ...]:
    """The numbers that a worker brings which is in the set.

    Args:
        bits: that are in each number.

    >>> bit_of(5, bits=4)
    (0.0, 2.0)
    """
    index, bit = divmod(rank, bits)
    return (*[0.0] * index, float(1 << bit))


def ranks_in(sums: Sequence[float], bits: int) -> tuple[int, ...]:
    """The ranks in the set, in order.

    >>> ranks_in((3.0, 2.0), bits=4)
    (0, 1, 5)
    """
    return tuple(bits * index + bit for index, one in enumerate(sums) for bit in range(bits) if int(one) >> bit & 1)
