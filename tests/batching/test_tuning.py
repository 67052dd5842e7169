"""Batches follow the machines: evenly, exactly the sum, within the bounds, through noise, changes, joins and losses."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from offbeat.batching import BatchTuning, TuningState, WorkerSpeed
from offbeat.errors import ModelError, PlanError
from tests.batching.cluster import Cluster

EQUAL = dict.fromkeys(range(8), 1.0)
ONE_SLOW = {**EQUAL, 7: 2.0}


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("late", [0.0, 0.03])
def test_one_worker_twice_as_slow_for_good(noise: float, late: float) -> None:
    """R2SP section 9: at least 0.9 of the throughput of 7.5 ideal workers, where equal batches give 4 of 8."""
    cluster = Cluster(ONE_SLOW, BatchTuning(), noise=noise, late=late, seed=1)
    cluster.play(40)
    assert cluster.unevenness() < 0.12
    later = [max(cluster.cycles_s().values()) for _ in range(60) if cluster.play_one()]
    ideal = 7.5 / (cluster.fixed_s + cluster.sample_s * 64 + cluster.transfer_s) * 64  # samples per second
    assert cluster.total / fmean(later) > 0.9 * ideal
    assert cluster.best_s() / fmean(later) > 0.93


def test_without_noise_cycles_become_even_within_ten_rounds() -> None:
    cluster = Cluster(ONE_SLOW, BatchTuning())
    before_s = cluster.play(1)[0]
    cluster.play(9)
    assert cluster.unevenness() < 0.05
    assert before_s > 1.6 * cluster.round_s
    assert sum(cluster.batches.values()) == 512


def test_a_change_of_speed_is_followed_within_some_tens_of_steps() -> None:
    cluster = Cluster(dict(EQUAL), BatchTuning(), noise=0.05, seed=2)
    cluster.play(60)
    assert cluster.unevenness() < 0.08
    cluster.slowness[3] = 2.0
    cluster.play(15)
    assert cluster.unevenness() < 0.1
    cluster.slowness[3] = 1.0
    cluster.play(25)
    assert cluster.unevenness() < 0.12
    assert cluster.best_s() / max(cluster.cycles_s().values()) > 0.95


def test_very_unequal_machines() -> None:
    """From 1 to 50; the slowest would take a third of a sample."""
    slowness = {0: 1.0, 1: 1.0, 2: 3.0, 3: 10.0, 4: 25.0, 5: 50.0}
    cluster = Cluster(slowness, BatchTuning(), fixed_s=0.0, noise=0.03, transfer_s=0.0, total=256)
    cluster.play(80)
    assert cluster.unevenness() < 0.35, "one sample more is a third of the slowest ones' cycles"
    assert max(cluster.cycles_s().values()) < 1.15 * cluster.best_s()


def test_who_is_too_slow_for_every_round_takes_part_in_some_and_fills_them() -> None:
    cluster = Cluster({**EQUAL, 7: 50.0}, BatchTuning(), noise=0.03, fixed_s=0.02)
    cluster.play(60)
    seen = Counter[int]()
    for _ in range(60):
        cluster.play_one()
        assert sum(cluster.batches.values()) == 512
        seen.update(cluster.batches.keys())
    every = cluster.state.machines[7].every
    assert 10 <= every <= 13, "at its smallest batch it takes 1.07 s, where the others take 0.113 s"
    assert seen[0] == 60
    assert abs(seen[7] - 60 / every) <= 1
    assert cluster.unevenness() < 0.15
    assert f"worker 7 (1 of {every})" in cluster.explain()
    cluster.slowness[7] = 1.0
    cluster.play(150)
    assert cluster.state.machines[7].every == 1, "once it is fast again it is back in every round"


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_alone_changes_little(noise: float) -> None:
    cluster = Cluster(dict(EQUAL), BatchTuning(), noise=noise, seed=3)
    cluster.play(20)
    before = cluster.state.plans
    cluster.play(200)
    assert cluster.state.plans - before <= 8
    assert cluster.unevenness() < 1.6 * noise


def test_without_anything_to_gain_nothing_changes() -> None:
    cluster = Cluster(ONE_SLOW, BatchTuning())
    cluster.play(20)
    plans, batches = cluster.state.plans, dict(cluster.batches)
    cluster.play(100)
    assert (cluster.state.plans, cluster.batches) == (plans, batches)


def test_the_first_rounds_are_equal_but_for_a_probe_that_everybody_takes_part_in() -> None:
    for workers in (2, 3, 5, 8):
        tuning = BatchTuning()
        state = tuning.init(20 * workers)
        for worker in range(workers):
            state = tuning.join(state, worker)
        taken: dict[int, set[int]] = {worker: set() for worker in range(workers)}
        for round in range(5):
            state, batches = tuning.plan(state, round)
            assert sum(batches.values()) == 20 * workers
            for worker, batch in batches.items():
                taken[worker].add(batch)
        for sizes in taken.values():
            assert len(sizes) >= 2
            assert sizes <= {18, 20, 22}


def test_a_newcomer_begins_small_and_the_sum_stays() -> None:
    cluster = Cluster(dict(EQUAL), BatchTuning(), total=900)
    cluster.play(10)
    cluster.slowness[8] = 1.0
    cluster.state = cluster.tuning.join(cluster.state, 8)
    for _ in range(5):
        cluster.play_one()
        assert cluster.batches[8] == 25, "a quarter of an equal share"
        assert sum(cluster.batches.values()) == 900
    cluster.play(15)
    assert cluster.best_s() / max(cluster.cycles_s().values()) > 0.98
    assert cluster.batches[8] > 85
    assert sum(cluster.batches.values()) == 900


def test_what_a_worker_leaves_the_others_take_at_once() -> None:
    cluster = Cluster({0: 1.0, 1: 1.0, 2: 2.0}, BatchTuning(), total=100)
    cluster.play(15)
    cluster.state = cluster.tuning.leave(cluster.state, 0)
    del cluster.slowness[0]
    cluster.play_one()
    assert set(cluster.batches) == {1, 2}
    assert sum(cluster.batches.values()) == 100, "also where that is more than a quarter for each"
    cluster.state = cluster.tuning.leave(cluster.state, 1)
    del cluster.slowness[1]
    cluster.play_one()
    assert cluster.batches == {2: 100}


def test_batches_move_no_further_than_the_sum_demands() -> None:
    cluster = Cluster(dict.fromkeys(range(4), 1.0), BatchTuning(), total=100)
    cluster.play(15)
    assert set(cluster.batches.values()) == {25}
    for _ in range(8):  # one became ten times as fast, and at the same border another leaves
        cluster.state = cluster.tuning.observe(cluster.state, 0, 25, 0.0035, 0.02, 0.0)
    cluster.state = cluster.tuning.leave(cluster.state, 3)
    _, batches = cluster.tuning.plan(cluster.state, 15)
    assert sum(batches.values()) == 100
    assert batches[0] in (37, 38), "by half, since a quarter for each would not be enough; not at once to the best"


def test_out_of_memory_halves_what_a_worker_gets_for_good() -> None:
    cluster = Cluster({0: 1.0, 1: 4.0, 2: 4.0}, BatchTuning(), total=300)
    cluster.play(20)
    batch = cluster.batches[0]
    assert batch > 150
    cluster.state = cluster.tuning.out_of_memory(cluster.state, 0, batch)
    for _ in range(50):
        cluster.play_one()
        assert cluster.batches[0] <= batch // 2
        assert sum(cluster.batches.values()) == 300
    assert "because the others' batches may not be larger" not in cluster.explain()
    for _ in range(12):
        cluster.state = cluster.tuning.out_of_memory(cluster.state, 0, cluster.state.machines[0].most)
    cluster.play_one()
    assert cluster.batches[0] == 1, "never less than one sample"


def test_known_memory_is_a_bound_from_the_beginning() -> None:
    tuning = BatchTuning(smallest=4, largest=40)
    state = tuning.init(100)
    for worker, most in enumerate((None, 10, 1000)):
        state = tuning.join(state, worker, most=most)
    state, batches = tuning.plan(state, 0)
    assert sum(batches.values()) == 90, "all that fits: 40 + 10 + 40"
    assert batches[1] <= 10
    assert max(batches.values()) <= 40
    for round in range(1, 20):
        for worker, batch in batches.items():
            state = tuning.observe(state, worker, batch, 0.01 * batch, 0.0, 0.0)
        state, batches = tuning.plan(state, round)
    assert batches == {0: 40, 1: 10, 2: 40}
    assert "a round has 90 samples instead of 100, because no batch may be larger." in tuning.explain(state)


def test_who_has_gone_is_not_taken_for_a_bound() -> None:
    cluster = Cluster({0: 1.0, 1: 1.0, 2: 1.0}, BatchTuning(), total=96)
    cluster.play(20)
    cluster.state = cluster.tuning.leave(cluster.tuning.leave(cluster.state, 0), 1)
    left = cluster.state.machines[2].batch
    told = cluster.explain()
    assert f"a worker has joined, left or run out of memory since the last round: {left} samples of 96." in told
    assert "bounds" not in told


def test_one_worker_alone() -> None:
    cluster = Cluster({5: 3.0}, BatchTuning(), noise=0.1)
    for _ in range(30):
        cluster.play_one()
        assert cluster.batches == {5: 512}
    assert "no other takes part in every round" in cluster.explain()


def test_more_workers_than_samples() -> None:
    cluster = Cluster(dict.fromkeys(range(6), 1.0), BatchTuning(), total=4)
    cluster.play(20)
    assert set(cluster.batches.values()) == {1}
    assert "a round has 6 samples instead of 4, because no batch may be smaller." in cluster.explain()


def test_what_happens_within_the_first_rounds_is_no_trouble() -> None:
    tuning = BatchTuning()
    state = tuning.init(100)
    for worker in range(2):
        state = tuning.join(state, worker)
    state, batches = tuning.plan(state, 0)
    assert sorted(batches.values()) == [45, 55]
    state = tuning.out_of_memory(state, 1, batches[1])
    assert tuning.plan(state, 0)[1] == {0: 50, 1: 50}, "not planned anew, but no probe into what does not fit"
    state, batches = tuning.plan(state, 1)
    assert batches[1] <= 27
    assert sum(batches.values()) == 100
    state = tuning.leave(tuning.leave(state, 0), 1)
    assert tuning.plan(state, 2)[1] == {}


def test_a_round_is_planned_once() -> None:
    cluster = Cluster(dict(EQUAL), BatchTuning())
    cluster.play(8)
    assert cluster.tuning.plan(cluster.state, 7) == (cluster.state, cluster.batches)
    assert cluster.tuning.plan(cluster.state, 3)[0] == cluster.state


@pytest.mark.slow
def test_any_history_keeps_the_sum_the_bounds_and_the_pace_of_change() -> None:
    """Thousands of rounds of clusters in which everything happens."""
    happened: Counter[str] = Counter()
    for seed in range(70):
        luck = random.Random(seed)
        total, smallest = luck.choice([16, 100, 512]), luck.choice([1, 1, 4])
        tuning = BatchTuning(smallest=smallest, largest=luck.choice([None, None, 200]))
        slowness = {w: math.exp(luck.uniform(0, luck.choice([0.1, 1, 4]))) for w in range(luck.randint(1, 6))}
        noise, late = luck.choice([0, 0.05, 0.3]), luck.choice([0, 0.1])
        fixed_s = luck.choice([0.0, 0.01, 0.3])
        cluster = Cluster(slowness, tuning, total=total, fixed_s=fixed_s, noise=noise, late=late, seed=seed)
        for _ in range(30):
            before = cluster.state
            happened.update(something(cluster, luck))
            calm = cluster.state is before
            batches_before = {w: m.batch for w, m in cluster.state.machines.items()}
            settled = not cluster.state.changed
            every_before = {w: m.every > 1 for w, m in cluster.state.machines.items()}
            cluster.play_one()
            machines = cluster.state.machines
            present = {w for w, m in machines.items() if m.every == 1}
            assert present <= cluster.batches.keys() <= machines.keys()
            room, need = sum(machines[w].most for w in present), sum(min(smallest, m.most) for m in machines.values())
            if sum(machines[w].most for w in cluster.batches) >= total and need <= total and room >= total:
                assert sum(cluster.batches.values()) == total, (seed, cluster.round)
                happened["exact"] += 1
            for worker, batch in cluster.batches.items():
                assert min(smallest, total // len(machines), machines[worker].most) <= batch <= machines[worker].most
                assert batch >= 1
            # Where somebody turns rare the others take its part in the rounds between.
            calm = calm and every_before == {w: m.every > 1 for w, m in machines.items()}
            if calm and settled and all_known(tuning, before):
                for worker, m in machines.items():
                    old = batches_before[worker]
                    assert abs(m.batch - old) <= max(1, 0.25 * old), (seed, cluster.round, worker)
                    happened["steady"] += m.batch != old
            happened["rare"] += any(m.every > 1 for m in machines.values())
            assert cluster.explain().endswith(".")
            saved = json.loads(json.dumps(tuning.to_plain(cluster.state)))
            if luck.random() < 0.2:
                cluster.state = tuning.from_plain(saved, total)
    assert min(happened[what] for what in ("join", "leave", "memory", "speed", "exact", "steady", "rare")) > 60, (
        happened
    )


def all_known(tuning: BatchTuning, state: TuningState) -> bool:
    """Whether all were known: what is not is not held to the pace of change, since the sum is."""
    return all(m.compute.steps >= tuning.first_rounds for m in state.machines.values())


def something(cluster: Cluster, luck: random.Random) -> list[str]:
    """Happens to a worker, one round in four."""
    if luck.random() > 0.25:
        return []
    workers = sorted(cluster.slowness)
    what, worker = luck.choice(["join", "leave", "memory", "speed"]), luck.choice(workers)
    if what == "join" and len(workers) < 8:
        cluster.slowness[max(workers) + 1] = luck.uniform(1, 10)
        cluster.state = cluster.tuning.join(cluster.state, max(workers) + 1, most=luck.choice([None, 50]))
    elif what == "leave" and len(workers) > 1:
        del cluster.slowness[worker]
        cluster.state = cluster.tuning.leave(cluster.state, worker)
    elif what == "memory" and (batch := cluster.state.machines[worker].batch) and luck.random() < 0.5:
        cluster.state = cluster.tuning.out_of_memory(cluster.state, worker, batch)
    elif what == "speed":
        cluster.slowness[worker] *= luck.choice([0.3, 0.5, 2, 4])
    else:
        return []
    return [what]


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    one = Cluster(ONE_SLOW, BatchTuning(), noise=0.05, seed=4)
    other = Cluster(ONE_SLOW, BatchTuning(), noise=0.05, seed=4)
    for _ in range(40):
        one.play_one()
        other.play_one()
        other.state = other.tuning.from_plain(json.loads(json.dumps(other.tuning.to_plain(other.state))), 512)
        assert one.state == other.state
        assert one.batches == other.batches


def test_who_does_not_take_part_changes_nothing() -> None:
    tuning = BatchTuning()
    state = tuning.join(tuning.init(10), 0)
    assert tuning.observe(state, 3, 10, 1.0, 1.0, 0.0) is state
    assert tuning.out_of_memory(state, 3, 10) is state
    assert tuning.plan(tuning.init(10), 0) == (tuning.init(10), {})


def test_measurements_that_are_none_do_no_harm() -> None:
    cluster = Cluster(ONE_SLOW, BatchTuning())
    cluster.play(15)
    for nonsense in (math.nan, math.inf, -1.0):
        cluster.state = cluster.tuning.observe(cluster.state, 0, 64, nonsense, nonsense, nonsense)
    cluster.play(5)
    assert cluster.unevenness() < 0.05


def test_it_is_said_who_paces_the_rounds_and_why() -> None:
    bounded = Cluster({0: 1.0, 1: 5.0}, BatchTuning(smallest=32, largest=80), total=112)
    assert bounded.explain() == "It is not known yet who paces the rounds: 2 workers, none observed for long."
    assert "0 workers" in bounded.tuning.explain(bounded.tuning.init(100))
    bounded.play(5)
    assert re.match(
        r"Worker 1 paces the rounds with 0\.\d+ s \(0\.\d+ s fixed, \d+ samples of \d\.\d+ ms, 0\.02 s transfer\); "
        r"\d+ % longer than the others' mean, because batches change by at most 25 % at a time "
        r"and for a clear gain only; its computation is known to \d+\.\d % "
        r"\(5 steps, \d+ % noise, \d+ \+- \d+ % of it fixed\)\.$",
        bounded.explain(),
    ), bounded.explain()
    bounded.play(35)
    assert bounded.batches == {0: 80, 1: 32}
    assert "Worker 1 paces the rounds with 0.23 s" in bounded.explain()
    assert "because its batch may not be smaller" in bounded.explain()
    limited = Cluster({0: 1.0, 1: 5.0}, BatchTuning(largest=60), total=112)
    limited.play(40)
    assert limited.batches == {0: 60, 1: 52}
    assert "because the others' batches may not be larger" in limited.explain()
    even = Cluster(dict(EQUAL), BatchTuning())
    even.play(20)
    assert "which is even; its computation is known to" in even.explain()
    even.state = even.tuning.join(even.state, 9)
    assert "not known yet: worker 9" in even.explain()


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"smallest": 0}, "plan.tuning.smallest"),
        ({"smallest": 2.0}, "plan.tuning.smallest"),
        ({"smallest": 8, "largest": 4}, "plan.tuning.largest"),
        ({"memory": 3}, "plan.tuning.memory"),
        ({"gain": 0.0}, "plan.tuning.gain"),
        ({"blocked": 1.0}, "plan.tuning.blocked"),
        ({"most_change": math.nan}, "plan.tuning.most_change"),
        ({"first_rounds": 1}, "plan.tuning.first_rounds"),
    ],
)
def test_what_cannot_be_tuned_is_refused(values: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError, match=f"Cannot tune batches .* - at `{path}`"):
        BatchTuning(**values)


def test_a_global_batch_smaller_than_one_batch_is_refused() -> None:
    with pytest.raises(PlanError, match=r"global batch of 4 in batches of at least 8.*`plan.tuning.smallest`"):
        BatchTuning(smallest=8).init(4)


def test_a_description_is_a_value() -> None:
    tuning = BatchTuning(smallest=4, largest=40)
    assert eval(repr(tuning)) == tuning
    assert pickle.loads(pickle.dumps(tuning)) == tuning


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    cluster = Cluster(ONE_SLOW, BatchTuning())
    cluster.play(8)
    tuning = cluster.tuning
    with pytest.raises(ModelError, match="global batch of 100: the checkpoint was made with 512"):
        tuning.from_plain(tuning.to_plain(cluster.state), 100)
    with pytest.raises(ModelError, match="nothing that this version can read"):
        tuning.from_plain({}, 512)
    with pytest.raises(ModelError, match="damaged"):
        tuning.from_plain({"version": 1, "tuning": {"total": "x"}}, 512)
    machine: WorkerSpeed = cluster.state.machines[0]
    for bad in (replace(machine, most=0), replace(machine, compute=replace(machine.compute, seconds=-1.0))):
        state = replace(cluster.state, machines={0: bad})
        with pytest.raises(ModelError, match="damaged"):
            tuning.from_plain(tuning.to_plain(state), 512)


def test_no_batch_is_below_the_floor() -> None:
    tuning = BatchTuning()
    state = tuning.init(12, floor=2)
    for worker in range(3):
        state = tuning.join(state, worker)
    state = tuning.out_of_memory(state, 1, 2)
    smallest = 12
    for round in range(60):
        state, batches = tuning.plan(state, round)
        smallest = min(smallest, *batches.values())
        for worker, batch in batches.items():
            state = tuning.observe(state, worker, batch, 0.01 * 10**worker * batch, 0.01, 0.0)
    assert smallest == 2
    loaded = tuning.from_plain(json.loads(json.dumps(tuning.to_plain(state))), 12)
    assert loaded == state
    assert min(machine.most for machine in tuning.with_floor(loaded, 3).machines.values()) >= 3
    with pytest.raises(PlanError, match=r"up to 1: this model has BatchNorm, which needs 2 .* `plan.tuning.largest`"):
        BatchTuning(largest=1).init(12, floor=2)


@pytest.mark.parametrize("name", ["smallest", "largest", "memory", "first_rounds", "gain", "blocked", "most_change"])
@pytest.mark.parametrize("value", [True, -1, "2", 12.5, float("nan"), None, [2]], ids=repr)
def test_values_of_other_kinds_are_refused(name: str, value: Any) -> None:
    if (name, value) == ("largest", None):
        return
    with pytest.raises(
        PlanError, match=rf"Cannot tune batches .*{re.escape(repr(value))}.* - at `plan\.tuning\.{name}`\.$"
    ):
        BatchTuning(**{name: value})
