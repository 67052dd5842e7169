"""Gradients that travel behind the next forward pass, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import ScenarioError
from offbeat.plan import Plan
from offbeat.scenario import Scenario
from offbeat.scheduling import FIFO, Prophet, lower_bound_s
from offbeat.sim.cross_iteration import profile_of
from offbeat.sim.links import Links
from offbeat.sim.predict import Known, predict

TEXT = Path("benchmarks/scenarios/schedule_resnet50.toml").read_text()


def step_s(scenario: Scenario, plan: Plan | None) -> float:
    return predict(scenario, scenario.row[0 if plan is None else 6], plan, Known.of(scenario)).seconds_per_step


def test_the_order_is_what_pays() -> None:
    scenario = Scenario.from_toml(TEXT)
    ddp, fifo, prophet = (step_s(scenario, p) for p in (None, Plan(scheduling=FIFO()), Plan(scheduling=Prophet())))
    assert 0.95 * ddp < fifo
    assert prophet < 0.8 * ddp
    workload = scenario.workload
    bound_s = lower_bound_s(profile_of(workload, 4, Links.of(scenario)))  # type: ignore[arg-type]
    assert bound_s < prophet < 1.1 * bound_s


def test_a_slow_machine_sets_the_pace() -> None:
    hosts = "".join(
        f'[[host]]\nname = "h{i}"\nrate_mbps = 200\ncompute_factor = {2.0 if not i else 1.0}\n' for i in range(4)
    )
    text = TEXT.replace("[hosts]\ncount = 4\nrate_mbps = 200\n", hosts)
    assert step_s(Scenario.from_toml(text), Plan(scheduling=Prophet())) > 1.0


def test_a_schedule_follows_another_rate() -> None:
    """At first with the schedule for the old one; then as if links had always had it."""
    rate = '\n[[fault]]\nkind = "rate"\nworker = 1\nstep = {}\nto_mbps = 60\ntarget = "workers"\n'
    always = Scenario.from_toml(TEXT.replace("rate_mbps = 200", "rate_mbps = 60"))
    plan = Plan(scheduling=Prophet())
    slow_s, fast_s = step_s(always, plan), step_s(Scenario.from_toml(TEXT), plan)
    first, last = 9, 25  # of the steps that count
    for step in (12, 17):
        slow = last - (step + 1)
        found_s = 16 * step_s(Scenario.from_toml(TEXT + rate.format(step)), plan)
        best_s = (step + 1 - first) * fast_s + slow * slow_s
        assert best_s * (1 - 1e-9) <= found_s < 1.1 * best_s
    assert step_s(Scenario.from_toml(TEXT + rate.format(0)), plan) == pytest.approx(slow_s, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TEXT + '\n[[fault]]\nkind = "sigkill"\nworker = 1\nstep = 12\n', 'with faults other than "rate"'),
        (Path("benchmarks/scenarios/mnist.toml").read_text(), "for the script"),
    ],
)
def test_what_is_not_modelled_is_refused(text: str, says: str) -> None:
    scenario = Scenario.from_toml(text)
    known = Known([0.1] * len(scenario.workers.hosts), 1e6, 32)
    with pytest.raises(ScenarioError, match=says):
        predict(scenario, scenario.row[0], Plan(scheduling=Prophet()), known)
