from __future__ import annotations

import itertools

import pytest

from offbeat.objects.reduce_plan import CALLER, ReduceTree
from offbeat.objects.stripes import LEAST_STRIPE_BYTES, MAX_STRIPES, cut, stripes_for, turned


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("items", [0, 1, 5, 1000, 1001])
@pytest.mark.parametrize("stripes", [1, 2, 3, 7, MAX_STRIPES])
def test_stripes_cover_the_object_without_cutting_an_item(items: int, stripes: int, item_bytes: int) -> None:
    ranges = cut(items * item_bytes, stripes, item_bytes)
    assert len(ranges) == stripes
    assert ranges[0][0] == 0
    assert ranges[-1][1] == items * item_bytes
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    lengths = [end - begin for begin, end in ranges]
    assert all(length % item_bytes == 0 for length in lengths)
    assert max(lengths) - min(lengths) <= item_bytes
    assert lengths == sorted(lengths, reverse=True)


def test_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="2 are left over"):
        cut(10, 2, item_bytes=4)
    for stripes in (0, MAX_STRIPES + 1):
        with pytest.raises(ValueError, match=f"into {stripes} stripes"):
            cut(10, stripes)


def test_small_objects_are_not_cut_small() -> None:
    assert stripes_for(LEAST_STRIPE_BYTES * 3 - 1, 8) == 2
    assert stripes_for(0, 8) == 1
    assert stripes_for(1 << 40, 1000) == MAX_STRIPES


@pytest.mark.parametrize("n", [2, 3, 5])
def test_each_member_makes_the_sum_of_one_stripe_and_sends_no_more_than_a_ring(n: int) -> None:
    members = list(range(n))
    sent = dict.fromkeys(members, 0)
    for stripe in members:
        order = turned(members, stripe)
        assert order[-1] == stripe
        # The one that makes the sum is the caller of the stripe's reduce: the others are a chain that ends at it.
        parents = ReduceTree(n - 1, 1).parents if n > 1 else ()
        assert parents[-1] == CALLER
        for member in order[:-1]:
            sent[member] += 1
        for member in turned(members, stripe - 1)[:-1]:  # the sum goes on along the same circle
            sent[member] += 1
    assert set(sent.values()) == {2 * (n - 1)}, "stripes of 1 / n each"
