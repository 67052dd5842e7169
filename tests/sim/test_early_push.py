"""Gradients that are pushed to a server while backward computes, in virtual time: what can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from offbeat.batching import BatchTuning
from offbeat.errors import ScenarioError
from offbeat.fabric import ParameterServer
from offbeat.plan import Plan
from offbeat.scenario import Scenario
from offbeat.scheduling import FIFO, Prophet
from offbeat.sim import Known, is_modelled, predict
from offbeat.sim.early_push import EarlyParts
from offbeat.sim.links import GOODPUT, Links
from offbeat.sync import ASP, BSP, SSP, Policy, RoundRobin
from tests.sim.scenarios import played

if TYPE_CHECKING:
    from offbeat.scheduling import Scheduler

STEP_S = 0.002  # of a worker beyond computing: Python
LAYERS, LAYER_BYTES, BLOCK_BYTES = 10, 1 << 20, 1 << 16
SIZE_BYTES = LAYERS * LAYER_BYTES
FORWARD_S, BACKWARD_S = 0.03, 0.07  # of a layer

_TEXT = """
[scenario]
name = "early"
[hosts]
count = {count}
servers = {servers}
rate_mbps = {rate_mbps}
[workload]
kind = "replay"
forward_s = {forward_s}
backward_s = {backward_s}
batch = 32
{layers}
[run]
steps = 20
warmup_steps = 5
baseline = "row"
[[row]]
name = "row"
system = "offbeat"
{extra}
"""


def scenario(
    count: int = 1,
    *,
    rate_mbps: float = 10_000.0,
    servers: int = 1,
    computes: float = 1.0,
    layer_bytes: int = LAYER_BYTES,
    extra: str = "",
) -> Scenario:
    """Workers with ten equal layers, which compute a second in a step if `computes` is 1."""
    layer = '[[workload.layer]]\nname = "layer{i}"\nshapes = [[{numel}]]\n'
    layer += "forward_s = {forward_s}\nbackward_s = {backward_s}"
    times = {"forward_s": computes * FORWARD_S, "backward_s": computes * BACKWARD_S}
    layers = [layer.format(i=i, numel=layer_bytes // 4, **times) for i in range(LAYERS)]
    return Scenario.from_toml(
        _TEXT.format(
            count=count,
            servers=servers,
            rate_mbps=rate_mbps,
            forward_s=computes * FORWARD_S * LAYERS,
            backward_s=computes * BACKWARD_S * LAYERS,
            layers="\n".join(layers),
            extra=extra,
        )
    )


def plan(policy: Policy | None = None, *, early: bool = True, block_bytes: int = BLOCK_BYTES) -> Plan:
    fabric = ParameterServer(block_bytes=block_bytes)
    return Plan(sync=policy or BSP(), fabric=fabric, scheduling=Prophet() if early else None)


def parts_of(found: Scenario, block_bytes: int = BLOCK_BYTES, scheduler: Scheduler = Prophet()) -> EarlyParts:  # noqa: B008
    return EarlyParts.of(found, scheduler, ParameterServer(block_bytes=block_bytes), Links.of(found))


def seconds(found: Scenario, made: Plan) -> float:
    return played(made, found).seconds_per_step


def copy_s(rate_mbps: float) -> float:
    """Seconds that one copy of the model is on a link."""
    return SIZE_BYTES / (GOODPUT * rate_mbps * 1e6 / 8)


def test_with_next_to_nothing_to_send_a_step_takes_what_is_computed() -> None:
    found = scenario(layer_bytes=4096)
    assert len(parts_of(found, block_bytes=4096).places) == LAYERS
    assert seconds(found, plan(block_bytes=4096)) == pytest.approx(1.0 + STEP_S, abs=STEP_S)


def test_what_is_held_back_is_what_is_needed_last() -> None:
    """200 Mbit/s, 0.44 s each way: all but the first and the last layer's gradients are there when backward ends.

    Once the first layer's are, too, and behind them the announcement, parameters come back without a pause, the last
    layer's behind all others; then that layer is left.
    """
    expected_s = 0.7 + copy_s(200) / LAYERS + copy_s(200) + FORWARD_S
    assert seconds(scenario(rate_mbps=200), plan()) == pytest.approx(expected_s, abs=0.01)


def test_a_forward_pass_goes_on_while_its_later_parameters_come_back() -> None:
    """50 Mbit/s, 1.8 s each way: the first layers' gradients overtake others, and what is held back is of the last one.

    So the link is busy from the first gradient on until all parameters are back, and then one layer is left.
    """
    expected_s = BACKWARD_S + 2 * copy_s(50) + FORWARD_S
    assert seconds(scenario(rate_mbps=50), plan()) == pytest.approx(expected_s, rel=0.01)
    assert expected_s < seconds(scenario(rate_mbps=50), plan(early=False)) + copy_s(50)


def test_where_there_is_one_block_nothing_leaves_early() -> None:
    found = scenario(rate_mbps=200)
    one_block = seconds(found, plan(block_bytes=16 << 20))
    assert one_block == pytest.approx(1.0 + 2 * copy_s(200), abs=0.005)
    assert one_block > seconds(found, plan()) + 0.8 * copy_s(200)


def test_a_link_that_is_too_slow_carries_all_bytes_there_and_then_back() -> None:
    """Nothing is computed: the server makes nothing of what has come before all is announced."""
    found = scenario(4, rate_mbps=100, computes=1e-3)
    there_s = 4 * copy_s(100)
    assert 2 * there_s * (1 - BLOCK_BYTES / SIZE_BYTES) < seconds(found, plan()) < 2 * there_s * 1.05


@pytest.mark.slow
def test_where_nobody_waits_for_others_a_slow_link_is_busy_both_ways() -> None:
    found = scenario(8, rate_mbps=100, computes=1e-3)
    assert 8 * copy_s(100) * 0.99 < seconds(found, plan(ASP())) < 2 * 8 * copy_s(100)


def test_two_servers_carry_twice_as_much() -> None:
    one, two = (seconds(scenario(4, rate_mbps=100, computes=1e-3, servers=n), plan()) for n in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BSP(), SSP(4), ASP()], ids=repr)
def test_a_scenario_of_the_lab_is_played(policy: Policy) -> None:
    """Early pushes gain, whoever waits for whom."""
    found = Scenario.from_toml(Path("benchmarks/scenarios/schedule_server.toml").read_text())
    known = Known.of(found)
    early, behind = (predict(found, found.row[0], plan(policy, early=is_early), known) for is_early in (True, False))
    assert 0.5 < early.seconds_per_step < 0.85 * behind.seconds_per_step
    assert predict(found, found.row[0], plan(policy), known) == early, "nothing by chance"
    assert early.most_stale <= {BSP(): 0, SSP(4): 4 * 4}.get(policy, 99)


def test_a_slow_machine_and_bad_luck_hold_all_up() -> None:
    found = scenario(2, rate_mbps=1000, extra="[straggle]\nprobability = 0.5")
    luck_s = seconds(found, plan())
    assert luck_s > 1.2 * seconds(scenario(2, rate_mbps=1000), plan())
    assert played(plan(ASP()), found).seconds_per_step < luck_s


def test_a_link_that_changes_its_rate_is_another_from_then_on() -> None:
    rate = '[[fault]]\nkind = "rate"\nworker = 0\nstep = 14\nto_mbps = 50\ntarget = "workers"'
    fast_s, slow_s = (seconds(scenario(rate_mbps=mbps), plan()) for mbps in (200, 50))
    assert seconds(scenario(rate_mbps=200, extra=rate), plan()) == pytest.approx((fast_s + slow_s) / 2, rel=0.05)


def test_parts_are_pushed_in_order_and_are_needed_where_their_gradients_are() -> None:
    found = scenario(4, rate_mbps=200)
    parts = parts_of(found, LAYER_BYTES, FIFO(1))
    complete_s = [BACKWARD_S * (i + 2) for i in range(LAYERS - 1)]
    assert parts.ready_s == pytest.approx([*complete_s, complete_s[-1]]), "one part is one layer; the last is held back"
    assert parts.needed == (*(frozenset({LAYERS - 2 - i}) for i in range(LAYERS - 1)), frozenset({LAYERS - 1}))
    assert parts.places == (*range(LAYERS - 1)[::-1], LAYERS - 1), "the first layer's come back first"
    assert parts.compute_s == pytest.approx(1.0)


def test_what_is_not_modelled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Plan(fabric=ParameterServer(), scheduling=Prophet(), tuning=BatchTuning())
    assert not is_modelled(scenario().row[0], None, tuned)
    with pytest.raises(ScenarioError, match=r"what is asked for of the data.*plan.tuning"):
        seconds(scenario(2), tuned)
    killed = scenario(2, extra='[[fault]]\nkind = "sigkill"\nworker = 1\nstep = 12')
    with pytest.raises(ScenarioError, match='faults other than "rate"'):
        seconds(killed, plan())
    script = Scenario.from_toml(Path("benchmarks/scenarios/mnist.toml").read_text())
    with pytest.raises(ScenarioError, match="for the script"):
        predict(script, script.row[0], plan(), Known([0.1] * len(script.workers.hosts), 1e6, 32))
    monkeypatch.setattr(Plan, "_check_scheduling", lambda *_: None)  # whether or not such a plan can be trained
    gated = plan(RoundRobin())
    assert not is_modelled(scenario().row[0], None, gated)
    with pytest.raises(ScenarioError, match=r"RoundRobin.*may push in its turn only"):
        seconds(scenario(2), gated)
