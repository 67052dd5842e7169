"""The plot of a run over time, where something went wrong: steps per second, the part spent waiting, and staleness."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from offbeat.report.formatting import brief

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat.lab.results import RawRun, ResultFile

_BIN_S = 0.5
_STEPS, _WAITING, _STALE, _SWAPS = "#0072B2", "#D55E00", "#009E73", "#CC79A7"


def draw_courses(
    figure: Any,
    report: ResultFile,
    struck: Mapping[str, Sequence[tuple[float, str]]],
    swapped: Mapping[str, Sequence[tuple[float, str]]],
) -> None:
    """A line of three strips per row, of its first repeat.

    Args:
        struck: by row: the seconds in which something went wrong, and what.
        swapped: by row: those in which another policy came to decide, and which.
    """
    grid = figure.subplots(len(report.rows), 3, sharex=True, squeeze=False)
    for row, strips in zip(report.rows, grid, strict=True):
        workers = [raw for raw in report.raw if raw.row == row.row and raw.repeat == 0]
        edges_s = [_BIN_S * index for index in range(int(max(sum(raw.step_s) for raw in workers) / _BIN_S) + 2)]
        strips[0].stairs(steps_per_s(workers, edges_s), edges_s, fill=True, color=_STEPS, alpha=0.75)
        for raw in workers:
            ends_s = list(itertools.accumulate(raw.step_s))
            parts = [100 * wait / step if step else 0.0 for wait, step in zip(raw.wait_s, raw.step_s, strict=True)]
            strips[1].plot(ends_s, parts, color=_WAITING, linewidth=0.7, alpha=0.6)
            if raw.staleness:
                strips[2].plot(ends_s, raw.staleness, color=_STALE, linewidth=0.7, alpha=0.6)
        for strip in strips:
            for when_s, _ in struck.get(row.row, ()):
                strip.axvline(when_s, color="black", linestyle=":", linewidth=0.7)
            for when_s, _ in swapped.get(row.row, ()):
                strip.axvline(when_s, color=_SWAPS, linewidth=0.7)
            strip.tick_params(labelsize=6)
            strip.spines[["top", "right"]].set_visible(False)
        for when_s, policy in swapped.get(row.row, ()):
            # Above the strip: below are bars.
            strips[0].annotate(
                brief(policy), (when_s, 1), xycoords=strips[0].get_xaxis_transform(), xytext=(1, 1),
                textcoords="offset points", rotation=30, fontsize=4, color=_SWAPS, in_layout=False,
            )  # fmt: skip
        strips[0].set_ylabel(row.row, fontsize=7)
    for strip, title in zip(
        grid[0], ("steps per second, all workers", "% of a step waiting", "staleness"), strict=True
    ):
        strip.set_title(title, fontsize=7, loc="left")
    figure.supxlabel("seconds; dotted: something goes wrong; violet: another policy decides", fontsize=7)


def steps_per_s(workers: Sequence[RawRun], edges_s: Sequence[float]) -> list[float]:
    """Steps that ended between two edges, of all workers together, per second."""
    counts = [0] * (len(edges_s) - 1)
    for raw in workers:
        for end_s in itertools.accumulate(raw.step_s):
            counts[min(int(end_s / _BIN_S), len(counts) - 1)] += 1
    return [count / _BIN_S for count in counts]
