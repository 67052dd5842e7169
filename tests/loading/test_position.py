"""The place in leased data goes from a server's coordinator to the workers and back: no sample twice, none left out."""

from __future__ import annotations

import msgspec
import pytest

from offbeat.batching import EndOfEpoch, Lease, Leases, PositionRange
from offbeat.coordinator.data_leases import LeaseManager
from offbeat.loading import position
from offbeat.protocol.data_leases import RegisterLoader
from offbeat.server.client.lease_queue import LeaseQueue

SAMPLES = 23
LEASES = Leases(SAMPLES, seed=3)


def about(world: int = 2) -> RegisterLoader:
    return RegisterLoader(
        loader=0, plan="", world=world, samples=SAMPLES, seed=3, shuffle=True, drop_last=False, batch=4
    )


def dealer() -> LeaseManager:
    return LeaseManager(lambda plan: None, lambda: 0.0)


def drain(one: LeaseManager, leases: dict[int, list[Lease | EndOfEpoch]], worker: int) -> list[int]:
    """The rest of the epoch, all to one worker."""
    drawn: list[int] = []
    deals = list(leases[worker])
    clock = 0
    while not isinstance(deals[0], EndOfEpoch):
        lease = deals.pop(0)
        assert isinstance(lease, Lease)
        drawn += LEASES.indices(lease).tolist()
        one.announce(0, (worker, clock), [(0, lease.number)])
        one.applied(0, (worker, clock))
        one.whole(0, (worker, clock))
        clock += 1
        deals = deals or one.take(worker, 0)
    return drawn


@pytest.mark.parametrize("dealt", [0, 2, 5, 6])
def test_there_and_back_each_sample_is_there_once(dealt: int) -> None:
    """The workers have taken some batches by themselves; a server deals out the rest."""
    pool = LEASES.join(LEASES.join(LEASES.init(), 0), 1)
    drawn: list[int] = []
    for number in range(dealt):
        pool, lease = LEASES.take(pool, number % 2, 4, now_s=0.0)
        assert isinstance(lease, Lease)
        drawn += LEASES.indices(lease).tolist()
        pool, _ = LEASES.acknowledge(pool, [lease.number])
    books = position.for_coordinator({0: (about(), LEASES, {"leases": LEASES.to_plain(pool)})})
    there = dealer()
    for worker in (0, 1):
        there.enrol(worker, about(), together=False, world=2)
    leases = there.load(msgspec.json.decode(books))[0]
    there.give_back(1, 0, [lease.number for lease in leases[1] if isinstance(lease, Lease)])
    rest = drain(there, leases, 0)
    assert sorted(drawn + rest) == list(range(SAMPLES))


def test_what_workers_hold_when_they_leave_the_server_counts_as_used() -> None:
    there = dealer()
    for worker in (0, 1):
        leases = there.enrol(worker, about(), together=False, world=2)
    held, undrawn = leases[0][0], leases[1][0]
    assert isinstance(held, Lease)
    assert isinstance(undrawn, Lease)
    there.give_back(1, 0, [undrawn.number])
    state = position.for_workers(msgspec.json.encode(there.to_plain()).decode(), 0, LEASES)
    pool = LEASES.from_plain(state["leases"])
    left: list[int] = []
    while True:
        pool, lease = LEASES.take(pool, 1, 4, now_s=0.0)
        if isinstance(lease, EndOfEpoch):
            break
        assert isinstance(lease, Lease)
        left += LEASES.indices(lease).tolist()
    assert sorted(left + LEASES.indices(held).tolist()) == list(range(SAMPLES))


def test_an_epoch_that_all_are_about_to_begin_is_begun() -> None:
    pool = LEASES.join(LEASES.join(LEASES.init(), 0), 1)
    while not (pool.at[0] == pool.at[1] == 1):
        worker = 0 if pool.at[0] == 0 else 1
        pool, lease = LEASES.take(pool, worker, 4, now_s=0.0)
        if isinstance(lease, Lease):
            pool, _ = LEASES.acknowledge(pool, [lease.number])
    assert pool.epoch == 0
    books = position.for_coordinator({0: (about(), LEASES, {"leases": LEASES.to_plain(pool)})})
    there = dealer()
    for worker in (0, 1):
        there.enrol(worker, about(), together=False, world=2)
    first = there.load(msgspec.json.decode(books))[0][0][0]
    assert isinstance(first, Lease), "a loop that begins has batches"
    assert first.epoch == 1


def test_who_was_dealt_the_end_of_an_epoch_beforehand_begins_it_with_the_others() -> None:
    there = dealer()
    for worker in (0, 1):
        leases = there.enrol(worker, about(), together=False, world=2)
    ahead = leases[0]
    while not any(isinstance(deal, EndOfEpoch) for deal in ahead):
        ahead += there.take(0, 0)
    for worker, deals in ((0, ahead), (1, leases[1])):
        there.give_back(worker, 0, [deal.number for deal in deals if isinstance(deal, Lease)])
    state = position.for_workers(msgspec.json.encode(there.to_plain()).decode(), 0, LEASES)
    pool = LEASES.from_plain(state["leases"])
    assert pool.reached(SAMPLES) == 0.0, "what came back is not computed"
    given = dict.fromkeys((0, 1), 0)
    for _ in range(3):  # loops, as workers without a server go through them: in each round all draw
        over: set[int] = set()
        while len(over) < 2:
            for worker in {0, 1} - over:
                pool, deal = LEASES.take(pool, worker, 4, now_s=0.0)
                if isinstance(deal, Lease):
                    pool, _ = LEASES.acknowledge(pool, [deal.number])
                    given[worker] += 1
                else:
                    over.add(worker)
    assert given == {0: 9, 1: 9}
    assert pool.complete == 3
    assert pool.reached(SAMPLES) == 3.0


def test_the_epoch_in_which_workers_draw_next_may_be_one_that_was_dealt_to_its_end() -> None:
    hand = LeaseQueue(about())
    hand.deals.extend([Lease(1, 3, (PositionRange(3, 0, 4),)), EndOfEpoch(3), Lease(2, 4, (PositionRange(4, 0, 4),))])
    hand.epoch = 4
    assert hand.take_undrawn() == [1, 2]
    assert hand.begins == 3
    hand.deals.clear()
    assert hand.begins == 4
