"""Who computes which samples: the coordinator's books, without I/O."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from offbeat.batching import BatchTuning, EndOfEpoch, Lease, Leases
from offbeat.coordinator.contributions import _hidden_s
from offbeat.coordinator.data_leases import LeaseManager
from offbeat.errors import DisagreementError, PeerError
from offbeat.protocol.data_leases import Deal, LeaseGrants, RegisterLoader, lease_grants, leases_of
from offbeat.sync import Member

SAMPLES = 37


def about(world: int, *, ahead: int = 1, batch: int = 4, samples: int = SAMPLES) -> RegisterLoader:
    return RegisterLoader(
        loader=0, plan="", world=world, samples=samples, seed=3, shuffle=True, drop_last=False, batch=batch, ahead=ahead
    )


class Class:
    """A dealer and its workers, each with the leases it was dealt."""

    def __init__(
        self, world: int, tuning: BatchTuning | None = None, *, ahead: int = 1, samples: int = SAMPLES
    ) -> None:
        self.now_s = 0.0
        self.dealer = LeaseManager(lambda plan: tuning, lambda: self.now_s)
        self.queues: dict[int, list[Lease | EndOfEpoch]] = {worker: [] for worker in range(world)}
        self.clocks = Counter[int]()
        self.ended: dict[int, list[int]] = {worker: [] for worker in range(world)}
        self.about = about(world, ahead=ahead, samples=samples)

    def enrol(self, worker: int) -> None:
        for one, deals in self.dealer.enrol(worker, self.about, together=False, world=self.about.world).items():
            self.queues[one] += deals

    def draw(self, worker: int) -> Lease:
        while True:
            if not self.queues[worker]:
                self.queues[worker] += self.dealer.take(worker, 0)
            deal = self.queues[worker].pop(0)
            if isinstance(deal, Lease):
                return deal
            self.ended[worker].append(deal.epoch)

    def announce(
        self, worker: int, *leases: Lease, computing_s: float = 0.1, hidden_s: float = 0.0
    ) -> tuple[tuple[int, int], bool]:
        push = (worker, self.clocks[worker])
        self.clocks[worker] += 1
        used = [(0, lease.number) for lease in leases]
        return push, self.dealer.announce(0, push, used, computing_s, hidden_s=hidden_s)

    def release(self, worker: int) -> None:
        for deals in self.dealer.refill(worker).values():
            self.queues[worker] += deals


def samples_of(used: list[Lease]) -> dict[int, Counter[int]]:
    """How often each sample of each epoch was used."""
    leases = Leases(SAMPLES, seed=3)
    found: dict[int, Counter[int]] = {}
    for lease in used:
        at = iter(leases.indices(lease).tolist())
        for piece in lease.pieces:
            found.setdefault(piece.epoch, Counter()).update(next(at) for _ in range(piece.size))
    return found


def test_the_first_leases_wait_for_all_and_are_dealt_in_order_of_rank() -> None:
    one = Class(3, ahead=2)
    for worker in (2, 0):
        one.enrol(worker)
        assert one.queues[worker] == []
        assert one.dealer.take(worker, 0) == [], "whoever asks earlier gets no more"
    one.enrol(1)
    numbers = {
        worker: [deal.number for deal in queue if isinstance(deal, Lease)] for worker, queue in one.queues.items()
    }
    assert numbers == {0: [0, 1], 1: [2, 3], 2: [4, 5]}


def test_who_enrols_once_more_counts_once() -> None:
    """It does for all its loaders, whenever it prepares another one."""
    one = Class(2)
    one.enrol(0)
    one.enrol(0)
    assert one.queues[0] == []
    one.enrol(1)
    one.about = msgspec.structs.replace(one.about, holds=tuple(d.number for d in one.queues[1] if isinstance(d, Lease)))
    one.enrol(1)
    assert [len(one.queues[worker]) for worker in range(2)] == [1, 1]


def test_who_comes_back_is_told_what_is_others() -> None:
    one = Class(2, ahead=2)
    for worker in (0, 1):
        one.enrol(worker)
    held = tuple(deal.number for deal in one.queues[1] if isinstance(deal, Lease))
    one.about = msgspec.structs.replace(one.about, holds=held)
    assert one.dealer.void(1, one.about) == ()
    one.dealer.lose(1)
    one.enrol(1)
    assert one.dealer.void(1, one.about) == held
    assert len(one.queues[1]) == 4, "as many more"


def test_one_that_never_comes_is_not_waited_for() -> None:
    one = Class(3)
    one.enrol(0)
    one.enrol(2)
    deals = one.dealer.lose(1)
    assert sorted(deals[0]) == [0, 2]
    assert one.dealer.lose(1) == {}, "once"


@pytest.mark.slow
def test_who_brings_nothing_is_not_dealt_to_without_end() -> None:
    one = Class(2, samples=100_000)
    for worker in range(2):
        one.enrol(worker)
    for _ in range(8191):
        one.dealer.take(0, 0)
    with pytest.raises(PeerError, match=r"rank 0: it holds 8192 batches of loader 0 and has pushed none"):
        one.dealer.take(0, 0)
    assert one.dealer.take(1, 0), "others are"
    assert one.dealer.announce(0, (0, 0), [(0, 2)] * 4000), "one of its own"
    (deal,) = one.dealer.refill(0)[0]
    assert isinstance(deal, Lease), "and no more than it may hold"


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_counts_once_whoever_comes_and_goes(seed: int) -> None:
    """Contributions are announced, applied and arrive in any order; workers die, also between those, and return."""
    chance = random.Random(seed)
    one = Class(3, ahead=chance.randint(1, 3))
    for worker in range(3):
        one.enrol(worker)
    there = {0, 1, 2}
    under_way: dict[tuple[int, int], tuple[list[Lease], set[str]]] = {}
    used: list[Lease] = []
    for _ in range(400):
        worker = chance.randrange(3)
        kind = chance.random()
        mine = [push for push in under_way if push[0] == worker]
        if worker not in there:
            if kind < 0.3:
                one.queues[worker].clear()
                one.enrol(worker)
                there.add(worker)
        elif kind < 0.02 and len(there) > 1:
            one.dealer.lose(worker)
            there.discard(worker)
            for push in mine:  # what has arrived whole may still be applied
                if "whole" not in under_way[push][1]:
                    del under_way[push]
        elif mine:
            leases, happened = under_way[mine[0]]
            if "applied" not in happened and (kind < 0.5 or "whole" in happened):
                one.dealer.applied(0, mine[0])
                happened.add("applied")
            else:
                one.dealer.whole(0, mine[0])
                happened.add("whole")
            if len(happened) == 2:
                used += leases
                del under_way[mine[0]]
                one.release(worker)
        else:
            leases = [one.draw(worker) for _ in range(chance.choice([1, 1, 1, 2]))]
            push, valid = one.announce(worker, *leases)
            assert valid
            under_way[push] = (leases, set())
        for push in [p for p in under_way if p[0] not in there]:
            one.dealer.applied(0, push)
            used += under_way.pop(push)[0]
    pool = one.dealer.epochs()[0]
    assert pool.complete >= 3, "enough happened"
    found = samples_of(used)
    for epoch, counts in found.items():
        assert max(counts.values()) == 1, f"a sample counted twice in epoch {epoch}"
        if epoch not in pool.open:
            assert len(counts) == SAMPLES, f"a sample was lost in epoch {epoch}"
    for told in one.ended.values():
        assert told == sorted(set(told)), "the end of an epoch is told once"


def test_what_was_computed_from_a_lease_that_is_not_ones_own_does_not_count() -> None:
    one = Class(2)
    for worker in range(2):
        one.enrol(worker)
    mine, theirs = one.draw(0), one.draw(1)
    assert one.announce(0, mine, theirs)[1] is False
    one.dealer.give_back(1, 0, [theirs.number])
    again = [one.draw(1) for _ in range(2)]
    pieces = {piece for lease in again for piece in lease.pieces}
    assert {*mine.pieces, *theirs.pieces} & pieces, "both are dealt again"


def test_a_lost_worker_that_comes_back_is_dealt_to_afresh() -> None:
    one = Class(2)
    for worker in range(2):
        one.enrol(worker)
    one.announce(1, one.draw(1))
    one.dealer.lose(1)
    one.enrol(1)
    assert one.dealer.refill(1) == {}, "it has brought nothing since"


@pytest.mark.parametrize("arrived", [False, True])
def test_what_a_lost_worker_may_have_brought_waits_until_that_is_clear(arrived: bool) -> None:
    one = Class(2)
    for worker in range(2):
        one.enrol(worker)
    lease = one.draw(1)
    push, _ = one.announce(1, lease)
    one.dealer.applied(0, push)
    one.dealer.lose(1, {(0, push)})
    assert {*one.draw(0).pieces, *one.draw(0).pieces}.isdisjoint(lease.pieces), "it may be in the parameters"
    if arrived:
        one.dealer.whole(0, push)
    else:
        one.dealer.withdrawn(0, push)
    assert (one.draw(0).pieces == lease.pieces) is not arrived
    assert one.dealer.epochs()[0].open[0].used == (lease.count if arrived else 0)


def test_dropped_samples_are_counted() -> None:
    one = Class(1)
    one.enrol(0)
    lease = one.draw(0)
    push, _ = one.announce(0, lease)
    one.dealer.dropped(0, push)
    one.dealer.whole(0, push)  # it arrives all the same, and is not wanted
    assert one.dealer.epochs()[0].open[0].dropped == lease.count


def test_other_data_is_refused_by_name() -> None:
    one = Class(2)
    one.enrol(0)
    with pytest.raises(DisagreementError, match="samples=36, that of the others 37"):
        one.dealer.enrol(1, about(2, samples=36), together=False, world=2)
    with pytest.raises(PeerError, match="Rank 1 has not enrolled for loader 0"):
        one.dealer.take(1, 0)
    with pytest.raises(PeerError, match="Rank 0 has not enrolled for loader 1"):
        one.dealer.announce(0, (0, 0), [(1, 0)])


def test_batches_follow_the_machines() -> None:
    """Worker 1 needs twice as long per sample; the sum stays what it was."""
    one = Class(2, BatchTuning())
    for worker in range(2):
        one.enrol(worker)
    sizes: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(60):
        for worker in range(2):
            lease = one.draw(worker)
            sizes[worker].append(lease.count)
            push, _ = one.announce(worker, lease, computing_s=0.01 + 0.01 * (worker + 1) * lease.count)
            one.dealer.applied(0, push)
            one.dealer.whole(0, push)
            one.release(worker)
            one.dealer.stepped(worker, 0.001, 0.0)
    usual = [Counter(sizes[worker][20:]).most_common(1)[0][0] for worker in range(2)]
    assert usual == [5, 3]
    assert "paces the rounds" in one.dealer.explain()


@pytest.mark.parametrize("hidden_s", [0.0, 0.1, 0.4])
def test_what_a_worker_computes_while_parameters_come_is_no_transfer(hidden_s: float) -> None:
    """A cycle is as long as it is; what of it depends on the batch is what was computed."""
    one = Class(1, BatchTuning())
    one.enrol(0)
    for _ in range(20):
        lease = one.draw(0)
        push, _ = one.announce(0, lease, computing_s=0.5, hidden_s=hidden_s)
        one.dealer.applied(0, push)
        one.dealer.whole(0, push)
        one.release(0)
        one.dealer.stepped(0, 0.3, 0.0)
    tuning = one.dealer._loaders[0].tuning
    assert tuning is not None
    assert tuning.machines[0].compute.seconds == pytest.approx(0.5)
    assert tuning.machines[0].transfer.seconds == pytest.approx(max(1e-9, 0.3 - hidden_s))


@pytest.mark.parametrize(
    ("told_s", "hidden_s"), [(None, 0.0), (0.5, 0.0), (1.75, 0.75), (3.0, 2.0), (1e8, 2.0)], ids=str
)
def test_a_worker_says_how_long_it_computed_within_what_can_be(told_s: float | None, hidden_s: float) -> None:
    """It had its parameters 1 s ago, and was ready 3 s ago for the last time."""
    assert _hidden_s(Member(since_s=9.0, last_ready_s=7.0), told_s, 10.0) == hidden_s
    assert _hidden_s(Member(since_s=9.0), told_s, 10.0) == 0.0, "its first contribution"


def test_who_is_too_slow_for_every_round_is_named() -> None:
    """It needs as long for its smallest batch as the others for five of theirs."""
    one = Class(3, BatchTuning())
    for worker in range(3):
        one.enrol(worker)
    for _ in range(80):
        for worker in range(3):
            lease = one.draw(worker)
            push, _ = one.announce(worker, lease, computing_s=(0.5 if worker == 2 else 0.01) + 0.02 * lease.count)
            one.dealer.applied(0, push)
            one.dealer.whole(0, push)
            one.release(worker)
            one.dealer.stepped(worker, 0.001, 0.0)
    every = one.dealer.every()
    assert (every[0], every[1]) == (1, 1)
    assert every[2] > 1


def test_who_has_no_memory_gets_smaller_batches() -> None:
    one = Class(2, BatchTuning())
    for worker in range(2):
        one.enrol(worker)
    lease = one.draw(0)
    one.dealer.out_of_memory(0, 0, lease.count)
    one.dealer.give_back(0, 0, [lease.number])
    assert one.draw(0).count <= max(1, lease.count // 2)


def test_deals_travel() -> None:
    one = Class(1)
    one.enrol(0)
    for deal in (one.draw(0), EndOfEpoch(4)):
        assert leases_of(lease_grants(0, deal), SAMPLES) == [deal]


@pytest.mark.parametrize("piece", [(0, 5, 5), (0, 6, 5), (0, 0, SAMPLES + 1)])
def test_impossible_deals_are_refused(piece: tuple[int, int, int]) -> None:
    with pytest.raises(PeerError, match="not among the 37"):
        leases_of(LeaseGrants(0, (Deal(1, 0, (piece,)),)), SAMPLES)


# -- who comes back ----------------------------------------------------------------------------------------------------


def test_a_worker_that_comes_back_is_told_the_end_of_every_epoch() -> None:
    one = Class(2)
    for worker in range(2):
        one.enrol(worker)
    one.dealer.lose(1)
    while not one.ended[0]:
        one.draw(0)
    one.queues[1].clear()
    one.about = msgspec.structs.replace(one.about, epoch=0, holds=(99,))
    one.enrol(1)
    one.draw(1)
    assert one.ended[1] == [0]


def test_a_restarted_server_goes_on_in_the_data() -> None:
    """What was applied is used up, what was not is its worker's; numbers of the lost life mean nothing."""
    one = Class(2, BatchTuning(), ahead=2)
    for worker in range(2):
        one.enrol(worker)
    applied, announced = one.draw(0), one.draw(1)
    push, _ = one.announce(0, applied)
    one.dealer.applied(0, push)
    again, _ = one.announce(1, announced)
    plain = msgspec.json.decode(msgspec.json.encode(one.dealer.to_plain()))
    one.release(0)
    later = next(deal for deal in reversed(one.queues[0]) if isinstance(deal, Lease))

    one.dealer = LeaseManager(lambda plan: BatchTuning(), lambda: one.now_s)
    one.dealer.restore(plain)
    assert one.dealer.workers == {0, 1}
    pool = one.dealer.epochs()[0]
    assert pool.open[0].used == applied.count
    kept = {worker: tuple(d.number for d in queue if isinstance(d, Lease)) for worker, queue in one.queues.items()}
    for worker, holds in ((0, kept[0]), (1, (announced.number, *kept[1]))):
        hello = msgspec.structs.replace(one.about, holds=holds)
        deals = one.dealer.enrol(worker, hello, together=False, world=2)
        fresh = [deal.number for deal in deals[worker] if isinstance(deal, Lease)]
        assert all(number > later.number for number in fresh)
    assert one.dealer.announce(0, again, [(0, announced.number)]), "it may be brought again"
    assert not one.dealer.announce(0, (0, 1), [(0, later.number)]), "it was dealt out after the snapshot"


@pytest.mark.parametrize("plain", [{"0": {}}, {"x": 1}, [1], {"0": {"about": 3}}])
def test_a_damaged_place_in_the_data_is_refused(plain: object) -> None:
    with pytest.raises(PeerError, match="Cannot resume the data"):
        LeaseManager(lambda plan: None, lambda: 0.0).restore(plain)


def test_a_contribution_is_of_no_more_samples_than_its_leases() -> None:
    one = Class(2, ahead=2)
    assert one.dealer.most_samples(0, ()) is None, "no data is leased"
    for worker in (0, 1):
        one.enrol(worker)
    assert one.dealer.most_samples(0, ()) == 8, "it names none: no more than it holds"
    lease, other = one.draw(0), one.draw(1)
    assert one.dealer.most_samples(0, ((0, lease.number), (0, lease.number))) == 4
    one.announce(0, lease)
    assert one.dealer.most_samples(0, ()) == 4, "a second model, computed from the same"
    assert one.dealer.most_samples(1, ((0, lease.number), (0, other.number))) == 4, "another's is none of its own"
    assert one.dealer.most_samples(1, ((7, other.number),)) == 8, "there is no such loader, which is refused elsewhere"
