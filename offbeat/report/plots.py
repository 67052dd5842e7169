"""The plots of a report, as SVG that fits light and dark pages."""

from __future__ import annotations

import colorsys
import functools
import io
import re
from typing import TYPE_CHECKING, Any

from offbeat.report.records import LogRecord, StepRecord
from offbeat.report.time_bins import band

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat.report.per_worker import WorkerTotals
    from offbeat.report.records import Record

# Okabe and Ito's palette: told apart by everyone; readable on white and on dark.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B0A200")
INK = "#808080"
MOST_VALUES = 6


def colour(rank: int) -> str:
    """A worker's colour, as ``#rrggbb``; no two workers share one.

    >>> colour(0), colour(8) != colour(9)
    ('#0072B2', True)
    """
    if rank < len(COLOURS):
        return COLOURS[rank]
    # Golden steps around the circle of hues never come close to an earlier one.
    red, green, blue = colorsys.hls_to_rgb(rank * 0.61803398875 % 1.0, 0.47, 0.6)
    return f"#{round(red * 255):02X}{round(green * 255):02X}{round(blue * 255):02X}"


def draw(records: Sequence[Record], workers: Sequence[WorkerTotals]) -> list[tuple[str, str]]:
    """The plots that the records allow, but for the one of the whole run (`timeline`): (title, SVG).

    Raises:
        ImportError: if matplotlib is not installed.
    """
    steps = [record for record in records if isinstance(record, StepRecord)]
    plots = [
        (f"{name} over steps", svg(functools.partial(_draw_value, records=records, name=name)))
        for name in _value_names(records)
    ]
    if steps:
        plots.append(("Milliseconds per step", svg(lambda axes: _draw_step_times(axes[0], steps))))
        plots.append(("Where the time goes", svg(lambda axes: _draw_shares(axes[0], workers))))
    return plots


def _value_names(records: Sequence[Record]) -> list[str]:
    names = dict.fromkeys(name for record in records if isinstance(record, LogRecord) for name in record.values)
    return list(names)[:MOST_VALUES]


def _draw_value(panels: Sequence[Any], records: Sequence[Record], name: str) -> None:
    points: dict[int, list[tuple[float, float]]] = {}
    for record in records:
        if isinstance(record, LogRecord) and (value := record.values.get(name)) is not None:
            points.setdefault(record.rank, []).append((record.step, value))
    _bands(panels[0], points, "step")


def _draw_step_times(axes: Any, steps: Sequence[StepRecord]) -> None:
    points: dict[int, list[tuple[float, float]]] = {}
    for step in steps:
        points.setdefault(step.rank, []).append((step.step, step.step_s * 1e3))
    _bands(axes, points, "step")
    # The first steps are an order of magnitude slower and would flatten the rest.
    usual = sorted(value for line in points.values() for _, value in line)
    axes.set_ylim(0, 1.5 * usual[int(0.98 * (len(usual) - 1))] or None)


def _draw_shares(axes: Any, workers: Sequence[WorkerTotals]) -> None:
    busy = [worker for worker in workers if worker.step_s]
    for place, worker in enumerate(busy):
        compute = worker.compute_share
        waiting = min(worker.waiting_share, 1 - compute)
        axes.barh(place, compute, color=COLOURS[2], height=0.6, label="computing" if place == 0 else None)
        axes.barh(place, waiting, left=compute, color=COLOURS[1], height=0.6, label="waiting" if place == 0 else None)
        rest = max(0.0, 1 - compute - waiting)
        label = "exchange (codec, copies)" if place == 0 else None
        axes.barh(place, rest, left=1 - rest, color=COLOURS[6], height=0.6, label=label)
    axes.set_yticks(range(len(busy)), [f"rank {worker.rank}" for worker in busy])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    legend(axes)


def _bands(axes: Any, points: dict[int, list[tuple[float, float]]], xlabel: str) -> None:
    """A line of medians for each worker, in a band that holds 80 % of its values where there are many."""
    for rank in sorted(points):
        x, low, middle, high = band(points[rank])
        axes.fill_between(x, low, high, color=colour(rank), alpha=0.18, linewidth=0)
        axes.plot(x, middle, color=colour(rank), linewidth=1.2, alpha=0.9, label=f"rank {rank}")
    axes.set_xlabel(xlabel)
    if points:
        legend(axes)


def legend(axes: Any) -> None:
    """Draw the legend above the plot, if anything in it has a name."""
    if not axes.get_legend_handles_labels()[0]:
        return
    shown = axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=8, labelcolor=INK)
    shown.set_in_layout(True)


def svg(draw_on: Callable[[Sequence[Any]], None], *, heights: Sequence[float] = (3.0,), width: float = 7.0) -> str:
    """Draw panels one above the other, which share their x axis, as SVG.

    Args:
        draw_on: is given the panels, as matplotlib's axes.
        heights, width: of the panels, in inches.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text stays text: smaller, and it can be selected. A fixed salt gives the same file for the same run.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "offbeat", "font.size": 9}):
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        panels: list[Any] = list(figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0])
        for axes in panels:
            axes.patch.set_alpha(0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(INK)
            axes.tick_params(colors=INK)
            axes.xaxis.label.set_color(INK)
            axes.grid(color=INK, alpha=0.2)
            axes.set_axisbelow(True)
        draw_on(panels)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Its size is the page's affair.
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", re.sub(r"\s*\n", "\n", text), count=1)
