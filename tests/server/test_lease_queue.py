"""A worker's leases, as it comes and goes."""

from __future__ import annotations

from offbeat.batching import EndOfEpoch, Lease
from offbeat.protocol.data_leases import Deal, FromData, LeaseGrants, RegisterLoader, RequestLease
from offbeat.server.client.lease_queue import LeaseQueues

ABOUT = RegisterLoader(loader=0, plan="", world=2, samples=40, seed=3, shuffle=True, drop_last=False, batch=4)


def dealt(*numbers: int, void: tuple[int, ...] = ()) -> LeaseGrants:
    return LeaseGrants(0, tuple(Deal(n, 0, ((0, n, n + 1),)) for n in numbers), void=void)


def test_who_comes_back_draws_only_what_is_still_its_own() -> None:
    """What it had not drawn others may have been given: computing it would be in vain."""
    said: list[FromData] = []
    queues, drawn = LeaseQueues(said.append), list[bool]()
    queue = queues.hold(ABOUT)
    queues.enrol()
    queues.deal(dealt(1, 2, 3))
    queue.deals.popleft()
    queues.enrol()
    assert isinstance(said[-1], RegisterLoader)
    assert said[-1].holds == (1, 2, 3)
    queues.want(queue, lambda: drawn.append(True))
    assert (drawn, list(queue.deals)) == ([], []), "it is not known yet"
    queues.deal(dealt(4, void=(1, 2)))
    assert drawn == [True]
    assert [deal.number for deal in queue.deals if isinstance(deal, Lease)] == [3, 4]
    assert list(queue.held) == [3, 4]
    assert not any(isinstance(message, RequestLease) for message in said), "more than one lease comes unasked"


def test_the_end_of_an_epoch_is_nobodys() -> None:
    queues = LeaseQueues(lambda message: None)
    queue = queues.hold(ABOUT)
    queues.enrol()
    queues.deal(LeaseGrants(0, (Deal(1, 0, ((0, 0, 1),)), Deal(0, 0))))
    queues.enrol()
    queues.deal(dealt(5, void=(1,)))
    assert [type(deal) for deal in queue.deals] == [EndOfEpoch, Lease]
