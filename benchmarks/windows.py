"""What do windows save where a step in seven is late? `python -m benchmarks.windows`, a minute or two.

The windows of the table in Nunes et al., "No worker left (too far) behind" (2025), simulated on a switch by the
policies that train there, with the paper's pattern, but with nothing to send: order statistics alone. The paper's own
figures have its network in them. The result is benchmarks/results/windows.json; benchmarks/page.py shows it. It is the
same on every machine.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from offbeat.fabric import Switch
from offbeat.lab import hardware
from offbeat.plan import Plan
from offbeat.scenario import Scenario
from offbeat.sim import Known, predict
from offbeat.sync import ASP, SSP

RESULT = Path(__file__).parent / "results/windows.json"
COMMAND = "python -m benchmarks.windows"
WORKERS = (4, 8)
WINDOWS = (0, 2, 8, 10, 16, 32, 48, None)
"""Steps that a worker may be ahead; 0 is BSP, None ASP."""
STEPS, WARMUP_STEPS = 1000, 50
PAPER: dict[int, dict[int | None, float]] = {4: {2: 0.78, 10: 0.74, 32: 0.72, None: 0.71}, 8: {10: 0.605}}
"""Seconds per iteration, as a multiple of BSP's, by the published runs."""
_NAMES: dict[int | None, str] = {0: "0 (BSP)", None: "none (ASP)"}
_TOML = """
[scenario]
name = "windows"
[hosts]
count = {workers}
rate_mbps = 1000
mtu = 9000
switch = "ebpf"
[straggle]
probability = 0.15
low = 0.5
high = 2.0
[workload]
kind = "replay"
[[workload.layer]]
name = "all"
shapes = [[16]]
forward_s = 0.4
backward_s = 0.6
[run]
steps = {steps}
warmup_steps = {warmup_steps}
baseline = "row"
[[row]]
name = "row"
system = "offbeat"
"""


class WindowCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One window with one number of workers.

    Args:
        window: None for ASP.
        step_s: simulated seconds of a step, which computes for 1 second, and 1.1875 on average.
        wait_share: of that, waited for others.
        most_stale: updates that the most stale parameters lacked.
    """

    workers: int
    window: int | None
    step_s: float
    wait_share: float
    most_stale: int


class Windows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    versions: dict[str, str]
    steps: int
    cells: list[WindowCell]

    def ratio(self, workers: int, window: int | None) -> float:
        """Seconds per step as a multiple of BSP's."""
        of = {cell.window: cell.step_s for cell in self.cells if cell.workers == workers}
        return of[window] / of[0]


def simulate(workers: int, window: int | None, steps: int = STEPS) -> WindowCell:
    """Play one window."""
    scenario = Scenario.from_toml(_TOML.format(workers=workers, steps=steps, warmup_steps=WARMUP_STEPS))
    plan = Plan(sync=ASP() if window is None else SSP(bound=window), fabric=Switch(values=2048))
    told = predict(scenario, scenario.row[0], plan, Known.of(scenario))
    return WindowCell(
        workers=workers,
        window=window,
        step_s=round(told.seconds_per_step, 4),
        wait_share=round(told.wait_share, 4),
        most_stale=told.most_stale,
    )


def run() -> Windows:
    """All windows with all numbers of workers."""
    return Windows(
        command=COMMAND,
        versions=hardware.versions(),
        steps=STEPS,
        cells=[simulate(workers, window) for workers in WORKERS for window in WINDOWS],
    )


def read(path: Path = RESULT) -> Windows:
    """What was simulated."""
    return msgspec.json.decode(path.read_bytes(), type=Windows)


def rows(windows: Windows) -> list[list[str]]:
    """A line for each window: ratios, beside those of the published runs."""
    return [
        [
            _NAMES.get(window, str(window)),
            *(
                text
                for workers in WORKERS
                for text in (f"{windows.ratio(workers, window):.3f}", _published(workers, window))
            ),
        ]
        for window in dict.fromkeys(cell.window for cell in windows.cells)
    ]


def _published(workers: int, window: int | None) -> str:
    return "1" if window == 0 else f"{found:g}" if (found := PAPER[workers].get(window)) else ""


if __name__ == "__main__":
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=1) + b"\n")
