"""Rows with a server, in virtual time: what formulas say, what policies promise, and nothing by chance."""

from __future__ import annotations

import pytest

from offbeat.batching import BatchTuning
from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.sim import Known
from offbeat.sim.compute_time import ComputeTimes
from offbeat.sim.links import GOODPUT, Links
from offbeat.sim.parameter_server import SimulatedServer
from offbeat.sync import ASP, BSP, DSSP, SSP, Hybrid, KSync, LocalSGD, Policy, RoundRobin
from tests.sim.scenarios import played, world

POLICIES: tuple[Policy, ...] = (
    BSP(),
    ASP(),
    SSP(bound=2),
    DSSP(low=1, high=4),
    KSync(k=6),
    KSync(k=6, late="carry"),
    RoundRobin(),
    RoundRobin(strict=True),
    Hybrid(inner=BSP(), outer=SSP(bound=2), groups=4),
    LocalSGD(every=4),
)
D_S = 0.1 / GOODPUT  # one copy of the model on the server's link; computation is 1 s


def served(policy: Policy, **changes: object) -> Plan:
    return Plan(sync=policy, fabric=ParameterServer(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_worker_takes_every_step_with_every_policy(policy: Policy) -> None:
    scenario = world(workload="jitter = 0.3", extra="[straggle]\nprobability = 0.2")
    known = Known.of(scenario)
    compute_times = [ComputeTimes(scenario, rank, compute_s) for rank, compute_s in enumerate(known.compute_s)]
    size_bytes = known.gradient_bytes
    game = SimulatedServer(
        served(policy),
        compute_times,
        Links.of(scenario),
        size_bytes=size_bytes,
        pull_bytes=size_bytes,
        steps=30,
        batch=32,
    )
    result = game.play()
    assert [len(steps) for steps in result.step_s] == [30] * 8
    assert all(waited > -1e-9 for waits in result.waited_s for waited in waits)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_same_again_is_the_same(policy: Policy) -> None:
    scenario = world(workload="jitter = 0.2")
    assert played(served(policy), scenario) == played(served(policy), scenario)


def test_all_at_once_wait_for_all_bytes() -> None:
    step_s = played(served(BSP()), world()).seconds_per_step
    # Between an update that travels back while others still arrive, and one that does not (r2sp.md, section 3).
    assert 1 + 8 * D_S < step_s < 1 + 16 * D_S


def test_turns_hide_the_bytes_behind_computation() -> None:
    prediction = played(served(RoundRobin()), world())
    assert 1 + D_S < prediction.seconds_per_step < 1.15 * (1 + 2 * D_S)
    assert prediction.most_stale <= 8


def test_a_link_that_is_too_slow_is_always_busy() -> None:
    step_s = played(served(ASP()), world(rate_mbps=20)).seconds_per_step
    assert step_s == pytest.approx(8 * 5 * D_S, rel=0.05)


def test_two_servers_carry_twice_as_much() -> None:
    one, two = (played(served(ASP()), world(rate_mbps=20, servers=n)).seconds_per_step for n in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.1)


SLOW = "".join(
    f'[[host]]\nname = "h{rank}"\nrate_mbps = 1000\ncompute_factor = {2.0 if rank == 0 else 1.0}\n' for rank in range(8)
)
SLOW += '[[host]]\nname = "server"\nrole = "server"\nrate_mbps = 1000\n'


@pytest.mark.slow
def test_a_slow_worker_holds_up_who_waits_for_it_and_tuned_batches_mend_that() -> None:
    scenario = world(hosts=SLOW, warmup=60, workload="jitter = 0.05\nfixed = 0.1")
    strict = played(served(RoundRobin(strict=True)), scenario)
    tuned = played(served(RoundRobin(), tuning=BatchTuning()), scenario)
    assert strict.seconds_per_step == pytest.approx(2.0, rel=0.1)
    ideal = 32 * 7.5  # samples per second, of seven machines and a half
    assert strict.samples_per_s < 0.6 * ideal
    assert tuned.samples_per_s > 0.9 * ideal


def test_who_is_far_behind_is_not_waited_for_with_asp() -> None:
    scenario = world(hosts=SLOW)
    assert played(served(ASP()), scenario).samples_per_s > 1.8 * played(served(BSP()), scenario).samples_per_s


def test_staleness_is_what_the_policy_lets_happen() -> None:
    scenario = world(workload="jitter = 0.3", extra="[straggle]\nprobability = 0.3")
    assert played(served(BSP()), scenario).most_stale == 0
    asp = played(served(ASP()), scenario)
    assert 6 < asp.staleness < 8 < asp.most_stale
    assert played(served(RoundRobin(strict=True)), scenario).most_stale <= 8
