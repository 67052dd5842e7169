"""How long does a simulated step take, the more workers there are? `python -m benchmarks.growth`, a minute or two.

Each cell plays a few steps of workers that compute for a second and share one server's link, on one core of this
machine, and keeps the seconds that this took per step of all workers. Of several times the page has the least: what
else the machine did is not the simulator's. The result is benchmarks/results/growth.json; benchmarks/page.py shows it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.fabric import ParameterServer
from offbeat.lab import hardware
from offbeat.plan import Plan
from offbeat.scenario import Scenario
from offbeat.sim import Known, predict
from offbeat.sync import ASP, SSP, LocalSGD, RoundRobin

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results/growth.json"
WORKERS = (8, 64, 256, 1000)
_MANY = 1000  # where once takes long enough
COMMAND = "python -m benchmarks.growth"
PLANS = {
    "bsp": Plan(fabric=ParameterServer()),
    "ssp(4)": Plan(sync=SSP(bound=4), fabric=ParameterServer()),
    "asp": Plan(sync=ASP(), fabric=ParameterServer()),
    "round-robin": Plan(sync=RoundRobin(), fabric=ParameterServer()),
    "local sgd(4)": Plan(sync=LocalSGD(every=4), fabric=ParameterServer()),
    "all-reduce": Plan(),
}
STEPS, WARMUP_STEPS = 1, 3  # of which the first is like any other, here
_TOML = """
[scenario]
name = "growth"
[hosts]
count = {workers}
servers = 1
rate_mbps = 1000
[workload]
kind = "replay"
forward_s = 0.3
backward_s = 0.7
jitter = 0.1
[[workload.layer]]
name = "all"
shapes = [[312500]]
forward_s = 0.3
backward_s = 0.7
[run]
steps = {steps}
warmup_steps = {warmup_steps}
baseline = "row"
[[row]]
name = "row"
system = "offbeat"
"""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan with one number of workers.

    Args:
        wall_s: of this machine, for a step of all workers, in each repeat.
        simulated_s: that such a step takes in virtual time.
    """

    row: str
    workers: int
    wall_s: list[float]
    simulated_s: float


class Growth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    cells: list[Cell]


def measure(row: str, workers: int) -> Cell:
    """Play one plan."""
    scenario = Scenario.from_toml(_TOML.format(workers=workers, steps=STEPS, warmup_steps=WARMUP_STEPS))
    known, wall_s, simulated_s = Known.of(scenario), [], 0.0
    for _ in range(1 if workers >= _MANY else 3):
        began_s = time.perf_counter()
        simulated_s = predict(scenario, scenario.row[0], PLANS[row], known).simulated_s / (STEPS + WARMUP_STEPS)
        wall_s.append((time.perf_counter() - began_s) / (STEPS + WARMUP_STEPS))
    return Cell(row=row, workers=workers, wall_s=wall_s, simulated_s=simulated_s)


def run(workers: Sequence[int] = WORKERS) -> Growth:
    """All plans with all numbers of workers."""
    return Growth(
        command=COMMAND,
        date=hardware.date(),
        versions=hardware.versions(),
        hardware=hardware.hardware(),
        cells=[measure(row, count) for row in PLANS for count in workers],
    )


def read(path: Path = RESULT) -> Growth:
    """What was measured."""
    return msgspec.json.decode(path.read_bytes(), type=Growth)


def rows(growth: Growth) -> list[list[str]]:
    """A line for each plan: milliseconds per step, by number of workers."""
    cells = {(cell.row, cell.workers): _ms(min(cell.wall_s)) for cell in growth.cells}
    names = list(dict.fromkeys(cell.row for cell in growth.cells))
    return [[name, *(cells[name, count] for count in counts(growth))] for name in names]


def _ms(wall_s: float) -> str:
    return f"{1e3 * wall_s:,.0f}" if wall_s >= 0.1 else f"{1e3 * wall_s:.2g}"


def counts(growth: Growth) -> list[int]:
    """The numbers of workers."""
    return list(dict.fromkeys(cell.workers for cell in growth.cells))


if __name__ == "__main__":
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=1) + b"\n")
