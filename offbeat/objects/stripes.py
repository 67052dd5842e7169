"""Stripes: ranges of an object, each of which has its own way through the network.

A stripe is a range of an object's bytes with a broadcast and a reduce of its own. With as many stripes as members, and
the sum of stripe j made at member j, an all-reduce moves what a ring moves, 2 (n - 1) / n of the object over each link,
and still begins with whoever is there. A reader that loses the feeder of one stripe misses the rest of that stripe
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

_Member = TypeVar("_Member")
MAX_STRIPES = 256
LEAST_STRIPE_BYTES = 64 << 10
"""A shorter stripe costs more in messages than its way through the network saves."""


def stripes_for(size_bytes: int, members: int) -> int:
    """Choose the number of stripes of an object that so many members sum or read.

    >>> stripes_for(100 << 20, 5), stripes_for(128 << 10, 5), stripes_for(100, 5)
    (5, 2, 1)
    """
    return max(1, min(members, size_bytes // LEAST_STRIPE_BYTES, MAX_STRIPES))


def cut(size_bytes: int, stripes: int, item_bytes: int = 1) -> list[tuple[int, int]]:
    """Cut an object into ranges (begin, end) of bytes, whose lengths differ by one item at most.

    No item is cut; where there are fewer items than stripes, the last ranges are empty.

    >>> cut(40, 3, item_bytes=4)
    [(0, 16), (16, 28), (28, 40)]

    Raises:
        ValueError: if the object is not a whole number of items, or the number of stripes is out of bounds.
    """
    if not 1 <= stripes <= MAX_STRIPES:
        raise ValueError(f"Cannot cut an object into {stripes} stripes: 1 to {MAX_STRIPES} are possible.")
    items, rest = divmod(size_bytes, item_bytes)
    if rest:
        raise ValueError(f"Cannot cut {size_bytes} bytes into items of {item_bytes} bytes: {rest} are left over.")
    each, longer = divmod(items, stripes)
    ends = [(each * (stripe + 1) + min(stripe + 1, longer)) * item_bytes for stripe in range(stripes)]
    return list(zip([0, *ends], ends, strict=False))


def turned(members: Sequence[_Member], stripe: int) -> list[_Member]:
    """The members in the order of one stripe: the one after `stripe` first, the one at `stripe` last.

    A chain in this order ends at member `stripe`, so each stripe's sum is made at another member.

    >>> turned(["a", "b", "c"], 0)
    ['b', 'c', 'a']
    """
    begin = (stripe + 1) % len(members)
    return [*members[begin:], *members[:begin]]
