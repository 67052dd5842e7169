"""Scenarios to simulate, small enough to be worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.scenario import Scenario
from offbeat.sim import Known, Prediction, predict

if TYPE_CHECKING:
    from offbeat.plan import Plan

_TOML = """
[scenario]
name = "world"
{hosts}
[workload]
kind = "replay"
forward_s = 0.3
backward_s = 0.7
batch = 32
{workload}
[[workload.layer]]
name = "first"
shapes = [[{numel}]]
forward_s = 0.3
backward_s = 0.7
[run]
steps = {steps}
warmup_steps = {warmup}
baseline = "row"
[[row]]
name = "row"
system = "offbeat"
{extra}
"""


def world(
    *,
    count: int = 8,
    servers: int = 1,
    rate_mbps: float = 100.0,
    size_bytes: float = 1.25e6,
    hosts: str = "",
    workload: str = "",
    steps: int = 20,
    warmup: int = 20,
    extra: str = "",
) -> Scenario:
    """Workers that compute a second per step and send `size_bytes`."""
    hosts = hosts or f"[hosts]\ncount = {count}\nservers = {servers}\nrate_mbps = {rate_mbps}"
    return Scenario.from_toml(
        _TOML.format(
            hosts=hosts, workload=workload, numel=round(size_bytes / 4), steps=steps, warmup=warmup, extra=extra
        )
    )


def played(plan: Plan, scenario: Scenario) -> Prediction:
    """What is predicted of its row."""
    return predict(scenario, scenario.row[0], plan, Known.of(scenario))
