"""Is training by way of a framework as fast on offbeat as on Gloo, or faster? `python -m benchmarks.frameworks`.

Each framework's script (benchmarks/workloads/framework_job.py) is run by turns as it is, on its own DDP over Gloo, and
on offbeat: the backend, by one word, on equal links and where one of four has a slow network card; and a plan, by its
adapter, where workers are late now and then. With two workers the parameters in the end have to be the same bits.

Needs root, for the lab, and the frameworks: pip install -e ".[frameworks,lab]". Takes half an hour on two cores; with
names of frameworks only these are measured again. The result is benchmarks/results/frameworks.json; docs/frameworks.md
shows it.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks import c10d_faults, import_time, torch_tests
from offbeat.lab import hardware, runner
from offbeat.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/frameworks.json"
COMMAND = "python -m benchmarks.frameworks"
FRAMEWORKS = ("ddp", "accelerate", "trainer", "lightning", "ray")
_PACKAGES = ("lightning", "accelerate", "transformers", "ray")
REPEATS, STEPS, WARMUP_STEPS = 2, 12, 4
_SLOW_NIC, _STRAGGLERS = "4 workers, one card at a quarter", "4 workers, each late in one step of five"
_PLAN = 'plan = { sync = { kind = "LocalSGD", every = 4 } }'
SETTINGS: dict[str, str] = {
    "2 equal workers": "[hosts]\ncount = 2\nrate_mbps = 200\n",
    "4 equal workers": "[hosts]\ncount = 4\nrate_mbps = 200\n",
    _SLOW_NIC: "".join(
        f'[[host]]\nname = "h{number}"\nrate_mbps = {rate}\n' for number, rate in enumerate((200, 200, 200, 50))
    ),
    _STRAGGLERS: "[hosts]\ncount = 4\nrate_mbps = 200\n[straggle]\nprobability = 0.2\nlow = 10.0\nhigh = 20.0\n",
}


class FrameworkCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One framework in one setting.

    Args:
        setting: a key of `SETTINGS`.
        plan: that the adapter went by; "" for the backend.
        gloo_s, offbeat_s: seconds per step of each repeat.
        is_same: whether the parameters in the end have the same bits on both; None with more than two workers.
    """

    framework: str
    setting: str
    plan: str
    gloo_s: list[float]
    offbeat_s: list[float]
    is_same: bool | None

    @property
    def ratio(self) -> float:
        """The time of a step on offbeat beside that on Gloo."""
        return statistics.median(self.offbeat_s) / statistics.median(self.gloo_s)


class FrameworkTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    command: str
    date: str
    versions: dict[str, str]
    hardware: dict[str, str | int]
    cells: list[FrameworkCell]


def scenario_of(framework: str, setting: str) -> str:
    """The scenario, as text."""
    plan = _PLAN if setting == _STRAGGLERS else ""
    return (
        f'[scenario]\nname = "frameworks"\ndescription = "{framework}, {setting}"\n{SETTINGS[setting]}'
        f'[workload]\nkind = "script"\npath = "workloads/framework_job.py"\nargs = ["{framework}"]\n'
        f'[run]\nrepeats = {REPEATS}\nsteps = {STEPS}\nwarmup_steps = {WARMUP_STEPS}\nbaseline = "gloo"\n'
        'timeout_s = 300\n[[row]]\nname = "gloo"\nsystem = "ddp"\n'
        f'[[row]]\nname = "offbeat"\nsystem = "offbeat"\n{plan}\n'
    )


def measure(framework: str, setting: str) -> FrameworkCell:
    """Run both by turns."""
    text = scenario_of(framework, setting)
    report = runner.run(Scenario.from_toml(text), text, ROOT / "benchmarks", command=COMMAND, tell=lambda *_: None)
    assert not report.failed, report.failed
    times: dict[str, list[float]] = {}
    for row in ("gloo", "offbeat"):
        for repeat in range(REPEATS):
            runs = [one for one in report.raw if (one.row, one.repeat) == (row, repeat)]
            times.setdefault(row, []).append(round(statistics.fmean(statistics.fmean(one.step_s) for one in runs), 6))
    digests = {one.digest for one in report.raw}
    return FrameworkCell(
        framework=framework,
        setting=setting,
        plan="LocalSGD(4)" if setting == _STRAGGLERS else "",
        gloo_s=times["gloo"],
        offbeat_s=times["offbeat"],
        is_same=len(digests) == 1 if setting.startswith("2 ") else None,
    )


def read() -> FrameworkTimes:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=FrameworkTimes)


def section(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    """The part of the page of results on frameworks; what was not measured is left out.

    Args:
        lines: makes a table of headings and rows.
    """
    parts = "".join([_times(lines), _imports(), c10d_faults.section(lines), torch_tests.section(lines)])
    return f"\n## frameworks\n{parts}" if parts else ""


def _times(lines: Callable[[list[str], Sequence[Sequence[str]]], str]) -> str:
    if not RESULT.exists():
        return ""
    found = read()
    ratios = {(one.setting, one.framework): f"{one.ratio:.2f} x" for one in found.cells}
    rows = [[setting, *(ratios[setting, name] for name in FRAMEWORKS)] for setting in SETTINGS]
    same = all(one.is_same is not False for one in found.cells)
    versions = ", ".join(f"{name} {found.versions[name]}" for name in _PACKAGES)
    return (
        "\nThe time of a step by way of each framework, on offbeat beside its own DDP on Gloo: by the backend, and in "
        f"the last line by its adapter with {found.cells[-1].plan}. A million parameters, 200 Mbit/s. With two "
        f"workers parameters have {'the same' if same else '**other**'} bits in the end.\n\n"
        f"{lines(['', *FRAMEWORKS], rows)}\n`{found.command}`, {found.date}, {found.hardware['processor']}, torch "
        f"{found.versions['torch']}, {versions}; medians of {REPEATS} runs by turns, {STEPS} steps each. "
        "[Raw records](frameworks.json).\n"
    )


def _imports() -> str:
    if not import_time.RESULT.exists():
        return ""
    took = import_time.read()
    alone_ms, more_ms = 1000 * statistics.median(took.without_s), 1000 * took.difference_s
    return (
        f"\n`import torch` takes {alone_ms:.0f} ms, and {more_ms:+.2f} ms with offbeat installed (the median of "
        f"{len(took.without_s)} pairs in new interpreters; `{took.command}`, {took.date}). "
        "[Raw records](import_time.json).\n"
    )


def main() -> None:
    if unknown := set(sys.argv[1:]) - set(FRAMEWORKS):
        sys.exit(f"Cannot measure {', '.join(sorted(unknown))}: there are {', '.join(FRAMEWORKS)}.")
    wanted = sys.argv[1:] or FRAMEWORKS
    cells = [one for one in read().cells if one.framework not in wanted] if sys.argv[1:] else []
    for framework in reversed([one for one in FRAMEWORKS if one in wanted]):  # what is most likely to fail comes first
        for setting in SETTINGS:
            cells.append(cell := measure(framework, setting))
            print(f"{setting}: {framework} {cell.ratio:.3f} x {cell}", file=sys.stderr, flush=True)  # noqa: T201
    measured = FrameworkTimes(
        command=COMMAND,
        date=hardware.date(),
        versions={**hardware.versions(), **{name: importlib.metadata.version(name) for name in _PACKAGES}},
        hardware=hardware.hardware(),
        cells=cells,
    )
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


if __name__ == "__main__":
    main()
