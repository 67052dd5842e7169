"""Every sample of every epoch exactly once, in any history; nobody waits for ever; what is saved goes on as it was."""

from __future__ import annotations

import json
import pickle
import random
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from offbeat.batching import EndOfEpoch, Lease, LeasePool, Leases, NoDataYet, PositionRange, SampleCounts
from offbeat.batching.lease_state import HeldLease, audit, total
from offbeat.errors import ModelError
from tests.batching.random_histories import History

if TYPE_CHECKING:
    from collections.abc import Callable

HISTORIES = 1200


def took(pool: LeasePool, leases: Leases, worker: int, count: int, now_s: float = 0.0) -> tuple[LeasePool, Lease]:
    pool, answer = leases.take(pool, worker, count, now_s)
    assert isinstance(answer, Lease), answer
    return pool, answer


def begun(leases: Leases, workers: int) -> LeasePool:
    pool = leases.init()
    for worker in range(workers):
        pool = leases.join(pool, worker)
    return pool


@pytest.mark.slow
def test_every_sample_of_every_epoch_is_used_once_in_any_history() -> None:
    happened: Counter[str] = Counter()
    for seed in range(HISTORIES):
        history = History(seed)
        try:
            history.play(events=60)
            pool, samples, epochs = history.pool, history.leases.samples, history.epochs
            assert set(history.used.values()) <= {1}
            assert pool.settled.used + pool.settled.dropped == len(history.used)
            assert (pool.complete, pool.open, pool.held, pool.left_over) == (epochs, {}, {}, 0)
            assert pool.settled.settled == epochs * samples
            if not history.leases.drop_last:
                assert len(history.used) == epochs * samples
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
        happened += history.happened
    assert min(happened[what] for what in (
        "Lease", "EndOfEpoch", "NoDataYet", "second hand", "valid", "void", "lost with leases", "come", "back"
    )) > 100, happened  # fmt: skip


def test_an_interrupted_history_equals_the_uninterrupted_one() -> None:
    for seed in range(HISTORIES // 12):
        through, interrupted = History(seed), History(seed, interrupted=True)
        through.play(events=40)
        interrupted.play(events=40)
        assert through.log == interrupted.log
        assert through.pool == interrupted.pool


def test_indices_of_an_epoch_are_all_samples_in_any_cut() -> None:
    leases = Leases(1000, seed=4)
    for cut in ([1000], [999, 1], [37] * 27 + [1], [1] * 1000):
        pool, drawn = begun(leases, 1), []
        for count in cut:
            pool, lease = took(pool, leases, 0, count)
            drawn += leases.indices(lease).tolist()
        assert sorted(drawn) == list(range(1000))
        assert drawn == Leases(1000, seed=4).indices(Lease(0, 0, (PositionRange(0, 0, 1000),))).tolist(), (
            "whatever the cut"
        )


def test_epochs_and_seeds_give_other_orders_and_a_lease_keeps_those_of_its_pieces() -> None:
    def whole(seed: int, *pieces: PositionRange) -> list[int]:
        made: list[int] = Leases(50, seed=seed).indices(Lease(0, 9, pieces)).tolist()
        return made

    first, second, other = (
        whole(0, PositionRange(0, 0, 50)),
        whole(0, PositionRange(1, 0, 50)),
        whole(1, PositionRange(0, 0, 50)),
    )
    assert first != second
    assert first != other
    assert whole(0, PositionRange(0, 10, 12), PositionRange(1, 3, 5)) == first[10:12] + second[3:5]
    assert Leases(50, shuffle=False).indices(Lease(0, 0, (PositionRange(0, 7, 9),))).tolist() == [7, 8]


def test_a_lease_may_be_of_a_dataset_that_fits_in_no_memory() -> None:
    leases = Leases(10**12, seed=1)
    _, lease = took(begun(leases, 1), leases, 0, 64)
    assert leases.indices(lease).max() > 2**33
    assert len(np.unique(leases.indices(lease))) == 64


def test_a_lost_workers_samples_go_to_the_next_that_asks_and_fill_its_lease() -> None:
    leases = Leases(100)
    pool = begun(leases, 2)
    pool, lost = took(pool, leases, 0, 10)
    pool, kept = took(pool, leases, 1, 10)
    pool = leases.lose(pool, 0)
    assert pool.left_over == 10
    pool, lease = took(pool, leases, 1, 16)
    assert lease.pieces == (*lost.pieces, PositionRange(0, 20, 26))
    assert pool.left_over == 0
    assert pool.came_back == 10
    assert kept.count == 10


def test_when_the_last_holder_dies_its_samples_are_used_in_the_next_epoch_and_counted_to_the_old() -> None:
    leases = Leases(20)
    pool = begun(leases, 2)
    pool, _ = took(pool, leases, 1, 12)
    pool, rest = took(pool, leases, 0, 8)
    pool, _ = leases.acknowledge(pool, [rest.number])
    pool, answer = leases.take(pool, 0, 8, 1.0)
    assert answer == EndOfEpoch(0), "nobody waits for worker 1"
    pool, _ = took(pool, leases, 0, 8)
    pool = leases.lose(pool, 1)
    assert pool.open == {0: SampleCounts(used=8), 1: SampleCounts()}
    pool, again = took(pool, leases, 0, 16)
    assert (again.epoch, again.pieces) == (1, (PositionRange(0, 0, 12), PositionRange(1, 8, 12)))
    pool, right = leases.acknowledge(pool, [again.number])
    assert right
    assert (pool.complete, pool.settled, pool.open) == (1, SampleCounts(used=20), {1: SampleCounts(used=4)})


def test_a_worker_that_slept_is_told_the_end_of_every_epoch() -> None:
    leases = Leases(4, epochs=3)
    pool = begun(leases, 2)
    for epoch in range(2):
        pool, lease = took(pool, leases, 0, 4)
        pool, _ = leases.acknowledge(pool, [lease.number])
        pool, answer = leases.take(pool, 0, 4, 0.0)
        assert answer == EndOfEpoch(epoch)
    pool, lease = took(pool, leases, 0, 2)
    said = []
    for _ in range(3):
        pool, answer = leases.take(pool, 1, 4, 0.0)
        said.append(answer)
    assert said == [EndOfEpoch(0), EndOfEpoch(1), Lease(3, 2, (PositionRange(2, 2, 4),))]


def test_in_the_last_epoch_one_waits_for_what_may_return_and_no_longer_than_the_term() -> None:
    leases = Leases(8, epochs=1, term=timedelta(seconds=30))
    pool = begun(leases, 3)
    pool, mine = took(pool, leases, 0, 4, now_s=5.0)
    pool, hung = took(pool, leases, 1, 4, now_s=7.0)
    assert leases.take(pool, 2, 4, 8.0)[1] == NoDataYet((0, 1), 35.0)
    assert leases.take(pool, 0, 4, 8.0)[1] == NoDataYet((1,), 37.0), "not for itself"
    delivered, _ = leases.deliver(pool, 0, [mine.number])
    assert leases.take(delivered, 2, 4, 8.0)[1] == NoDataYet((1,), 37.0), "what has arrived does not return"
    done, _ = leases.deliver(delivered, 1, [hung.number])
    assert leases.take(done, 2, 4, 8.0)[1] == EndOfEpoch(0)
    pool, again = took(delivered, leases, 2, 4, now_s=37.0)
    assert again.pieces == hung.pieces
    pool, valid = leases.deliver(pool, 1, [hung.number])
    assert not valid, "another has it now"
    assert leases.take(pool, 0, 4, 38.0)[1] == NoDataYet((2,), 67.0)
    pool, _ = leases.deliver(pool, 2, [again.number])
    pool, answer = leases.take(pool, 0, 4, 38.0)
    assert answer == EndOfEpoch(0)
    assert leases.take(pool, 0, 4, 38.0)[1] == EndOfEpoch(0), "and stays so"


def test_a_late_contribution_counts_as_long_as_nobody_else_was_given_its_samples() -> None:
    leases = Leases(100, term=timedelta(seconds=30))
    pool = begun(leases, 2)
    pool, slow = took(pool, leases, 0, 10, now_s=0.0)
    pool, other = took(pool, leases, 1, 10, now_s=1000.0)
    assert other.pieces == (PositionRange(0, 10, 20),), "there is enough without it"
    pool, valid = leases.deliver(pool, 0, [slow.number])
    assert valid
    assert leases.lose(pool, 0).left_over == 0, "what has arrived is not lost with its worker"
    pool, right = leases.acknowledge(leases.lose(pool, 0), [slow.number], dropped=True)
    assert right
    assert pool.open == {0: SampleCounts(dropped=10)}


def test_a_contribution_is_used_whole_or_not_at_all() -> None:
    leases = Leases(8, term=timedelta(seconds=30))
    pool = begun(leases, 2)
    pool, early = took(pool, leases, 0, 4, now_s=0.0)
    pool, later = took(pool, leases, 0, 4, now_s=20.0)
    pool, again = took(pool, leases, 1, 4, now_s=40.0)
    assert again.pieces == early.pieces
    pool, valid = leases.deliver(pool, 0, [early.number, later.number])
    assert not valid
    assert pool.returned == later.pieces


def test_nobody_delivers_what_is_anothers() -> None:
    leases = Leases(8)
    pool = begun(leases, 2)
    pool, theirs = took(pool, leases, 0, 4)
    for numbers in ([theirs.number], [99], [-1]):
        after, valid = leases.deliver(pool, 1, numbers)
        assert (after, valid) == (pool, False)
    assert leases.give_back(pool, 1, [theirs.number, 99]) == pool
    assert leases.deliver(pool, 1, []) == (pool, True), "a contribution from no samples"


def test_what_did_not_arrive_after_all_is_dealt_again_when_its_worker_is_lost() -> None:
    leases = Leases(8)
    pool = begun(leases, 2)
    pool, mine = took(pool, leases, 0, 4)
    pool, _ = leases.deliver(pool, 0, [mine.number])
    assert leases.retract(pool, 1, [mine.number]) == pool, "only its own"
    assert leases.lose(pool, 0).left_over == 0
    assert leases.lose(leases.retract(pool, 0, [mine.number, 99]), 0).left_over == 4


def test_with_drop_last_all_leases_are_full_and_the_rest_is_counted() -> None:
    leases = Leases(10, drop_last=True, epochs=2)
    pool = begun(leases, 2)
    pool, lost = took(pool, leases, 0, 4)
    pool, _ = took(pool, leases, 1, 4)
    pool, answer = leases.take(pool, 1, 4, 0.0)
    assert answer == EndOfEpoch(0)
    assert pool.open[0] == SampleCounts(skipped=2)
    pool = leases.lose(pool, 0)
    pool, again = took(pool, leases, 1, 6)
    assert again.pieces == (*lost.pieces, PositionRange(1, 0, 2)), "what was lost is not what is skipped"
    pool = leases.init()
    for worker in range(2):
        pool = leases.join(pool, worker)
    pool, lost = took(pool, leases, 0, 7)
    pool, _ = took(pool, leases, 1, 3)
    pool, answer = leases.take(leases.lose(pool, 0), 1, 8, 0.0)
    assert answer == EndOfEpoch(0)
    pool, again = took(pool, leases, 1, 8)
    assert again.pieces == (*lost.pieces, PositionRange(1, 0, 1)), "nor is it skipped where an epoch ends"
    pool, answer = leases.take(pool, 1, 10, 0.0)
    assert answer == EndOfEpoch(1)
    assert pool.open[1] == SampleCounts(skipped=9), "behind the last epoch nothing comes"
    with pytest.raises(ModelError, match=r"Cannot fill batches of 11 from 10 samples with drop_last"):
        leases.take(pool, 1, 11, 0.0)


def test_a_loop_that_ends_early_can_close_its_epoch() -> None:
    leases = Leases(10)
    pool, lease = took(begun(leases, 2), leases, 0, 4)
    pool = leases.close(pool, 0)
    assert leases.close(pool, 0) == pool
    assert leases.close(pool, 1) == pool, "not begun"
    assert [leases.take(pool, worker, 4, 0.0)[1] for worker in (0, 1)] == [EndOfEpoch(0), EndOfEpoch(0)]
    pool, _ = leases.acknowledge(pool, [lease.number])
    assert (pool.complete, pool.settled) == (1, SampleCounts(used=4, skipped=6))


def test_a_clock_that_jumps_back_makes_no_lease_older() -> None:
    leases = Leases(4, epochs=1, term=timedelta(seconds=10))
    pool = begun(leases, 2)
    pool, _ = took(pool, leases, 0, 2, now_s=100.0)
    pool, _ = took(pool, leases, 0, 2, now_s=-1e9)
    assert leases.take(pool, 1, 4, 105.0)[1] == NoDataYet((0,), 110.0)


def test_nobody_is_given_its_own_lease_again_nor_one_of_an_epoch_it_has_not_reached() -> None:
    leases = Leases(4, term=timedelta(seconds=10))
    pool = begun(leases, 2)
    pool, own = took(pool, leases, 0, 4, now_s=0.0)
    pool, answer = leases.take(pool, 0, 4, 100.0)
    assert answer == EndOfEpoch(0)
    pool, _ = took(pool, leases, 0, 4, now_s=100.0)
    pool, valid = leases.deliver(pool, 0, [own.number])
    assert valid
    assert leases.take(pool, 1, 4, 200.0)[1] == EndOfEpoch(0), "what is overdue is of epoch 1"
    assert leases.take(pool, 1, 4, 200.0)[0].returned == ()


def test_what_comes_back_in_pieces_is_made_whole() -> None:
    leases = Leases(100)
    pool, numbers = begun(leases, 2), []
    for _ in range(10):
        pool, lease = took(pool, leases, 0, 7)
        numbers.append(lease.number)
    pool = leases.give_back(pool, 0, numbers[::2])
    assert len(pool.returned) == 5
    assert leases.lose(pool, 0).returned == (PositionRange(0, 0, 70),)


def test_after_a_restart_leases_are_as_old_as_they_were() -> None:
    leases = Leases(8, epochs=1, term=timedelta(seconds=30))
    pool = begun(leases, 2)
    pool, _ = took(pool, leases, 0, 4, now_s=1000.0)
    pool, _ = took(pool, leases, 0, 4, now_s=1010.0)
    loaded = leases.from_plain(leases.to_plain(pool), now_s=3.0)
    assert leases.take(loaded, 1, 4, 3.0)[1] == NoDataYet((0,), 23.0)


@pytest.mark.parametrize("samples", range(1, 12))
@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_lease_is_smaller_than_the_least(samples: int, count: int) -> None:
    """Whatever comes back meanwhile; and each sample is used once all the same."""
    leases, chance = Leases(samples), random.Random(samples)
    pool, used = begun(leases, 2), Counter[tuple[int, int]]()
    while pool.complete < 5:
        worker = chance.randrange(2)
        pool, answer = leases.take(pool, worker, count, 0.0, least=2)
        if not isinstance(answer, Lease):
            continue
        assert min(2, samples) <= answer.count <= count + 1
        if chance.random() < 0.3:
            pool = leases.give_back(pool, worker, [answer.number])
            continue
        pool, _ = leases.acknowledge(pool, [answer.number])
        used.update((piece.epoch, at) for piece in answer.pieces for at in range(piece.start, piece.stop))
        assert audit(pool, samples=samples) is None
    assert set(used.values()) == {1}
    assert pool.settled.used == 5 * samples


def test_one_sample_that_comes_back_late_is_used_in_the_next_epoch() -> None:
    leases = Leases(3)
    pool = begun(leases, 2)
    pool, single = took(pool, leases, 0, 1)
    pool, rest = took(pool, leases, 1, 2)
    pool = leases.lose(leases.acknowledge(pool, [rest.number])[0], 0)
    pool, answer = leases.take(pool, 1, 2, 0.0, least=2)
    assert answer == EndOfEpoch(0)
    pool, answer = leases.take(pool, 1, 2, 0.0, least=2)
    assert isinstance(answer, Lease)
    assert answer.pieces == (*single.pieces, PositionRange(1, 0, 1))


def holding(count: int) -> LeasePool:
    """Worker 0 has every other sample of an epoch, each in a lease of its own."""
    held = {n: HeldLease(Lease(n, 0, (PositionRange(0, 2 * n, 2 * n + 1),)), 0, 0.0) for n in range(count)}
    return LeasePool(fresh=2 * count, number=count, held=held, at={0: 0, 1: 0})


def computing_s(do: Callable[[], object]) -> float:
    began_s = time.process_time()
    do()
    return time.process_time() - began_s


@pytest.mark.slow
def test_four_times_as_many_leases_come_back_in_about_four_times_the_time() -> None:
    """And not in sixteen times: the coordinator does nothing else meanwhile."""

    def come_back(count: int) -> Callable[[], object]:
        leases, pool = Leases(2 * count), holding(count)
        return lambda: (leases.lose(pool, 0), leases.give_back(pool, 0, range(count)))

    few_s, many_s = (min(computing_s(do) for _ in range(3)) for do in map(come_back, (25_000, 100_000)))
    assert many_s < 10 * few_s


def test_who_asks_does_not_wait_for_all_that_has_come_back() -> None:
    leases = Leases(200_000)
    pool = leases.lose(holding(100_000), 0)
    assert len(pool.returned) == 100_000

    def take() -> None:
        _, lease = took(pool, leases, 1, 3)
        assert lease.count == 3

    take_s, look_s = (min(computing_s(do) for _ in range(10)) for do in (take, lambda: total(pool.returned)))
    assert take_s < look_s / 3, "all of it was looked at"


def test_a_lease_of_what_came_back_is_never_in_too_many_pieces() -> None:
    leases = Leases(4000)
    pool = leases.lose(holding(2000), 0)
    pool, lease = took(pool, leases, 1, 1500)
    assert len(lease.pieces) == 1000
    pool, lease = took(pool, leases, 1, 1500)
    assert lease.pieces[-1] == PositionRange(0, 3998, 3999)
    assert not pool.returned


def saved() -> dict[str, Any]:
    leases = Leases(10, seed=3)
    pool, lease = took(begun(leases, 2), leases, 0, 4)
    pool, _ = took(pool, leases, 1, 3)
    pool, _ = leases.acknowledge(pool, [lease.number])
    plain: dict[str, Any] = json.loads(json.dumps(leases.to_plain(pool)))
    return plain


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Leases(11, seed=3), "samples=11: the checkpoint was made with 10"),
        (Leases(10, seed=4), "seed=4: the checkpoint was made with 3"),
        (Leases(10, seed=3, shuffle=False), "shuffle=False: the checkpoint was made with True"),
        (Leases(10, seed=3, drop_last=True), "drop_last=True: the checkpoint was made with False"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(other: Leases, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        other.from_plain(saved())


def test_more_epochs_and_another_term_may_follow_on_a_checkpoint() -> None:
    more = Leases(10, seed=3, epochs=50, term=timedelta(seconds=1))
    assert more.from_plain(saved()) == Leases(10, seed=3).from_plain(saved())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("version",), 2, "no place in it that this version can read"),
        (("pool",), None, "damaged"),
        (("pool", "fresh"), "7", r"damaged \(Expected `int`, got `str` - at `\$.fresh`\)"),
        (("pool", "fresh"), 8, "does not add up"),
        (("pool", "fresh"), 11, "position 11 of 10"),
        (("pool", "epoch"), 1, "does not add up"),
        (("pool", "complete"), 1, "1 epochs complete and 1 open, of 1"),
        (("pool", "open", "0", "used"), 5, "epoch 0: 5 samples settled, 3 leased, 3 fresh, of 10"),
        (("pool", "open", "0", "used"), -4, "settled"),
        (("pool", "returned"), [[0, 5, 6]], "overlap"),
        (("pool", "returned"), [[0, 9, 12]], "was never leased"),
        (("pool", "returned"), [[4, 0, 1]], "was never leased"),
        (("pool", "number"), 1, "the next is 1"),
        (("pool", "at"), {"0": 7}, "workers are in the epochs"),
    ],
)
def test_a_damaged_checkpoint_is_refused(path: tuple[str, ...], value: object, said: str) -> None:
    plain = saved()
    place = plain
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ModelError, match=said):
        Leases(10, seed=3).from_plain(plain)


def test_the_saved_form_is_frozen() -> None:
    """A checkpoint of today is read tomorrow: whoever changes this form gives it a new version."""
    assert saved() == {
        "version": 1, "samples": 10, "seed": 3, "shuffle": True, "drop_last": False,
        "pool": {
            "epoch": 0, "fresh": 7, "number": 2,
            "held": {
                "1": {
                    "lease": {"number": 1, "epoch": 0, "pieces": [[0, 4, 7]]},
                    "worker": 1, "taken_s": 0.0, "delivered": False,
                }
            },
            "returned": [], "at": {"0": 0, "1": 0}, "open": {"0": {"used": 4, "dropped": 0, "skipped": 0}},
            "complete": 0, "settled": {"used": 0, "dropped": 0, "skipped": 0}, "came_back": 0, "now_s": 0.0,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"samples": 0}, "lease 0 samples"),
        ({"samples": 2.5}, "lease 2.5 samples"),
        ({"samples": 5, "seed": None}, "seed None"),
        ({"samples": 5, "epochs": 0}, "lease 0 epochs"),
        ({"samples": 5, "term": timedelta(0)}, "lease for 0:00:00"),
        ({"samples": 5, "term": 600}, "lease for 600: give a datetime.timedelta"),
        ({"samples": True}, "lease True samples"),
        ({"samples": 5, "seed": True}, "seed True"),
        ({"samples": 5, "epochs": 2.0}, "lease 2.0 epochs"),
        ({"samples": 5, "shuffle": "no"}, "shuffle='no': choose True or False"),
        ({"samples": 5, "drop_last": None}, "drop_last=None: choose True or False"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        Leases(**values)


def test_a_description_is_a_value_and_a_lease_travels() -> None:
    leases = Leases(10, seed=3, epochs=2)
    assert eval(repr(leases), {"Leases": Leases, "datetime": __import__("datetime")}) == leases
    assert pickle.loads(pickle.dumps(leases)) == leases
    lease = Lease(3, 1, (PositionRange(0, 1, 2), PositionRange(1, 0, 5)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(lease), type=Lease) == lease
    assert lease.count == 6


def test_the_audit_sees_what_is_missing() -> None:
    leases = Leases(10)
    pool, lease = took(begun(leases, 1), leases, 0, 4)
    assert audit(pool, samples=10) is None
    assert audit(leases.give_back(pool, 0, [lease.number]), samples=10) is None
    assert audit(replace(pool, held={}), samples=10) == "epoch 0: 0 samples settled, 0 leased, 6 fresh, of 10"
