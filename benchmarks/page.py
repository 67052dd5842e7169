"""Writes benchmarks/results/README.md from the result files beside it: `python -m benchmarks.page`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.lab import results

if TYPE_CHECKING:
    from offbeat.lab.results import Report

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "README.md"
# What each scenario is for: the row that is judged, its target against the baseline, and what is compared.
TARGETS = {
    "uniform": ("offbeat", 1.03, "time per step"),
    "mnist": ("offbeat", 1.05, "time to 95 % test accuracy"),
    "loopback": ("offbeat", 1.15, "time per step"),
}
_HEAD = """# Results

Written by `make results-page` from the files in this folder; each was written by one command, which stands in it with
the scenario, the versions, the hardware and every step of every worker. Rows of one file ran interleaved on the same
links. Compare ratios within a file, never seconds between files.

The column "x ddp" is the median over the repeats of the ratio to ddp's run next to it, of times to target where there
is one, else of seconds per step, so it is not the quotient of the medians beside it.

The limit is the larger of computation and 2 (N-1)/N x S/B, the least time in which S bytes per host can be all-reduced
over links of B; what sends fewer bytes may go below it.
"""


def page() -> str:
    """The page as Markdown."""
    return _HEAD + "".join(_section(results.read(RESULTS / f"{name}.json")) for name in TARGETS)


def _section(report: Report) -> str:
    row_name, target, what = TARGETS[report.name]
    row = next(row for row in report.rows if row.row == row_name)
    met = "met" if row.ratio_to_baseline <= target else "missed"
    hardware = f"{report.hardware['cores']} cores, {report.hardware['processor']}"
    parts = [
        f"\n## {report.name}\n\n{report.description}.\n\n",
        f"Target: {what} at most {target:.2f} x {row.baseline}'s. "
        f"Measured: **{row.ratio_to_baseline:.3f} x** ({met}).\n",
    ]
    if report.name == "loopback":
        overhead_us = report.overhead_us_per_bucket[row_name]
        parts.append(f"offbeat costs {overhead_us:.0f} microseconds per bucket more than {row.baseline}.\n")
    notes = list(dict.fromkeys(event for row in report.rows for event in row.events if ": " not in event[:9]))
    parts += [f"Data: {note}.\n" for note in notes]
    parts.append(f"\n![{report.name}]({report.name}.png)\n\n{_table(report)}\n")
    parts.append(
        f"`{report.command}`, {report.date}, {hardware}, torch {report.versions['torch']}. "
        f"[Raw records]({report.name}.json), [scenario](../scenarios/{report.name}.toml).\n"
    )
    return "".join(parts)


def _table(report: Report) -> str:
    headings, rows = results.table(report)
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
