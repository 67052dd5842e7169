"""Faults in virtual time: each costs what can be worked out by hand, and no worker waits for ever."""

from __future__ import annotations

from functools import cache
from typing import get_args

import msgspec
import pytest

from offbeat.batching import BatchTuning
from offbeat.errors import ScenarioError
from offbeat.fabric import Elastic, ParameterServer
from offbeat.fault_spec import Fault, Link, Process, Script, Stranger
from offbeat.plan import Plan
from offbeat.sim import Known, Prediction, predict
from offbeat.sim.detection_times import MEND_S, START_S, TIMEOUT_S, gone_s
from offbeat.sim.faults import UNTIMED, check
from offbeat.sync import ASP, BSP, SSP, KSync, LocalSGD, Policy, RoundRobin
from tests.sim.scenarios import world

POLICIES: tuple[Policy, ...] = (
    BSP(),
    ASP(),
    SSP(bound=2),
    KSync(k=3),
    RoundRobin(),
    RoundRobin(strict=True),
    LocalSGD(every=4),
)
TIMED = sorted({*get_args(Process), *get_args(Script), *get_args(Link), *get_args(Stranger)} - {"lossy", *UNTIMED})
SCENARIO = world(count=3, steps=15, warmup=3, rate_mbps=1000, workload="jitter = 0.1")


def struck(plan: Plan, *faults: Fault) -> Prediction:
    """What is predicted when these strike."""
    return predict(SCENARIO, SCENARIO.row[0], plan, Known.of(SCENARIO), faults=faults)


@cache
def usual(plan: Plan) -> Prediction:
    """What is predicted when nothing happens."""
    return struck(plan)


def served(policy: Policy, tuning: BatchTuning | None = None) -> Plan:
    return Plan(sync=policy, fabric=ParameterServer(), tuning=tuning)


@pytest.mark.parametrize("kind", TIMED)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_kind_is_played_with_every_policy_to_the_end(policy: Policy, kind: str) -> None:
    found = struck(served(policy), Fault(worker=1, step=8, kind=kind, seconds=10))  # type: ignore[arg-type]
    assert found.seconds_per_step > 0.5 * usual(served(policy)).seconds_per_step
    assert len(found.others_s) == 1
    assert found != usual(served(policy))


@pytest.mark.parametrize("kind", sorted(UNTIMED))
def test_what_takes_no_time_is_played_as_if_nothing_happened(kind: str) -> None:
    assert struck(served(ASP()), Fault(worker=1, step=8, kind=kind)) == usual(served(ASP()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sigkill", "sigstop", "slow", "partition", "slow-link"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_server_is_struck_with_every_policy_and_all_come_to_the_end(policy: Policy, kind: str) -> None:
    for seconds in (1.0, 10.0):
        fault = Fault(worker=1, step=8, kind=kind, seconds=seconds, target="server")  # type: ignore[arg-type]
        lost_s = struck(served(policy), fault).simulated_s - usual(served(policy)).simulated_s
        away_s = {"sigkill": START_S, "slow": 0.0, "slow-link": 0.0}.get(kind, seconds)
        # At least what is not hidden behind steps of one second. RoundRobin spaces turns more widely for a while.
        hidden_s = 4.0 if isinstance(policy, LocalSGD) else 1.0
        assert 0.9 * away_s - hidden_s < lost_s
        assert lost_s < 1.2 * max(away_s, seconds) + 3 or isinstance(policy, RoundRobin)


def test_one_after_the_other_and_batches_that_are_tuned() -> None:
    faults = (
        Fault(worker=2, step=4, kind="sigkill"),
        Fault(worker=0, step=6, kind="join"),
        Fault(worker=1, step=11, kind="sigkill", target="server"),
        Fault(worker=0, step=14, kind="sigstop", seconds=12),
    )
    for policy in POLICIES[:-1]:
        found = struck(served(policy, BatchTuning()), *faults)
        assert len(found.others_s) == len(faults)


def test_all_wait_for_who_is_stopped_as_long_as_the_timeout_says() -> None:
    short, long = (struck(served(BSP()), Fault(worker=1, step=8, kind="sigstop", seconds=s)) for s in (3.0, 20.0))
    assert short.others_s == [pytest.approx(3.0, abs=0.5)]
    assert long.others_s == [pytest.approx(0.9 * TIMEOUT_S, abs=0.5)]
    # With ASP nobody waits for it.
    assert struck(served(ASP()), Fault(worker=1, step=8, kind="sigstop", seconds=20)).others_s[0] < 0.5  # type: ignore[operator]


def test_all_wait_for_who_is_on_a_slow_link_and_the_longer_the_slower_it_is() -> None:
    ten, hundred = (
        struck(served(BSP()), Fault(worker=1, step=8, kind="slow-link", seconds=10, factor=factor)).simulated_s
        for factor in (10.0, 100.0)
    )
    assert usual(served(BSP())).simulated_s + 0.1 < ten < hundred - 1.0


def test_who_is_killed_is_missed_after_the_grace_and_is_in_no_figure() -> None:
    found = struck(served(BSP()), Fault(worker=1, step=8, kind="sigkill"))
    assert found.others_s == [pytest.approx(gone_s(), abs=0.4)]
    assert found.samples_per_s < 0.8 * usual(served(BSP())).samples_per_s
    (left,) = struck(served(BSP()), Fault(worker=1, step=8, kind="leave")).others_s
    assert left is not None
    assert left < 0.3


def test_a_worker_that_joins_takes_its_part_of_the_link() -> None:
    scenario = world(count=2, steps=40, warmup=5, rate_mbps=20)
    join = Fault(worker=0, step=6, kind="join")
    two, three = (
        predict(scenario, scenario.row[0], served(BSP()), Known.of(scenario), faults=faults) for faults in ((), (join,))
    )
    assert three.seconds_per_step > 1.1 * two.seconds_per_step


def test_a_server_that_is_killed_costs_its_start_once() -> None:
    found = struck(served(BSP()), Fault(worker=1, step=8, kind="sigkill", target="coordinator"))
    assert found.others_s == [pytest.approx(START_S, abs=0.5)]


def test_all_reduce_waits_for_who_is_stopped_and_goes_on_without_who_is_killed() -> None:
    stopped = struck(Plan(), Fault(worker=1, step=8, kind="sigstop", seconds=20))
    assert stopped.others_s == [pytest.approx(20, abs=0.5)]
    killed = struck(Plan(fabric=Elastic()), Fault(worker=1, step=8, kind="sigkill"))
    assert killed.others_s == [pytest.approx(MEND_S, abs=0.4)]
    averaged = struck(Plan(sync=LocalSGD(every=4)), Fault(worker=1, step=8, kind="sigstop", seconds=20))
    assert averaged.others_s == [pytest.approx(20, abs=2.0)]


def test_a_link_that_was_cut_is_found_whole_only_when_something_is_sent_again() -> None:
    for seconds in (0.5, 1.5, 3.0):
        cut = struck(Plan(), Fault(worker=1, step=8, kind="mute", seconds=seconds))
        # What is left of it when a second has been computed; at most twice as long, since pauses double.
        left_s = max(0.0, seconds - 1.0)
        assert left_s - 0.3 <= cut.simulated_s - usual(Plan()).simulated_s <= 2 * left_s + 0.3


@pytest.mark.parametrize("target", ["workers", "server"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_rate_that_changes_is_that_of_every_step_behind(policy: Policy, target: str) -> None:
    """Down and up again; a row says what it costs by its steps alone, since nobody recovers from it."""
    if target == "server":  # workers' links are not what limits
        hosts = "".join(f'[[host]]\nname = "h{i}"\nrate_mbps = 1000\n' for i in range(3))
        hosts += '[[host]]\nname = "s"\nrate_mbps = 100\nrole = "server"\n'
        scenario = world(hosts=hosts, steps=24, warmup=3)
    else:
        scenario = world(count=3, steps=24, warmup=3)
    rates = [
        msgspec.convert({"worker": 1, "step": step, "kind": "rate", "to_mbps": rate, "target": target}, Fault)
        for step, rate in ((8, 10), (20, 1000))
    ]
    known = Known.of(scenario)

    def took_s(*faults: Fault) -> float:
        found = predict(scenario, scenario.row[0], served(policy), known, faults=faults)
        assert not found.others_s
        assert not found.faults
        return found.simulated_s

    usual_s, down_s, both_s = took_s(), took_s(rates[0]), took_s(*rates)
    assert usual_s + 1.0 < both_s < down_s - 0.5


def test_all_reduce_goes_at_the_rate_that_links_have() -> None:
    """1.25 MB around three hosts: 0.14 s at 100 Mbit/s, 1.4 s at 10."""
    scenario = world(count=3, steps=20, warmup=3)
    halved = Fault(worker=1, step=12, kind="rate", to_mbps=10.0)
    usual_s, slow_s = (
        predict(scenario, scenario.row[0], Plan(), Known.of(scenario), faults=faults).simulated_s
        for faults in ((), (halved,))
    )
    assert slow_s - usual_s == pytest.approx(10 * 9 * 0.14, rel=0.1), "of the last ten steps"


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"Cannot simulate lossy of worker 1 .* \(fault\.kind\)\."):
        check(Fault(worker=1, step=8, kind="lossy"))
    with pytest.raises(ScenarioError, match=r"with Elastic: it is longer than the timeout of 5 s"):
        struck(Plan(fabric=Elastic()), Fault(worker=1, step=8, kind="partition", seconds=6))
