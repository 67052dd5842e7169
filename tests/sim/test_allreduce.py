"""Rows without a server, in virtual time: an all-reduce as formulas have it."""

from __future__ import annotations

import statistics

import pytest

from offbeat.batching import BatchTuning
from offbeat.codec import Cast
from offbeat.control import AdaptQuorum
from offbeat.fabric import Switch
from offbeat.plan import Plan
from offbeat.sim import Known, predict
from offbeat.sim.links import GOODPUT
from offbeat.sim.message_sizes import buckets
from offbeat.straggler_model import Straggler
from offbeat.sync import SSP, KSync, LocalSGD
from tests.sim.scenarios import played, world

RING_S = 2 * 7 / 8 * 0.1 / GOODPUT


def test_what_is_not_hidden_is_waited_for() -> None:
    assert played(Plan(), world()).seconds_per_step == pytest.approx(1 + RING_S, abs=0.02)


def test_a_narrow_codec_sends_half() -> None:
    scenario = world(rate_mbps=10)
    assert played(Plan(codec=Cast("bf16")), scenario).seconds_per_step == pytest.approx(1 + 5 * RING_S, abs=0.03)


def test_bad_luck_does_not_hide_behind_the_exchange() -> None:
    always = world(extra="[straggle]\nprobability = 1.0\nlow = 1.0\nhigh = 1.0")
    assert played(Plan(), always).seconds_per_step == pytest.approx(2 + RING_S, abs=0.02)
    # A change is brought behind the loss, and takes as long.
    assert played(Plan(sync=LocalSGD(every=1)), always).seconds_per_step == pytest.approx(2 + RING_S, abs=0.02)


def test_all_wait_for_whoever_lost_most() -> None:
    scenario = world(extra="[straggle]\nprobability = 0.15", steps=400)
    laws = [Straggler(scenario.straggle, rank) for rank in range(8)]
    # The loss of one step is waited for in the next one.
    most_s = [max(law.lost_s(1.0) for law in laws) for _ in range(20 + 400)][19:-1]
    wanted_s = 1 + statistics.fmean(most_s) + RING_S
    assert played(Plan(), scenario).seconds_per_step == pytest.approx(wanted_s, rel=0.01)


def test_local_steps_send_every_so_often() -> None:
    step_s = played(Plan(sync=LocalSGD(every=10)), world(rate_mbps=10)).seconds_per_step
    assert step_s == pytest.approx(1 + RING_S, abs=0.03)


def test_a_delayed_average_travels_while_the_next_steps_compute() -> None:
    thin = world(rate_mbps=10)
    for fragments in (1, 5):
        delayed = played(Plan(sync=LocalSGD(10, delay=1, fragments=fragments)), thin)
        assert delayed.wait_share < 0.01
        assert delayed.seconds_per_step == pytest.approx(1, abs=0.01)
    waited = played(Plan(sync=LocalSGD(10, fragments=5)), thin)
    assert waited.seconds_per_step == pytest.approx(1 + RING_S, abs=0.03), "as many bytes, one part after the other"
    # A link that takes twice as long as the steps between two averages is what all wait for.
    thinner = played(Plan(sync=LocalSGD(10, delay=1)), world(rate_mbps=1))
    assert thinner.seconds_per_step == pytest.approx(10 * RING_S, rel=0.03)


def test_a_delay_lets_bad_luck_of_one_interval_pass() -> None:
    always = world(extra="[straggle]\nprobability = 0.2\nlow = 1.0\nhigh = 1.0", steps=200)
    waited, delayed = (played(Plan(sync=LocalSGD(5, delay=delay)), always).wait_share for delay in (0, 1))
    assert delayed < waited


def test_all_wait_for_the_slowest_unless_batches_are_tuned() -> None:
    hosts = "".join(
        f'[[host]]\nname = "h{rank}"\nrate_mbps = 1000\ncompute_factor = {2.0 if rank == 0 else 1.0}\n'
        for rank in range(8)
    )
    scenario = world(hosts=hosts, warmup=60, workload="fixed = 0.0")
    assert played(Plan(), scenario).seconds_per_step > 2.0
    assert played(Plan(tuning=BatchTuning()), scenario).seconds_per_step == pytest.approx(8 / 7.5, rel=0.05)


def test_buckets_are_those_of_the_layout_and_leave_during_backward() -> None:
    scenario = world(workload="", size_bytes=4e6)
    (only,) = buckets(scenario, scenario.row[0], Plan(), 0.0)
    assert (only.size_bytes, only.ready) == (4e6, 1.0)
    from pathlib import Path

    from offbeat.scenario import Scenario

    uniform = Scenario.from_toml(Path("benchmarks/scenarios/uniform.toml").read_text())
    found = buckets(uniform, uniform.row[0], Plan(bucket_bytes=1_000_000), 0.0)
    assert len(found) > 3
    assert [bucket.ready for bucket in found] == sorted(bucket.ready for bucket in found)
    assert sum(bucket.size_bytes for bucket in found) == Known.of(uniform).gradient_bytes
    # The forward pass is a third of a step; the first bucket is full soon behind it.
    assert 1 / 3 < found[0].ready < 0.6 < found[-1].ready


def test_a_peer_is_a_plan_of_ddp() -> None:
    import msgspec

    scenario = world()
    row = msgspec.structs.replace(scenario.row[0], system="ddp")
    assert predict(scenario, row, None, Known.of(scenario)) == played(Plan(), scenario)


SWITCH = Switch("127.0.0.1:1", slots=1 << 16)


def test_on_a_switch_nobody_waits_for_who_comes_too_late_now_and_then() -> None:
    scenario = world(extra="[straggle]\nprobability = 0.15", steps=200)
    all_, some = Plan(fabric=SWITCH), Plan(sync=KSync(6), fabric=SWITCH)
    waits, goes_on = played(all_, scenario), played(some, scenario)
    assert goes_on.seconds_per_step < 0.8 * waits.seconds_per_step
    # Each makes all steps, with what is lost in them: so it is no faster than who only waits for its own.
    assert goes_on.seconds_per_step > played(Plan(sync=SSP(60), fabric=SWITCH), scenario).seconds_per_step - 0.01


def test_a_machine_that_is_always_slow_is_waited_for_once_the_switch_keeps_no_more_sums() -> None:
    hosts = "".join(
        f'[[host]]\nname = "h{rank}"\nrate_mbps = 1000\ncompute_factor = {2.0 if rank == 0 else 1.0}\n'
        for rank in range(8)
    )
    few = Plan(sync=KSync(7), fabric=Switch("127.0.0.1:1"))  # 8192 slots, 1285 packets in a step
    slow = world(hosts=hosts, warmup=3, steps=3)
    early = played(few, slow)
    late = played(few, world(hosts=hosts, warmup=40, steps=40))
    assert early.seconds_per_step < 1.5
    assert late.seconds_per_step > 1.9
    of_all = played(Plan(fabric=SWITCH), slow)
    for wait_s, takes_s in ((0.3, early.seconds_per_step + 0.3), (9.0, of_all.seconds_per_step)):
        waits = Plan(sync=KSync(7, wait_s=wait_s), fabric=few.fabric)
        assert played(waits, slow).seconds_per_step == pytest.approx(takes_s, abs=0.05)


def test_a_controller_lowers_the_quorum_in_virtual_time() -> None:
    scenario = world(extra="[straggle]\nprobability = 0.15", steps=200)
    plan = Plan(sync=KSync(8), fabric=SWITCH, controller=AdaptQuorum(5, 8, too_late=0.5))
    assert played(plan, scenario).seconds_per_step < 0.9 * played(Plan(fabric=SWITCH), scenario).seconds_per_step
