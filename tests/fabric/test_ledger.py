"""The ledger against a plain model of its rules, in thousands of random orders."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from offbeat.fabric.server.shard.ledger import Give, Keep, Ledger, Loss, Make
from offbeat.sync import Apply

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat.sync import Push

ABOUT = {(worker, clock): (worker, clock) for worker in range(4) for clock in range(40)}


def ledger(blocks: int = 2, workers: Iterable[int] = (0, 1)) -> Ledger:
    one = Ledger(range(blocks))
    for worker in workers:
        one.admit(worker, 0)
    return one


def made(one: Ledger) -> list[tuple[int, int, list[Push]]]:
    return [(a.block, a.version, [push for push, _ in a.parts]) for a in one.due() if isinstance(a, Make)]


def test_what_was_pushed_before_anybody_heard_of_it_dies_with_its_worker() -> None:
    one = ledger()
    assert [one.arrive((0, 0), block, "old") for block in (0, 1)] == [1, 0]
    assert one.lose(0) is None, "nobody was told of it"
    one.admit(0, 0)
    assert one.expects((0, 0), 0)
    one.apply(Apply(((0, 0),)), ABOUT)
    assert list(one.due()) == [], "the old one is not used"
    one.arrive((0, 0), 0, "new")
    assert list(one.due(0)) == [Make(0, 1, (((0, 0), "new"),), 1.0)]


def test_a_block_travels_back_while_the_next_still_comes() -> None:
    one = ledger()
    one.apply(Apply(((0, 0),)), ABOUT)
    one.release(0, 1)
    assert one.arrive((0, 0), 0, "first") == 1
    assert list(one.due(0)) == [Make(0, 1, (((0, 0), "first"),), 1.0), Give(0, 0, 1)]
    assert one.arrive((0, 0), 1, "second") == 0
    assert list(one.due(1)) == [Make(1, 1, (((0, 0), "second"),), 1.0), Give(1, 0, 1)]


def test_an_update_waits_for_all_its_contributions() -> None:
    one = ledger(blocks=1)
    one.apply(Apply(((1, 0), (0, 0))), ABOUT)
    one.release(0, 1)
    one.arrive((1, 0), 0, "b")
    assert list(one.due()) == []
    one.arrive((0, 0), 0, "a")
    (make, give) = one.due()
    assert isinstance(make, Make)
    assert [part for _, part in make.parts] == ["a", "b"], "by worker, whatever arrived first"
    assert give == Give(0, 0, 1)


@pytest.mark.parametrize(("in_order", "expected"), [(True, []), (False, [(0, 2, [(1, 0)])])])
def test_a_slow_contribution_holds_up_later_updates_only_if_they_are_in_order(
    in_order: bool, expected: list[object]
) -> None:
    one = ledger(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.apply(Apply(((1, 0),), in_order=in_order), ABOUT)
    one.arrive((1, 0), 0, "b")
    assert made(one) == expected
    one.arrive((0, 0), 0, "a")
    assert made(one) == [(0, 1, [(0, 0)])] + ([(0, 2, [(1, 0)])] if in_order else [])


def test_whose_contribution_was_dropped_sees_all_updates() -> None:
    one = ledger(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.drop((1, 0), coming=False)
    one.release(1, 1)
    assert list(one.due()) == []
    one.arrive((0, 0), 0, "a")
    assert list(one.due())[1:] == [Give(0, 1, 1)]
    assert one.expects((1, 1), 0)
    assert not one.expects((1, 0), 0), "the dropped one does not come"


def test_what_comes_of_a_dropped_contribution_is_discarded() -> None:
    one = ledger()
    one.arrive((0, 0), 0, "a")
    one.drop((0, 0), coming=True)
    assert one.arrive((0, 0), 1, "b") == 0, "whole, so that the next may come"
    assert list(one.due()) == []
    assert one.expects((0, 1), 0)


def test_an_update_goes_on_without_what_was_lost() -> None:
    one = ledger()
    one.apply(Apply(((0, 0), (1, 0))), ABOUT)
    one.arrive((0, 0), 0, "a0")
    one.arrive((0, 0), 1, "a1")
    one.arrive((1, 0), 0, "b0")
    assert made(one) == [(0, 1, [(0, 0), (1, 0)])]
    assert one.lose(1) == Loss((1, 0), 1)
    assert made(one) == [(1, 1, [(0, 0)])]
    assert not one.expects((1, 0), 1)
    one.admit(1, 5)
    assert one.expects((1, 5), 0)


def test_a_contribution_that_is_whole_outlives_its_worker() -> None:
    one = ledger(blocks=1)
    one.arrive((1, 0), 0, "b")
    assert one.lose(1) is None
    one.apply(Apply(((1, 0),)), ABOUT)
    assert made(one) == [(0, 1, [(1, 0)])]


def test_a_lost_worker_is_given_nothing() -> None:
    one = ledger(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.release(0, 1)
    one.lose(0)
    assert [type(action) for action in one.due()] == [Make]


def test_no_block_goes_beyond_a_mark_before_it_is_kept() -> None:
    one = ledger(blocks=1)
    one.apply(Apply(((0, 0),)), ABOUT)
    one.mark()
    one.apply(Apply(((1, 0),), in_order=False), ABOUT)
    one.arrive((1, 0), 0, "b")
    assert list(one.due()) == []
    one.arrive((0, 0), 0, "a")
    assert [type(action) for action in one.due()] == [Make, Keep, Make]


def test_any_order() -> None:
    """Every block of every contribution is used exactly once, in every interleaving; with losses, at most once."""
    for seed in range(1000):
        play(random.Random(seed))


def play(chance: random.Random) -> None:
    """One random order of events, compared with plain books."""
    blocks, workers = chance.randint(1, 4), list(range(chance.randint(1, 4)))
    one = ledger(blocks, workers)
    losing = chance.random() < 0.4
    clock = dict.fromkeys(workers, 0)
    left: dict[Push, list[int]] = {}
    announced: list[Push] = []
    used: dict[tuple[Push, int], int] = defaultdict(int)
    given: dict[tuple[int, int], set[int]] = defaultdict(set)
    released: list[tuple[int, int]] = []
    versions: dict[int, list[int]] = defaultdict(list)
    gone: set[int] = set()
    in_order = chance.random() < 0.5
    applied: set[Push] = set()
    unkept: set[int] = set()
    mark = 0

    def carry_out() -> None:
        for action in one.due():
            if isinstance(action, Make):
                versions[action.block].append(action.version)
                for push, part in action.parts:
                    assert part == (push, action.block)
                    used[(push, action.block)] += 1
            elif isinstance(action, Keep):
                assert sorted(versions[action.block]) == list(range(1, mark + 1)), "one version of all blocks"
                unkept.remove(action.block)
            else:
                assert action.block not in given[(action.worker, action.step)]
                given[(action.worker, action.step)].add(action.block)

    for _ in range(80):
        deed = chance.random()
        if not unkept and chance.random() < 0.1:
            unkept, mark = set(range(blocks)), one.version
            one.mark()
        computing = [w for w in workers if w not in gone and (not clock[w] or len(given[(w, clock[w])]) == blocks)]
        free = [w for w in computing if (w, clock[w]) not in left]
        if deed < 0.3 and free:
            worker = chance.choice(free)
            left[(worker, clock[worker])] = chance.sample(range(blocks), blocks)
            announced.append((worker, clock[worker]))
        elif deed < 0.75 and any(left.values()):
            push = chance.choice([push for push, rest in left.items() if rest])
            block = left[push].pop()
            assert one.expects(push, block)
            assert one.arrive(push, block, (push, block)) == len(left[push])
            assert not one.expects(push, block)
        elif deed < 0.9 and announced:
            pushes = tuple(chance.sample(announced, chance.randint(1, len(announced))))
            announced = [push for push in announced if push not in pushes]
            one.apply(Apply(pushes, in_order=in_order), ABOUT)
            applied.update(pushes)
        elif losing and len(gone) < len(workers) - 1:
            worker = chance.choice([w for w in workers if w not in gone])
            gone.add(worker)
            loss = one.lose(worker)
            rest = left.pop((worker, clock[worker]), [])
            if loss is not None:
                assert loss.blocks == len(rest) > 0
            if rest:
                announced = [push for push in announced if push != (worker, clock[worker])]
        for push, rest in list(left.items()):
            if not rest and push in applied:
                del left[push]
                clock[push[0]] += 1
                one.release(push[0], push[1] + 1)
                released.append((push[0], push[1] + 1))
        carry_out()
    for push, rest in left.items():
        for block in list(rest):
            one.arrive(push, block, (push, block))
            rest.remove(block)
    if announced:
        one.apply(Apply(tuple(announced), in_order=in_order), ABOUT)
        applied.update(announced)
    carry_out()
    assert not unkept, "every mark is reached"
    assert all(count == 1 for count in used.values())
    assert all(used[(push, block)] == 1 for push in applied if push[0] not in gone for block in range(blocks))
    assert all(given[(worker, step)] == set(range(blocks)) for worker, step in released if worker not in gone)
    if in_order:
        assert all(order == sorted(order) for order in versions.values())
    assert all(sorted(order) == list(range(1, one.version + 1)) for order in versions.values())


@pytest.mark.parametrize("come", [1, 2], ids=["in part", "whole"])
def test_what_overtakes_stepping_out_and_in_again_is_kept(come: int) -> None:
    """Another shard's worker steps out and in, and pushes, before word of that is here."""
    one = ledger()
    for block in range(come):
        one.arrive((0, 0), block, f"part {block}")
    assert one.lose(0, stays=True) is None
    one.admit(0, 0, stayed=True)
    assert one.next(0) == (come == 2)
    one.apply(Apply(((0, 0),)), ABOUT)
    for block in range(come, 2):
        one.arrive((0, 0), block, f"part {block}")
    assert [(a.block, a.parts) for a in one.due() if isinstance(a, Make)] == [
        (block, (((0, 0), f"part {block}"),)) for block in (0, 1)
    ]
