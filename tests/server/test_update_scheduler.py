"""The rules of the update scheduler one by one; in random orders, at several shards: `test_two_phase_updates`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from offbeat.server.shard.update_scheduler import (
    ApplyUpdate,
    CaptureBlock,
    MeasureUpdate,
    SendBlock,
    UndoUpdate,
    UpdateScheduler,
)
from offbeat.sync import Apply

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.sync import Push

ABOUT = {(worker, clock): (worker, clock) for worker in range(4) for clock in range(40)}


def scheduler(blocks: int = 2, workers: Iterable[int] = (0, 1), *, judges: bool = False) -> UpdateScheduler:
    one = UpdateScheduler(range(blocks), judges=judges)
    for worker in workers:
        one.admit(worker, 0)
    return one


def made(one: UpdateScheduler) -> list[tuple[int, int, list[Push]]]:
    return [(a.block, a.version, [push for push, _ in a.parts]) for a in one.due() if isinstance(a, ApplyUpdate)]


def test_what_was_pushed_before_anybody_heard_of_it_dies_with_its_worker() -> None:
    one = scheduler()
    assert [one.arrive((0, 0), block, "old") for block in (0, 1)] == [1, 0]
    assert one.lose(0) is None, "nobody was told of it"
    one.admit(0, 0)
    assert one.expects((0, 0), 0)
    one.apply(Apply(((0, 0),)), ABOUT)
    assert list(one.due()) == [], "the old one is not used"
    one.arrive((0, 0), 0, "new")
    assert list(one.due(0)) == [ApplyUpdate(0, 1, (((0, 0), "new"),), 1.0)]


def test_a_block_travels_back_while_the_next_still_comes() -> None:
    one = scheduler()
    one.apply(Apply(((0, 0),)), ABOUT)
    one.release(0, 1)
    assert one.arrive((0, 0), 0, "first") == 1
    assert list(one.due(0)) == [ApplyUpdate(0, 1, (((0, 0), "first"),), 1.0), SendBlock(0, 0, 1)]
    assert one.arrive((0, 0), 1, "second") == 0
    assert list(one.due(1)) == [ApplyUpdate(1, 1, (((0, 0), "second"),), 1.0), SendBlock(1, 0, 1)]


def test_an_update_waits_for_all_its_contributions() -> None:
    one = scheduler(blocks=1)
    one.apply(Apply(((1, 0), (0, 0))), ABOUT)
    one.release(0, 1)
    one.arrive((1, 0), 0, "b")
    assert list(one.due()) == []
    one.arrive((0, 0), 0, "a")
    (make, give) = one.due()
    assert isinstance(make, ApplyUpdate)
    assert [part for _, part in make.parts] == ["a", "b"], "by worker, whatever arrived first"
    assert give == SendBlock(0, 0, 1)


@pytest.mark.parametrize(("in_order", "expected"), [(True, []), (False, [(0, 2, [(1, 0)])])])
def test_a_slow_contribution_holds_up_later_updates_only_if_they_are_in_order(
    in_order: bool, expected: list[object]
) -> None:
    one = scheduler(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.apply(Apply(((1, 0),), in_order=in_order), ABOUT)
    one.arrive((1, 0), 0, "b")
    assert made(one) == expected
    one.arrive((0, 0), 0, "a")
    assert made(one) == [(0, 1, [(0, 0)])] + ([(0, 2, [(1, 0)])] if in_order else [])


def test_whose_contribution_was_dropped_sees_all_updates() -> None:
    one = scheduler(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.drop((1, 0), coming=False)
    one.release(1, 1)
    assert list(one.due()) == []
    one.arrive((0, 0), 0, "a")
    assert list(one.due())[1:] == [SendBlock(0, 1, 1)]
    assert one.expects((1, 1), 0)
    assert not one.expects((1, 0), 0), "the dropped one does not come"


def test_what_comes_of_a_dropped_contribution_is_discarded() -> None:
    one = scheduler()
    one.arrive((0, 0), 0, "a")
    one.drop((0, 0), coming=True)
    assert one.arrive((0, 0), 1, "b") == 0, "whole, so that the next may come"
    assert list(one.due()) == []
    assert one.expects((0, 1), 0)


def half_received(*, in_order: bool = True) -> UpdateScheduler:
    """Of worker 1's contribution block 0 has arrived, and is in an update with worker 0's."""
    one = scheduler()
    one.apply(Apply(((0, 0), (1, 0)), in_order=in_order), ABOUT)
    one.release(0, 1)
    one.arrive((0, 0), 0, "a0")
    one.arrive((0, 0), 1, "a1")
    one.arrive((1, 0), 0, "b0")
    make, give = one.due()
    assert isinstance(make, ApplyUpdate)
    assert (make.block, [part for _, part in make.parts]) == (0, ["a0", "b0"])
    assert give == SendBlock(0, 0, 1), "at once, while the rest still comes"
    assert make.entry is not None
    make.entry.before = "what block 0 was"
    return one


def test_what_is_half_there_when_its_worker_is_lost_is_taken_out_again() -> None:
    one = half_received()
    assert one.lose(1) is None
    assert not one.expects((1, 0), 1)
    assert list(one.due()) == [], "it may be whole elsewhere"
    assert one.withdraw((1, 0)) is False
    assert list(one.due()) == [
        UndoUpdate(0, "what block 0 was"),
        ApplyUpdate(0, 1, (((0, 0), "a0"),), 1.0),
        SendBlock(0, 0, 1, number=1),
        ApplyUpdate(1, 1, (((0, 0), "a1"),), 1.0),
        SendBlock(1, 0, 1, number=1),
    ]
    one.admit(1, 5)
    assert one.expects((1, 5), 0)


def test_what_is_whole_everywhere_stays_though_its_worker_is_lost() -> None:
    one = half_received()
    one.arrive((1, 0), 1, "b1")
    assert made(one) == [(1, 1, [(0, 0), (1, 0)])]
    one.lose(1)
    one.commit((1, 0))
    assert list(one.due()) == []


def test_later_updates_of_a_block_are_made_anew_with_it() -> None:
    one = half_received(in_order=False)
    one.commit((0, 0))
    one.apply(Apply(((0, 1),), in_order=False), ABOUT)
    one.arrive((0, 1), 0, "c0")
    one.arrive((0, 1), 1, "c1")
    assert made(one) == [(0, 2, [(0, 1)]), (1, 2, [(0, 1)])]
    one.commit((0, 1))
    one.lose(1)
    one.withdraw((1, 0))
    assert made(one) == [(0, 1, [(0, 0)]), (0, 2, [(0, 1)]), (1, 1, [(0, 0)])]


def test_an_update_is_not_final_while_one_that_was_made_before_it_may_be_undone() -> None:
    one = scheduler()
    for worker in (0, 1):
        one.apply(Apply(((worker, 0),), in_order=False), ABOUT)
    one.arrive((0, 0), 0, "half")
    for block in (0, 1):
        one.arrive((1, 0), block, "whole")
    assert made(one) == [(0, 1, [(0, 0)]), (0, 2, [(1, 0)]), (1, 2, [(1, 0)])]
    one.commit((1, 0))
    assert not one.is_final(2), "it is made anew in block 0 if (0, 0) is withdrawn"
    one.lose(0)
    one.withdraw((0, 0))
    assert made(one) == [(0, 1, []), (0, 2, [(1, 0)]), (1, 1, [])]
    assert one.is_final(1)
    assert one.is_final(2)


def test_who_waits_for_what_comes_after_it_in_order_is_told_too() -> None:
    """At every shard alike, also where that was made, and is committed, before the worker was released."""
    one = scheduler(blocks=1)
    one.apply(Apply(((1, 0),)), ABOUT)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.arrive((1, 0), 0, "it is missing at another shard")
    one.arrive((0, 0), 0, "a")
    assert len(list(one.due())) == 2
    one.commit((0, 0))
    one.release(0, 1)
    assert list(one.due()) == [SendBlock(0, 0, 1)]
    one.lose(1)
    one.withdraw((1, 0))
    *_, make, give = one.due()
    assert (make, give) == (ApplyUpdate(0, 2, (((0, 0), "a"),), 1.0), SendBlock(0, 0, 1, number=1))


def test_an_update_of_what_is_withdrawn_alone_is_empty_and_counts() -> None:
    one = scheduler()
    one.apply(Apply(((1, 0),)), ABOUT)
    one.arrive((1, 0), 0, "b0")
    assert made(one) == [(0, 1, [(1, 0)])]
    one.lose(1)
    one.withdraw((1, 0))
    assert made(one) == [(0, 1, []), (1, 1, [])]


def test_nothing_is_written_down_of_what_is_whole_before_it_is_used() -> None:
    one = scheduler(blocks=1)
    one.arrive((0, 0), 0, "a")
    one.commit((0, 0))
    one.apply(Apply(((0, 0),)), ABOUT)
    (make,) = one.due()
    assert isinstance(make, ApplyUpdate)
    assert make.entry is None


def test_who_takes_very_long_to_push_makes_nobody_keep_much() -> None:
    """After four updates for each worker its own is taken out, and made once it is whole."""
    one = scheduler()
    one.apply(Apply(((1, 0),), in_order=False), ABOUT)
    one.release(1, 1)
    one.arrive((1, 0), 0, "slow")
    assert [type(action) for action in one.due()] == [ApplyUpdate, SendBlock]
    for clock in range(8):
        one.apply(Apply(((0, clock),), in_order=False), ABOUT)
        for block in (0, 1):
            one.arrive((0, clock), block, clock)
        redone = made(one)
        one.commit((0, clock))
    assert [push for block, _, pushes in redone if block == 0 for push in pushes] == [
        *[(0, 7)],
        *[(0, clock) for clock in range(8)],
    ], "the others' are made anew, without it"
    assert len(one._undo_log.of(0)) == 0
    one.arrive((1, 0), 1, "slow")
    assert made(one) == [], "it may still be withdrawn"
    assert one.commit((1, 0)) is True
    assert list(one.due()) == [
        ApplyUpdate(0, 1, (((1, 0), "slow"),), 1.0),
        ApplyUpdate(1, 1, (((1, 0), "slow"),), 1.0),
        SendBlock(1, 1, 1),
    ]


def test_what_waits_too_long_does_not_wait_behind_a_lost_worker() -> None:
    one = scheduler()
    one.apply(Apply(((1, 0),), in_order=False), ABOUT)
    one.arrive((1, 0), 0, "slow")
    for clock in range(9):
        one.apply(Apply(((0, clock),), in_order=False), ABOUT)
        one.arrive((0, clock), 0, clock)
        one.arrive((0, clock), 1, clock)
        list(one.due())
        one.commit((0, clock))
    one.lose(1)
    one.withdraw((1, 0))
    assert made(one) == [(0, 1, []), (1, 1, [])]


def test_a_contribution_that_is_whole_outlives_its_worker() -> None:
    one = scheduler(blocks=1)
    one.arrive((1, 0), 0, "b")
    assert one.lose(1) is None
    one.apply(Apply(((1, 0),)), ABOUT)
    assert made(one) == [(0, 1, [(1, 0)])]


def test_a_lost_worker_is_given_nothing() -> None:
    one = scheduler(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.release(0, 1)
    one.lose(0)
    one.withdraw((0, 0))
    assert [type(action) for action in one.due()] == [ApplyUpdate]


def test_no_block_goes_beyond_a_mark_before_it_is_kept() -> None:
    one = scheduler(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.mark()
    one.apply(Apply(((1, 0),), in_order=False), ABOUT)
    one.arrive((1, 0), 0, "b")
    assert list(one.due()) == []
    one.arrive((0, 0), 0, "a")
    one.commit((0, 0))
    assert [type(action) for action in one.due()] == [ApplyUpdate, CaptureBlock, ApplyUpdate]


def test_a_block_is_kept_when_nothing_in_it_can_be_withdrawn() -> None:
    """It goes on meanwhile; what is kept is what it was at the mark."""
    one = scheduler(blocks=2)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.mark()
    one.arrive((0, 0), 0, "a0")
    one.apply(Apply(((1, 0),), in_order=False), ABOUT)
    one.arrive((1, 0), 0, "b0")
    first, second = one.due()
    assert isinstance(first, ApplyUpdate)
    assert isinstance(second, ApplyUpdate)
    assert second.entry is not None
    second.entry.before = "at the mark"
    one.commit((1, 0))
    assert list(one.due()) == []
    one.arrive((0, 0), 1, "a1")
    assert one.commit((0, 0)) is True
    assert [action for action in one.due() if isinstance(action, CaptureBlock)] == [
        CaptureBlock(0, "at the mark"),
        CaptureBlock(1),
    ]


def test_a_mark_with_what_is_withdrawn_is_given_up() -> None:
    one = half_received()
    one.mark()
    one.lose(1)
    assert one.withdraw((1, 0)) is True
    assert not any(isinstance(action, CaptureBlock) for action in one.due())
    one.mark()
    one.commit((0, 0))
    assert [action.block for action in one.due() if isinstance(action, CaptureBlock)] == [0, 1]


@pytest.mark.parametrize("come", [1, 2], ids=["in part", "whole"])
def test_what_overtakes_stepping_out_and_in_again_is_kept(come: int) -> None:
    """Another shard's worker steps out and in, and pushes, before word of that is here."""
    one = scheduler()
    for block in range(come):
        one.arrive((0, 0), block, f"part {block}")
    assert one.lose(0, stays=True) is None
    one.admit(0, 0, stayed=True)
    assert one.next(0) == (come == 2)
    one.apply(Apply(((0, 0),)), ABOUT)
    for block in range(come, 2):
        one.arrive((0, 0), block, f"part {block}")
    assert [(a.block, a.parts) for a in one.due() if isinstance(a, ApplyUpdate)] == [
        (block, (((0, 0), f"part {block}"),)) for block in (0, 1)
    ]


def test_what_one_had_begun_that_is_gone_and_not_only_out_is_forgotten() -> None:
    """Word that a worker takes part no longer may come before its connection ends."""
    one = scheduler()
    one.arrive((0, 0), 0, "part 0")
    one.lose(0, stays=True)
    assert (0, 0) in one._arrivals
    one.gone(0)
    assert (0, 0) not in one._arrivals
    one.admit(0, 0)
    one.arrive((0, 0), 0, "part 0")
    one.gone(0)
    assert (0, 0) in one._arrivals, "the word that it is lost is to come"


# -- updates that are judged -------------------------------------------------------------------------------------------


def held() -> UpdateScheduler:
    """An update of two contributions that are here, whole, and one of them is committed."""
    one = scheduler(judges=True)
    one.apply(Apply(((0, 0), (1, 0))), ABOUT)
    one.release(0, 1)
    for worker, block in ((0, 0), (1, 0), (0, 1), (1, 1)):
        one.arrive((worker, 0), block, f"{worker}{block}")
        assert list(one.due(block)) == [], "it may still be withdrawn"
    assert one.commit((0, 0)) is False
    return one


BOTH = (((0, 0), "00"), ((1, 0), "10")), (((0, 0), "01"), ((1, 0), "11"))


def test_an_update_is_measured_whole_and_made_when_it_is_judged() -> None:
    one = held()
    assert one.commit((1, 0)) is True
    assert list(one.due()) == [MeasureUpdate(1, dict(enumerate(BOTH)))]
    assert list(one.due()) == [], "once"
    assert one.judge(1, "scales") is True
    assert one.judge(1, "others") is False
    assert list(one.due()) == [
        ApplyUpdate(0, 1, BOTH[0], 1.0, judgement="scales"),
        SendBlock(0, 0, 1),
        ApplyUpdate(1, 1, BOTH[1], 1.0, judgement="scales"),
        SendBlock(1, 0, 1),
    ]
    assert one.is_final(1)


def test_what_is_withdrawn_is_not_measured() -> None:
    one = held()
    one.lose(1)
    one.withdraw((1, 0))
    assert list(one.due()) == [MeasureUpdate(1, {0: (((0, 0), "00"),), 1: (((0, 0), "01"),)})]


def test_what_was_not_measured_is_not_judged() -> None:
    one = held()
    assert one.judge(1, "scales") is False
    assert one.judge(2, "scales") is False
    assert scheduler().judge(1, "scales") is False, "nothing is judged here"
    assert scheduler(blocks=0, judges=True).judge(1, "scales") is True, "other shards have all blocks"


def test_the_next_update_is_measured_beside_what_was_made_of_the_last() -> None:
    one = held()
    one.commit((1, 0))
    one.apply(Apply(((0, 1),)), ABOUT)
    for block in (0, 1):
        one.arrive((0, 1), block, block)
    one.commit((0, 1))
    assert [action.version for action in one.due() if isinstance(action, MeasureUpdate)] == [1]
    one.judge(1, "scales")
    kinds = [type(action) for action in one.due()]
    assert kinds == [ApplyUpdate, SendBlock, ApplyUpdate, SendBlock, MeasureUpdate]


def test_a_mark_waits_for_what_is_held_before_it() -> None:
    one = held()
    one.mark()
    one.commit((1, 0))
    assert [type(action) for action in one.due()] == [MeasureUpdate]
    one.judge(1, "scales")
    kept = [action for action in one.due() if isinstance(action, CaptureBlock)]
    assert kept == [CaptureBlock(0), CaptureBlock(1)]
